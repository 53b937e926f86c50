"""Where on a torus does each axis lie? Shares the dims out among the axes so that a step waits least.

Numbered in rank order, eight cards that share matrices are a line; as a block of 2 × 2 × 2 they have three links to
each other instead of two. Every way to share the dims out is tried, each dim being cut into stretches of one axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from supernode.errors import SpecError
from supernode.forecast.efficiency import CardModel
from supernode.forecast.times import StepParts, step_parts
from supernode.hardware.machine import Machine
from supernode.placing.placement import PART_OF, Placed, exchanged_bytes, ring_bytes, sent_on
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import Software, Strategies

AXES = ("tensor", "context", "expert", "data", "pipeline")
"""As ranks are numbered, innermost first; `data` is what the experts leave of the data axis."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tensor",), "context": ("context",), "expert": ("expert",), "data": ("context", "expert", "data"),
    "pipeline": ("pipeline",),
}  # fmt: skip
"""The axes that an exchange goes over: gradients are summed over all copies of the weights."""

Ints = NDArray[np.int64]
Share = tuple[tuple[str, int], ...]
"""One dim, innermost first: an axis and how many of its members lie along it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A stretch of an axis along a dim.

    Attributes:
        dim: of the torus.
        members: along the stretch.
        stride: cards from one to the next; so many groups share each link.
        wraps: the last is a neighbour of the first.
    """

    dim: int
    members: int
    stride: int
    wraps: bool

    @property
    def rate(self) -> float:
        """Links' worth of bandwidth that each member has along it while rings go both ways.

        A line carries a ring there and back, so that it has half of what a closed one has.
        """
        return (2.0 if self.wraps else 1.0) / self.stride

    @property
    def exchange(self) -> float:
        """Load of the busiest link if each member sends every other its part of a byte."""
        half = (self.members // 2) * (self.members - self.members // 2) / self.members
        return half * self.stride / (2.0 if self.wraps else 1.0)


def runs_of(shares: Sequence[Share], names: Sequence[str]) -> tuple[Run, ...]:
    """Return the stretches of a group of axes; neighbouring ones of one dim are one."""
    found: list[Run] = []
    for dim, share in enumerate(shares):
        size, stride, open_run = math.prod(count for _, count in share), 1, 0
        for name, count in share:
            if name in names:
                if open_run:
                    last = found.pop()
                    stride_of, members = last.stride, last.members * count
                else:
                    stride_of, members = stride, count
                found.append(Run(dim=dim, members=members, stride=stride_of, wraps=stride_of * members == size))
            open_run = name in names
            stride *= count
    return tuple(found)


def gather_load(runs: Sequence[Run]) -> float:
    """Return the load of the busiest link for each byte that an all-gather (or reduce-scatter) gathers in all.

    Parts of the bytes go over the dims in different orders. What a set of dims carries is least where they come last;
    the best shares make the loads as even as these bounds let them be.
    """
    dims: dict[int, list[Run]] = {}
    for run in runs:
        dims.setdefault(run.dim, []).append(run)
    sizes, rates = zip(*(_along(mine) for mine in dims.values()), strict=True) if dims else ((), ())
    whole, least = math.prod(sizes), 0.0
    for count in range(1, len(sizes) + 1):
        for chosen in combinations(range(len(sizes)), count):
            carried = (math.prod(sizes[i] for i in chosen) - 1) / whole
            least = max(least, carried / sum(rates[i] for i in chosen))
    return least


def _along(runs: Sequence[Run]) -> tuple[int, float]:
    """Return members and rate of stretches of one dim, gone over one after the other, those nearest together first."""
    members, load = 1, 0.0
    for run in sorted(runs, key=lambda run: run.stride):
        load += (run.members - 1) / run.members / members / run.rate
        members *= run.members
    return members, (members - 1) / members / load


def exchange_load(runs: Sequence[Run]) -> float:
    """Return the load of the busiest link for each byte that a member holds for all in an all-to-all."""
    dims: dict[int, float] = {}
    for run in runs:
        dims[run.dim] = dims.get(run.dim, 0.0) + run.exchange
    return max(dims.values(), default=0.0)


def send_load(runs: Sequence[Run], *, returns: bool) -> float:
    """Return the load of the busiest link for each byte that every stage sends the next one.

    Args:
        returns: the last stage sends to the first, too; a lone open line is then folded, so that hops are twice as far.
    """
    folded = 2 if returns and len(runs) == 1 and not runs[0].wraps and runs[0].members > 2 else 1
    return max((folded * run.stride for run in runs), default=0)


def rank_order(shape: Sequence[int], degrees: Mapping[str, int], order: Sequence[str] = AXES) -> tuple[Share, ...]:
    """Return the shares of ranks that are numbered row-major, the last dim first.

    Raises:
        SpecError: an axis ends in the middle of a row that the next one cannot go on with.
    """
    shares: list[Share] = []
    wide = [(name, degrees[name]) for name in order if degrees[name] > 1]
    for size in reversed(shape):
        share: Share = ()
        while size > 1 and wide:
            name, count = wide[0]
            part = math.gcd(count, size)
            if part not in (count, size):
                raise SpecError(
                    f"{count} members of the {name} axis do not lie evenly along {size} cards of the torus",
                    hint="choose degrees that divide the torus' sides.",
                )
            share += ((name, part),)
            size //= part
            wide[0] = (name, count // part)
            wide = wide if wide[0][1] > 1 else wide[1:]
        shares.append(share)
    return tuple(reversed(shares))


def every_share(shape: Sequence[int], degrees: Mapping[str, int]) -> Iterator[tuple[Share, ...]]:
    """Yield each way to share the dims out among the axes, an axis at most once along a dim."""
    if not shape:
        if all(count == 1 for count in degrees.values()):
            yield ()
        return
    for share in _shares(shape[0], tuple(degrees.items())):
        left = dict(degrees)
        for name, count in share:
            left[name] //= count
        for rest in every_share(shape[1:], left):
            yield (share, *rest)


@cache
def _shares(size: int, degrees: tuple[tuple[str, int], ...]) -> tuple[Share, ...]:
    if size == 1:
        return ((),)
    found: list[Share] = []
    for place, (name, degree) in enumerate(degrees):
        others = degrees[:place] + degrees[place + 1 :]
        for count in range(2, size + 1):
            if size % count == 0 and degree % count == 0:
                found += [((name, count), *rest) for rest in _shares(size // count, others)]
    return tuple(found)


def cards_of(shares: Sequence[Share]) -> Ints:
    """Return the card of each rank, ranks being numbered as `AXES` says.

    An axis that lies along several dims goes through them as a snake does, so that each member is next to the one
    before.
    """
    shape = [math.prod(count for _, count in share) for share in shares]
    place = np.zeros((1, len(shape)), dtype=np.int64)
    for name in AXES:
        runs = [(dim, run) for dim in reversed(range(len(shape))) for run in runs_of(shares, (name,)) if run.dim == dim]
        at = np.zeros((math.prod(run.members for _, run in runs), len(shape)), dtype=np.int64)
        left, turns = np.arange(len(at)), np.zeros(len(at), dtype=np.int64)
        inner = len(at)
        for dim, run in reversed(runs):
            inner //= run.members
            digit = left // inner
            left = left % inner
            at[:, dim] += np.where(turns % 2 == 1, run.members - 1 - digit, digit) * run.stride
            turns += digit
        place = (at[:, None, :] + place[None, :, :]).reshape(-1, len(shape))
    return np.asarray(np.ravel_multi_index(tuple(place.T), shape), dtype=np.int64)


class TorusPlaces:
    """One strategy on one torus, under every placement.

    Args:
        machine: a torus; the strategy takes all of its cards.

    Raises:
        SpecError: it is none, or the strategy takes other numbers of cards.
    """

    def __init__(
        self, model: ModelShape, ways: Strategies, card: CardModel, software: Software, machine: Machine
    ) -> None:
        if not machine.shape or int(ways.cards) != machine.card_count:
            raise SpecError(
                f"{int(ways.cards)} cards of {machine.name}", hint="place strategies of all cards of a torus so."
            )
        experts = int(ways.expert)
        if int(ways.data) % experts:
            raise SpecError(
                f"{experts} expert groups on a data axis of {int(ways.data)}", hint="choose a divisor of it."
            )
        self.model, self.ways, self.card, self.software, self.machine = model, ways, card, software, machine
        self.degrees = {name: int(getattr(ways, name)) for name in AXES}
        self.degrees["data"] //= experts
        usual = step_parts(model, ways, card, software)
        self._alone = float(usual.compute + usual.launch + usual.optimizer + usual.step + usual.host)
        self._times: dict[tuple[str, float], tuple[float, float]] = {}
        self._bytes = {
            **ring_bytes(model, ways, software),
            "expert": exchanged_bytes(model, ways, software) if np.any(model.mixtures > 0) else 0.0,
            "pipeline": sent_on(model, ways),
        }

    def in_rank_order(self) -> Placed:
        """Return what ranks numbered row-major come to."""
        return self.at(rank_order(self.machine.shape, self.degrees))

    def all(self) -> Iterator[Placed]:
        """Yield every placement."""
        return (self.at(shares) for shares in every_share(self.machine.shape, self.degrees))

    def best(self) -> Placed:
        """Return the placement with the shortest step; of equal ones, the fewest bytes over the busiest link."""
        return self.at(self.best_shares())

    def best_shares(self) -> tuple[Share, ...]:
        """Return how that placement shares the dims out."""
        tried = [(shares, self.at(shares)) for shares in every_share(self.machine.shape, self.degrees)]
        return min(tried, key=lambda one: (float(f"{one[1].time:.9g}"), one[1].slow_bytes, one[1].order))[0]

    def at(self, shares: Sequence[Share]) -> Placed:
        """Return what a placement comes to; its order is a word for each dim, such as `tensor 2 < data 4`."""
        parts, links = {"alone": self._alone}, [0.0] * len(shares)
        for group, names in GROUPS.items():
            runs = runs_of(shares, names)
            load = self._load(group, runs)
            parts[group], bubble = self._time(group, load)
            # Filling and draining takes as long as passes do, of which the tensor axis is the part that places change.
            parts |= {"bubble": bubble} if group == "tensor" else {}
            for dim in {run.dim for run in runs}:
                links[dim] += load * self._bytes[group]
        told = tuple(" < ".join(f"{name} {count}" for name, count in share) for share in shares)
        return Placed(order=told, parts=parts, slow_bytes=max(links, default=0.0))

    def _load(self, group: str, runs: Sequence[Run]) -> float:
        if group == "expert":
            return exchange_load(runs)
        if group == "pipeline":
            return send_load(runs, returns=float(self.ways.interleave) > 1)
        return gather_load(runs)

    def _time(self, group: str, load: float) -> tuple[float, float]:
        """Return the seconds that an axis and the pipeline are waited for, on wires as fast as the axis has them."""
        if load == 0 and group != "tensor":
            return 0.0, 0.0
        key = (group, float(f"{load:.12g}"))
        if key not in self._times:
            count = math.prod(int(getattr(self.ways, name)) for name in ("data", "context")) if group == "data" else (
                int(getattr(self.ways, group))
            )  # fmt: skip
            sent = 1.0 if group == "pipeline" else (count - 1) / count
            reached = sent / load * self.machine.link_bandwidth if load else self.card.wires.inside
            tier = self.machine.tiers[0]
            wires = replace(
                self.card.wires, node_cards=2 * self.machine.card_count, inside_latency=tier.latency,
                inside=reached,
            )  # fmt: skip
            parts: StepParts = step_parts(self.model, self.ways, replace(self.card, wires=wires), self.software)
            self._times[key] = float(getattr(parts, PART_OF[group])), float(parts.bubble)
        return self._times[key]
