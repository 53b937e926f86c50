"""How do groups within groups reduce, scatter and gather? Over nodes, racks and rows, and over all dims of a torus."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from supernode.collectives.group import METHODS, Method, ring, ring_down
from supernode.collectives.message import Ints, Phase, Schedule, mirrored, phase
from supernode.errors import SpecError
from supernode.registry import lookup

NOBODY: Ints = np.zeros(0, dtype=np.int64)

# A grid's sizes are innermost first: of sizes (8, 4), rank 11 is number 3 of node 1.


def coordinates(sizes: Sequence[int]) -> Ints:
    """Return (ranks, axes), each rank's number within its group on every axis."""
    place = np.unravel_index(np.arange(math.prod(sizes)), tuple(reversed(sizes)))
    return np.stack(place[::-1], axis=1).astype(np.int64)


def lift(one: Phase, sizes: Sequence[int], order: Sequence[int], stage: int, *, first: int = 0) -> Phase:
    """Return a group's phase carried out by all groups of a grid along one axis, on the pieces they hold by then.

    Args:
        one: a phase of a reduce-scatter among `sizes[order[stage]]` ranks.
        order: axes in the order in which the pieces are split.
        stage: place in `order`; ranks have already scattered along the axes before it.
        first: number of the grid's first piece.
    """
    axis = order[stage]
    place = coordinates(sizes)
    rest = np.flatnonzero(place[:, axis] == 0)
    step = math.prod(sizes[:axis])
    base = np.zeros(rest.size, dtype=np.int64)
    for earlier in order[:stage]:
        base = base * sizes[earlier] + place[rest, earlier]
    block = math.prod(sizes[after] for after in order[stage + 1 :])
    start = first + base * sizes[axis] * block
    piece = start[None, :, None] + (one.piece * block)[:, None, None] + np.arange(block)[None, None, :]
    return phase(
        (rest[None, :] + (one.source * step)[:, None])[:, :, None],
        (rest[None, :] + (one.target * step)[:, None])[:, :, None],
        piece,
        reduces=np.broadcast_to(one.reduces[:, None, None], piece.shape),
        stride=np.broadcast_to((one.stride * block)[:, None, None], piece.shape),
        wrap=one.wrap * block,
        repeats=one.repeats,
    )


def scattering(
    sizes: Sequence[int], methods: Sequence[Method], order: Sequence[int], *, first: int = 0
) -> tuple[Phase, ...]:
    """Return a reduce-scatter, axis after axis; `methods` go with the axes, not with their order."""
    return tuple(
        lift(one, sizes, order, stage, first=first)
        for stage, axis in enumerate(order)
        for one in methods[axis](sizes[axis])
    )


def owners(sizes: Sequence[int], order: Sequence[int]) -> Ints:
    """Return (pieces,), the rank that ends with each piece when the axes are split in this order."""
    place = coordinates(sizes)
    piece = np.zeros(len(place), dtype=np.int64)
    for axis in order:
        piece = piece * sizes[axis] + place[:, axis]
    owner = np.empty_like(piece)
    owner[piece] = np.arange(len(place))
    return owner


def assemble(kind: str, algorithm: str, lanes: Sequence[tuple[Phase, ...]], owner: Ints, *, ranks: int) -> Schedule:
    """Return the schedule of a kind whose reduce-scatter is given: as it is, mirrored, or there and back.

    Raises:
        SpecError: the kind is not one of the three.
    """
    ways = {
        "reduce_scatter": lanes,
        "all_gather": [mirrored(lane) for lane in lanes],
        "all_reduce": [(*lane, *mirrored(lane)) for lane in lanes],
    }
    return Schedule(
        kind=kind,
        algorithm=algorithm,
        ranks=ranks,
        pieces=owner.size,
        share=1 / owner.size,
        lanes=tuple(lookup(kind, ways, kind="collective")),
        owner=NOBODY if kind == "all_reduce" else owner,
    )


def flat(kind: str, ranks: int, method: str = "ring") -> Schedule:
    """Return a collective among ranks that are all alike: by `ring`, `direct` exchange or `halving`."""
    return hierarchical(kind, (ranks,), (method,))


