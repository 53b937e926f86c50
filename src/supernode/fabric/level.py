"""What does a level of the fabric give each card, and what do the legs of a collective cost on it?

Closed forms: their cost depends on how many different levels there are, not on how many cards. They hold where all
cards do alike on undamaged, equal links, and tests prove them equal to the flows of `flows` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from supernode.collectives.outline import Leg, Outline
from supernode.errors import SpecError
from supernode.hardware.machine import Machine
from supernode.registry import lookup

Seconds = float | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How groups of the level below are joined: card k of each with card k of the others.

    Attributes:
        kind: ring, full_mesh or switch.
        size: groups that are joined, of one card each on the innermost level.
        bandwidth: bytes/s of one link, one direction: to a neighbour, or of the card's port where a switch is between.
            A ring of two joins its cards by two links.
        latency: seconds over one link; the way through a switch is two.
        overhead: seconds that each message keeps its sender busy beside.
        half: bytes of a message at which a link reaches half of its bandwidth.
    """

    kind: str
    size: int
    bandwidth: float
    latency: float = 0.0
    overhead: float = 0.0
    half: float = 0.0

    def __post_init__(self) -> None:
        lookup(self.kind, LOADS, kind="kind of level")
        if self.size < 1 or not self.bandwidth > 0 or min(self.latency, self.overhead, self.half) < 0:
            raise SpecError(
                f"a level of size {self.size}, bandwidth {self.bandwidth}, latency {self.latency}",
                hint="`size` is 1 or more, `bandwidth` above 0, and the rest 0 or more.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What is taken for granted about links; the defaults are ours, the others those of simulators we compare with.

    Attributes:
        shared_ports: messages that leave or enter by one port share it; False lets each have all of it.
        store_and_forward: a switch passes a message on once it has all of it; False lets it flow through.
    """

    shared_ports: bool = True
    store_and_forward: bool = False


OURS = Assumptions()

MESSAGE_OVERHEAD = (
    0.5e-6  # seconds; estimate, order of the gap that LogGP measurements of RDMA show; calibrate for yours
)

Load = Callable[[Leg, int], tuple[float, int]]


def _ring(leg: Leg, size: int) -> tuple[float, int]:
    if leg.pattern == "others":
        # Every card sends as many messages over d links as there are cards d away; both ways carry half.
        return (size * size // 4) / 2, size // 2
    if leg.pattern == "pair":
        # Cards i and i XOR d exchange: d messages cross the middle of each block; opposite ones take both ways round.
        return (size / 4, leg.distance) if 2 * leg.distance == size else (leg.distance, leg.distance)
    return (0.5 if size == 2 else 1.0), 1


def _full_mesh(leg: Leg, size: int) -> tuple[float, int]:
    return 1.0, 1


def _switch(leg: Leg, size: int) -> tuple[float, int]:
    messages = {"others": size - 1, "tree": 2}.get(leg.pattern, 1)
    return float(messages), 1 if leg.pattern == "switch" else 2


LOADS: Mapping[str, Load] = {"ring": _ring, "full_mesh": _full_mesh, "switch": _switch}
"""Messages of one leg on the busiest link of a level, and links that a message crosses at most."""

CARRIES = {
    "ring": ("next", "others", "pair"),
    "full_mesh": ("next", "others", "pair", "send"),
    "switch": ("next", "others", "pair", "send", "tree", "switch"),
}
"""Patterns whose load is known in closed form."""


def leg_time(leg: Leg, level: Level, nbytes: Seconds, *, given: Assumptions = OURS) -> Seconds:
    """Return the time of a leg, all repeats, the overhead of messages left out.

    Args:
        nbytes: of the collective: of one card's whole buffer. An array gives an array.

    Raises:
        SpecError: no closed form for the pattern on this kind of level.
    """
    if leg.pattern not in CARRIES[level.kind]:
        raise SpecError(f"no closed form for a {leg.pattern} on a {level.kind}", hint="cost its schedule over flows.")
    load, hops = LOADS[level.kind](leg, level.size)
    if not given.shared_ports and level.kind == "switch":
        load = 1.0
    if given.store_and_forward:
        load += hops - 1 if level.kind == "switch" else 0
    one = (leg.share * np.asarray(nbytes, dtype=np.float64) + level.half) / level.bandwidth
    return leg.repeats * (hops * level.latency + load * one)


def leg_overhead(leg: Leg, level: Level) -> float:
    """Return how long a leg's messages keep their sender busy."""
    messages = {"others": level.size - 1, "tree": 2}.get(leg.pattern, 1)
    return leg.repeats * messages * level.overhead


def outline_time(outline: Outline, levels: Sequence[Level], nbytes: Seconds, *, given: Assumptions = OURS) -> Seconds:
    """Return the time of a collective on levels of the same sizes; lanes move on together.

    Raises:
        SpecError: the sizes differ, or a leg has no closed form.
    """
    check_fit(outline.sizes, levels)
    total: Seconds = 0.0
    for together in zip(*outline.lanes, strict=True):
        slowest: Seconds = 0.0
        for leg in dict.fromkeys(together):
            slowest = np.maximum(slowest, leg_time(leg, levels[leg.level], nbytes, given=given))
        busy = [leg_overhead(leg, levels[leg.level]) for leg in together]
        total = total + slowest + (max(busy) if outline.apart else sum(busy))
    return total


def port_bound(outline: Outline, levels: Sequence[Level], nbytes: float) -> float:
    """Return seconds that no schedule of these bytes can beat: each card's links on the busiest level never rest."""
    return max(
        outline.sent(index) * nbytes / (level.bandwidth * LINKS[level.kind](level.size))
        for index, level in enumerate(levels)
    )


LINKS: Mapping[str, Callable[[int], int]] = {
    "ring": lambda _: 2,
    "full_mesh": lambda n: max(1, n - 1),
    "switch": lambda _: 1,
}
"""Links of a card on a level."""


def check_fit(sizes: Sequence[int], levels: Sequence[Level]) -> None:
    """Raise a SpecError unless a collective's groups are the levels'."""
    if tuple(sizes) != tuple(level.size for level in levels):
        raise SpecError(
            f"a collective over groups of {list(sizes)} on levels of {[level.size for level in levels]}",
            hint="outline the collective with the levels' own sizes.",
        )


def levels_of(machine: Machine, *, overhead: float = MESSAGE_OVERHEAD) -> tuple[Level, ...]:
    """Return a machine's levels, innermost first; the last one's last group may be part-filled.

    Tiers of which the machine is no whole number are left out.

    Args:
        overhead: seconds that each message keeps its sender busy beside.
    """
    latency = machine.tiers[0].latency
    if machine.is_direct:
        kind = "full_mesh" if machine.topology == "full_mesh" else "ring"
        sizes = machine.shape[::-1] or (machine.card_count,)
        rate = machine.link_bandwidth
        return tuple(
            Level(kind=kind, size=size, bandwidth=rate, latency=latency, overhead=overhead) for size in sizes
        )  # fmt: skip
    levels, below = [], 1
    for tier in machine.nested_tiers:
        # A tier's latency is from card to card: two links, one up and one down.
        levels.append(
            Level(
                kind="switch",
                size=-(-tier.cards // below),
                bandwidth=tier.bandwidth,
                latency=tier.latency / 2,
                overhead=overhead,
            )
        )
        below = tier.cards
    return tuple(levels)
