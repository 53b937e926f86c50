"""What does each card of a symmetric collective send, level by level? The same algorithms in a few numbers.

A schedule lists every message, so it grows with the ranks. Where all cards do alike, one card's messages say it all:
an outline has as many legs as the algorithm has stages, for eight cards or a million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from supernode.collectives.grid import check_sizes
from supernode.collectives.tree import PARTS
from supernode.errors import SpecError
from supernode.registry import lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A stage in which each card sends like messages to cards of its group on one level.

    Attributes:
        level: index of the level, innermost 0.
        pattern: whom a card sends to: the `next` in the ring; all `others` at once; the one at the other end of a
            `pair`; one card, for a `send` without answer; its neighbours in two `tree`s, two messages at most; the
            `switch`, which adds and sends back.
        share: part of the collective's bytes in one message.
        repeats: how often, one after the other.
        distance: between the two of a pair, in cards of the level.
        reduces: whether what arrives is added to what is there.
    """

    level: int
    pattern: str
    share: float
    repeats: int = 1
    distance: int = 1
    reduces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A collective as one card sees it.

    Attributes:
        kind: all_reduce, reduce_scatter, all_gather, all_to_all or broadcast.
        algorithm: its name.
        sizes: of the groups, innermost first.
        lanes: sequences of legs that are under way at once, each on links of its own.
        apart: whether each card is in one of the lanes only, and not in all.
    """

    kind: str
    algorithm: str
    sizes: tuple[int, ...]
    lanes: tuple[tuple[Leg, ...], ...]
    apart: bool = False

    @property
    def cards(self) -> int:
        """How many take part."""
        return math.prod(self.sizes)

    def sent(self, level: int) -> float:
        """Return what each card sends on a level, in parts of the collective's bytes."""
        return sum(
            leg.share * leg.repeats * (self.sizes[level] - 1 if leg.pattern == "others" else 1)
            for lane in self.lanes
            for leg in lane
            if leg.level == level
        )


def ring_legs(level: int, size: int, share: float) -> list[Leg]:
    """Return a ring's reduce-scatter of so large a part."""
    return [Leg(level=level, pattern="next", share=share / size, repeats=size - 1, reduces=True)] if size > 1 else []


def direct_legs(level: int, size: int, share: float) -> list[Leg]:
    """Return a direct exchange's reduce-scatter."""
    return [Leg(level=level, pattern="others", share=share / size, reduces=True)] if size > 1 else []


def halving_legs(level: int, size: int, share: float) -> list[Leg]:
    """Return recursive halving.

    Raises:
        SpecError: the size is no power of two, so that cards are not alike; cost its schedule.
    """
    if size & (size - 1):
        raise SpecError(f"halving among {size} cards", hint="choose a power of two, or `ring` or `direct`.")
    steps = size.bit_length() - 1
    return [
        Leg(level=level, pattern="pair", share=share / 2 ** (step + 1), distance=size >> (step + 1), reduces=True)
        for step in range(steps)
    ]


METHOD_LEGS: Mapping[str, Callable[[int, int, float], list[Leg]]] = {
    "ring": ring_legs,
    "direct": direct_legs,
    "halving": halving_legs,
}


def hierarchical(kind: str, sizes: Sequence[int], methods: Sequence[str] = ()) -> Outline:
    """Return a collective over groups within groups, as `grid.hierarchical` schedules it."""
    check_sizes(sizes)
    names = tuple(methods) or ("ring",) * len(sizes)
    legs: list[Leg] = []
    share = 1.0
    for level, (size, name) in enumerate(zip(sizes, names, strict=True)):
        legs += lookup(name, METHOD_LEGS, kind="method")(level, size, share)
        share /= size
    return Outline(kind=kind, algorithm="+".join(names), sizes=tuple(sizes), lanes=(turned(kind, legs),))


def turned(kind: str, legs: Sequence[Leg]) -> tuple[Leg, ...]:
    """Return a reduce-scatter's legs as those of the kind: as they are, mirrored, or there and back.

    Raises:
        SpecError: the kind is none of the three.
    """
    back = tuple(replace(leg, reduces=False) for leg in reversed(legs))
    ways = {"reduce_scatter": tuple(legs), "all_gather": back, "all_reduce": (*legs, *back)}
    return lookup(kind, ways, kind="collective")


