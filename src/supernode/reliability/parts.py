"""Which parts does a machine need, and which can it spare? A machine as groups of like parts that fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from supernode.errors import SpecError
from supernode.hardware.failing import Failing, failing
from supernode.hardware.machine import Machine
from supernode.reliability.chains import Group, Standing, series, standing

COMMON = 0.05
"""Part of a unit's failures that takes its reserve along: an estimate; IEC 61508-6, annex D, has 1 to 10%."""
FANS = 6  # of an air-cooled node, of which five must turn; an estimate
MOST_SPARES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """What a machine has more than it needs.

    Attributes:
        spares: nodes that are up and idle, any of which can take any node's place.
        supplies: twice the power supplies of a node, so that half of them carry it.
        paths: many paths: a card goes on with any cable that is left, and the fabric without any one switch.
        cooling: one cooling unit more than the heat needs.
        control: a second controller.
        feeds: a second feed of power, each able to carry all.
        disks: a node's disk twice.
    """

    spares: int = 0
    supplies: bool = False
    paths: bool = False
    cooling: bool = False
    control: bool = False
    feeds: bool = False
    disks: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.spares, bool) or not isinstance(self.spares, int) or not 0 <= self.spares <= MOST_SPARES:
            raise SpecError(f"`spares` is {self.spares!r}", hint=f"choose 0 to {MOST_SPARES:,} nodes.")

    @property
    def words(self) -> str:
        """What there is, in words."""
        spare = f"{self.spares} spare node{'s' if self.spares != 1 else ''}" if self.spares else ""
        had = [WORDS[each.name] for each in fields(self) if each.name != "spares" and getattr(self, each.name)]
        return ", ".join([spare] * bool(spare) + had) or "none"


WORDS: Mapping[str, str] = {
    "spares": "spare nodes", "supplies": "two supplies", "paths": "many paths", "cooling": "spare cooling",
    "control": "two controllers", "feeds": "two feeds", "disks": "mirrored disks",
}  # fmt: skip
NOTHING = Redundancy()
EVERYTHING = Redundancy(spares=4, supplies=True, paths=True, cooling=True, control=True, feeds=True, disks=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A machine as what can fail.

    Attributes:
        groups: all of which must stand for the machine to run a job on all its cards.
        node: what takes one node out, by part: failures per second of one node.
        software: failures per second of the job that a restart sets right.
        failures: per second, of any part that somebody must then repair.
    """

    groups: tuple[Group, ...]
    node: Mapping[str, float]
    software: float
    failures: float


def parts_of(
    machine: Machine, redundancy: Redundancy, *, rates: Mapping[str, Failing] | None = None, common: float = COMMON
) -> Parts:
    """Return the parts of a machine.

    Args:
        rates: of each kind of part; by default the catalogue's.
        common: part of a unit's failures that takes its reserve along.

    Raises:
        SpecError: the machine is this computer, for whose cores no rates are known.
    """
    if machine.node is None:
        raise SpecError(
            f"no failure rates are known of {machine.name}, whose cards are cores",
            hint="name a machine of the catalogue, such as `--machine supernode-512`.",
        )
    known = rates or failing()
    inside = tuple(_inside(machine, redundancy, known, common))
    out = {group.name: standing(group) for group in inside}
    whole = series(out.values())
    # Units of a series fail one by one; the mean repair is weighed by how often each is the cause.
    repair = whole.outage
    nodes = Group(
        name="node", units=machine.hosts + redundancy.spares, needed=machine.hosts, rate=_rate(whole), repair=repair,
        stops=True,
    )  # fmt: skip
    around = tuple(_around(machine, redundancy, known, common))
    failures = sum(group.failures for group in inside) * nodes.units + sum(group.failures for group in around)
    return Parts(
        groups=(nodes, *around), node={name: _rate(one) for name, one in out.items()},
        software=known["software"].rate * machine.card_count, failures=failures,
    )  # fmt: skip


def _rate(one: Standing) -> float:
    return one.frequency / one.availability


def _inside(machine: Machine, redundancy: Redundancy, known: Mapping[str, Failing], common: float) -> Iterator[Group]:
    """Yield the groups of one node, each of which it needs."""

    def group(name: str, units: int, needed: int, count: int = 1) -> Group:
        kind = known[name]
        return Group(
            name=name, units=units, needed=needed, rate=kind.rate, repair=kind.repair, common=common, count=count
        )  # fmt: skip

    cards = machine.node_cards
    for name in ("card", "memory", "network_card"):
        yield group(name, cards, cards)
    yield group("host", 1, 1)
    yield group("disk", 2 if redundancy.disks else 1, 1)
    needed = max(1, math.ceil(machine.supplies / 2 / machine.hosts))
    yield group("supply", needed * (2 if redundancy.supplies else 1), needed)
    if machine.cooling.name == "air":
        yield group("fan", FANS, FANS - 1)
    if cables := cables_of(machine):
        each = cables / machine.hosts
        if redundancy.paths:
            yield group("cable", max(2, math.ceil(2 * each / cards)), 1, count=cards)
        else:
            yield group("cable", math.ceil(each), math.ceil(each))


def _around(machine: Machine, redundancy: Redundancy, known: Mapping[str, Failing], common: float) -> Iterator[Group]:
    """Yield the groups that all nodes share."""

    def group(name: str, units: int, needed: int) -> Group:
        kind = known[name]
        return Group(name=name, units=units, needed=needed, rate=kind.rate, repair=kind.repair, common=common)

    if switches := sum(count for _, count in machine.switches):
        units = max(2, switches) if redundancy.paths else switches
        yield group("switch", units, units - 1 if redundancy.paths else units)
    yield group("cooling", machine.cooling_units + redundancy.cooling, machine.cooling_units)
    yield group("feed", 1 + redundancy.feeds, 1)
    yield group("controller", 1 + redundancy.control, 1)


def cables_of(machine: Machine) -> int:
    """Return how many cables leave nodes; inside a node a card's failures count its links.

    A torus has one for each link between cards of different nodes; a fabric of switches at least one a card.
    """
    if machine.hosts == 1:
        return 0
    if machine.topology == "full_mesh":
        inside = machine.node_cards - 1
        return machine.card_count * (machine.card_count - 1 - inside) // 2
    if not machine.is_direct:
        return sum(count for _, count in machine.cables) or machine.card_count
    cards, crossing = np.arange(machine.card_count).reshape(machine.shape), 0
    for axis, size in enumerate(machine.shape):
        if size == 1:
            continue
        beside = np.roll(cards, -1, axis)
        apart = cards // machine.node_cards != beside // machine.node_cards
        # In a line of two both neighbours are the same card, over one cable.
        crossing += int(apart.sum()) // (2 if size == 2 else 1)
    return crossing