def hierarchical(kind: str, sizes: Sequence[int], methods: Sequence[str] = ()) -> Schedule:
    """Return a collective over groups within groups: scatter inside first, gather inside last.

    Args:
        kind: `all_reduce`, `reduce_scatter` or `all_gather`.
        sizes: ranks of a node, nodes of a rack, and so on; any number of them.
        methods: one a size, of `METHODS`; empty takes rings.
    """
    check_sizes(sizes)
    chosen = [lookup(name, METHODS, kind="method") for name in methods or ("ring",) * len(sizes)]
    order = range(len(sizes))
    lane = scattering(sizes, chosen, order)
    name = "+".join(methods or ("ring",) * len(sizes))
    return assemble(kind, name, [lane], owners(sizes, order), ranks=math.prod(sizes))


def multi_ring(kind: str, sizes: Sequence[int]) -> Schedule:
    """Return a torus collective that keeps every link of every dim busy, both ways.

    The vector is cut in two for each dim. Part k starts on dim k, goes on to dim k + 1, and so on; its two halves go
    round in opposite directions.

    Source: Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus interconnects", ICS 2010.
    """
    check_sizes(sizes)
    axes = [axis for axis, size in enumerate(sizes) if size > 1] or [0]
    ranks = math.prod(sizes)
    lanes: list[tuple[Phase, ...]] = []
    owner = []
    for turn in range(len(axes)):
        order = [*axes[turn:], *axes[:turn]]
        for way in (ring, ring_down):
            lanes.append(scattering(sizes, [way] * len(sizes), order, first=len(lanes) * ranks))
            owner.append(owners(sizes, order))
    return assemble(kind, "multi_ring", lanes, np.concatenate(owner), ranks=ranks)


def unequal(groups: Sequence[int]) -> Schedule:
    """Return an all-reduce over groups of different sizes: scatter inside, rings between, gather inside.

    The vector has as many pieces as the largest group has ranks; a smaller group's ranks look after several each.

    Args:
        groups: ranks of each group, numbered one group after the other.
    """
    check_sizes(groups)
    first = np.cumsum([0, *groups])
    pieces = max(groups)
    keeper = np.stack([first[g] + np.arange(pieces) * size // pieces for g, size in enumerate(groups)])
    rows = [
        (rank, keeper[g, piece], piece)
        for g, size in enumerate(groups)
        for rank in range(first[g], first[g] + size)
        for piece in range(pieces)
        if rank != keeper[g, piece]
    ]
    inside = [phase(*np.array(rows, dtype=np.int64).T, reduces=True)] if rows else []
    between = _rings_between(keeper)
    inward = [_refined(one, len(groups)) for one in inside]
    # After the rings, group g's keeper of coarse piece c holds fine piece c * groups + g.
    owner = keeper.T.ravel()
    return assemble("all_reduce", "unequal", [(*inward, *between)], owner, ranks=int(first[-1]))


def _rings_between(keeper: Ints) -> tuple[Phase, ...]:
    """Return one ring for each coarse piece, among its keepers in all groups; each piece in as many parts as groups."""
    groups, pieces = keeper.shape
    if groups == 1:
        return ()
    (one,) = ring(groups)
    coarse = np.arange(pieces)[None, :]
    step = phase(
        keeper[one.source[:, None], coarse],
        keeper[one.target[:, None], coarse],
        coarse * groups + one.piece[:, None],
        reduces=True,
        stride=-1,
        wrap=groups,
        repeats=one.repeats,
    )
    return (step,)


def _refined(one: Phase, parts: int) -> Phase:
    """Return the phase with each piece in so many parts."""
    return phase(
        one.source[:, None], one.target[:, None], one.piece[:, None] * parts + np.arange(parts), reduces=one.reduces[0]
    )  # fmt: skip


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise a SpecError unless there is a size, and each is 1 or more."""
    if not sizes or min(sizes) < 1:
        raise SpecError(f"groups of {list(sizes)} ranks", hint="give at least one size, each 1 or more.")