def multi_ring(kind: str, sizes: Sequence[int]) -> Outline:
    """Return the torus collective that starts on every dim at once, both ways.

    The lanes stay out of each other's way only where the dims are alike.

    Raises:
        SpecError: dims of different sizes; cost the schedule.
    """
    check_sizes(sizes)
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    if len({sizes[axis] for axis in axes}) > 1:
        raise SpecError(f"a multi-ring over dims of {list(sizes)}", hint="take equal sizes, or cost the schedule.")
    lanes: list[tuple[Leg, ...]] = []
    # A ring of two has one way only, over both of its links.
    ways = 1 if axes and sizes[axes[0]] == 2 else 2
    for turn in range(len(axes)):
        legs: list[Leg] = []
        share = 1 / (ways * len(axes))
        for axis in (*axes[turn:], *axes[:turn]):
            legs += ring_legs(axis, sizes[axis], share)
            share /= sizes[axis]
        lanes += [turned(kind, legs)] * ways
    return Outline(kind=kind, algorithm="multi_ring", sizes=tuple(sizes), lanes=tuple(lanes) or ((),))


def direct_exchange(level: int, size: int) -> list[Leg]:
    """Return an all-to-all in which each card sends to all others of its group at once."""
    return [Leg(level=level, pattern="others", share=1 / size)] if size > 1 else []


def ring_exchange(level: int, size: int) -> list[Leg]:
    """Return an all-to-all over a one-way ring: what is k cards away is passed on k times."""
    if size == 1:
        return []
    return [Leg(level=level, pattern="next", share=1 / size, repeats=size * (size - 1) // 2)]


EXCHANGE_LEGS: Mapping[str, Callable[[int, int], list[Leg]]] = {"direct": direct_exchange, "ring": ring_exchange}


def exchange(sizes: Sequence[int], methods: Sequence[str] = ()) -> Outline:
    """Return the all-to-all that sorts level by level; with one size and `direct`, the plain one."""
    check_sizes(sizes)
    names = tuple(methods) or ("direct",) * len(sizes)
    legs = [
        leg
        for level, (size, name) in enumerate(zip(sizes, names, strict=True))
        for leg in lookup(name, EXCHANGE_LEGS, kind="method")(level, size)
    ]
    return Outline(kind="all_to_all", algorithm="+".join(names), sizes=tuple(sizes), lanes=(tuple(legs),))


def flat_ring(kind: str, sizes: Sequence[int]) -> Outline:
    """Return one ring over all cards, whatever groups they are in: every step waits for the slowest level."""
    check_sizes(sizes)
    cards = math.prod(sizes)
    step = Leg(level=0, pattern="next", share=1 / cards, repeats=cards - 1, reduces=True)
    lanes = tuple(turned(kind, [replace(step, level=level)]) for level, size in enumerate(sizes) if size > 1)
    return Outline(kind=kind, algorithm="flat_ring", sizes=tuple(sizes), lanes=lanes or ((),), apart=True)


def double_tree(ranks: int, *, level: int = 0, parts: int = PARTS) -> Outline:
    """Return the double binary tree's all-reduce, from above: its first and last steps send less than is charged."""
    check_sizes((ranks,))
    depth = max(0, ranks - 1).bit_length()
    leg = Leg(level=level, pattern="tree", share=1 / (2 * parts), repeats=depth + parts - 1, reduces=True)
    lanes = ((leg, replace(leg, reduces=False)),) if ranks > 1 else ((),)
    return Outline(kind="all_reduce", algorithm="double_tree", sizes=(ranks,), lanes=lanes)


def in_network(ranks: int, *, parts: int = PARTS) -> Outline:
    """Return the all-reduce in which the switch adds."""
    check_sizes((ranks,))
    leg = Leg(level=0, pattern="switch", share=1 / parts, repeats=parts + 1, reduces=True)
    return Outline(kind="all_reduce", algorithm="in_network", sizes=(ranks,), lanes=((leg,) if ranks > 1 else (),))


def binomial(ranks: int) -> Outline:
    """Return the broadcast in which those who have the vector double each time."""
    check_sizes((ranks,))
    steps = (ranks - 1).bit_length()
    legs = tuple(Leg(level=0, pattern="send", share=1.0, distance=1 << step) for step in range(steps))
    return Outline(kind="broadcast", algorithm="binomial", sizes=(ranks,), lanes=(legs,))


def chain(ranks: int, *, parts: int = PARTS) -> Outline:
    """Return the broadcast in which each card passes on one part while the next arrives."""
    check_sizes((ranks,))
    legs = (Leg(level=0, pattern="next", share=1 / parts, repeats=ranks - 2 + parts),) if ranks > 1 else ()
    return Outline(kind="broadcast", algorithm="chain", sizes=(ranks,), lanes=(legs,))
