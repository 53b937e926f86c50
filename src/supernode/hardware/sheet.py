"""What does a machine add up to? Memory, speed, bandwidth, watts and cost, all derived from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from supernode.hardware.machine import Machine
from supernode.hardware.parts import Card, Cooling, Link, Node, Supply, Switch
from supernode.hardware.power import Power, power
from supernode.units import show


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSheet:
    """What a machine adds up to.

    Attributes:
        memory: bytes of all cards.
        unified_memory: bytes of all cards and hosts.
        flops: dense peak FLOP/s of all cards, by precision.
        memory_bandwidth: bytes/s of all cards.
        injection_bandwidth: bytes/s that all cards together can send into the fabric.
        bisection_bandwidth: bytes/s over the narrowest cut into halves, one direction.
        peak: watts at full load.
        idle: watts at rest.
        cooling_capacity: watts of heat that the cooling carries away.
        cost: USD of everything that has a price.
        prices: kinds of parts that have a price.
        estimated_prices: those of them whose price is an estimate.
        unpriced: names of the parts without a price.
        notes: claims that do not hold, and what would.
    """

    machine: Machine
    memory: int
    unified_memory: int
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    injection_bandwidth: float
    bisection_bandwidth: float
    peak: Power
    idle: Power
    cooling_capacity: float
    cost: float
    prices: int
    estimated_prices: int
    unpriced: tuple[str, ...]
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Return (quantity, value with its unit) pairs for people."""
        machine = self.machine
        shape = " " + " × ".join(map(str, machine.shape)) if machine.shape else ""
        rows = [
            ("machine", machine.name),
            ("cards", f"{machine.card_count:,} × {machine.card.name}, {machine.node_cards} a node"),
            ("hosts", f"{machine.hosts:,}"),
            ("CPUs and DPUs of hosts", f"{machine.cpus:,} and {machine.dpus:,}"),
            ("fabric", f"{machine.topology}{shape}"),
            ("memory", show(self.memory, "B")),
            ("memory with hosts", show(self.unified_memory, "B")),
            ("memory bandwidth", show(self.memory_bandwidth, "B/s")),
            *((f"peak {name}, dense", show(rate, "FLOP/s")) for name, rate in self.flops.items()),
            ("injection bandwidth", show(self.injection_bandwidth, "B/s")),
            ("bisection bandwidth", show(self.bisection_bandwidth, "B/s")),
            ("IT power", f"{show(self.idle.it, 'W')} at rest, {show(self.peak.it, 'W')} at full load"),
            ("supply losses", show(self.peak.supply_losses, "W")),
            ("cooling", f"{show(self.peak.cooling, 'W')} for {show(self.peak.heat, 'W')} of heat"),
            ("PUE", f"{self.peak.pue:.2f}"),
            ("total power", show(self.peak.total, "W")),
            ("cost", self._cost()),
        ]
        rows += [("without a price", ", ".join(self.unpriced))] if self.unpriced else []
        return rows + [("note", note) for note in self.notes]

    def _cost(self) -> str:
        if not self.prices:
            return "not known: no part has a price"
        return f"{self.cost:,.0f} USD ({self.estimated_prices} of {self.prices} prices are estimates)"


def machine_sheet(machine: Machine) -> MachineSheet:
    """Return what a machine adds up to."""
    peak, idle = power(machine, load=1), power(machine, load=0)
    bill = _bill(machine)
    priced = [(part, count) for part, count in bill if part.price is not None]
    return MachineSheet(
        machine=machine,
        memory=machine.memory,
        unified_memory=machine.unified_memory,
        flops={name: rate * machine.card_count for name, rate in machine.card.flops.items()},
        memory_bandwidth=machine.card.memory_bandwidth * machine.card_count,
        injection_bandwidth=injection_bandwidth(machine),
        bisection_bandwidth=bisection_bandwidth(machine),
        peak=peak,
        idle=idle,
        cooling_capacity=machine.cooling.capacity * machine.cooling_units,
        cost=sum((part.price or 0.0) * count for part, count in priced),
        prices=len(priced),
        estimated_prices=sum("price" in part.estimates for part, _ in priced),
        unpriced=tuple(part.name for part, _ in bill if part.price is None),
        notes=_notes(machine, peak),
    )


def injection_bandwidth(machine: Machine) -> float:
    """Return the bytes/s that all cards together can send into the fabric; none on a machine of one card."""
    if machine.card_count == 1:
        return 0.0
    each = machine.card.scale_up_bandwidth if machine.is_direct else machine.tiers[0].bandwidth
    return each * machine.card_count


def bisection_bandwidth(machine: Machine) -> float:
    """Return the bytes/s over the narrowest straight cut into two halves, one direction.

    A torus is cut across its longest dimension, where every row crosses twice: once on the way, once on the way around.
    """
    cards = machine.card_count
    if cards == 1:
        return 0.0
    if machine.topology == "full_mesh":
        return (cards // 2) * (cards - cards // 2) * machine.link_bandwidth
    if machine.shape:
        return 2 * (cards // max(machine.shape)) * machine.link_bandwidth
    return (cards // 2) * machine.tiers[-1].bandwidth


def _bill(machine: Machine) -> list[tuple[Card | Node | Link | Switch | Supply | Cooling, int]]:
    """Return the parts with how many there are; a computer's own cores cost nothing more."""
    if machine.card.kind == "cpu" and machine.cores:
        return []
    nodes = [(machine.node, machine.hosts)] if machine.node else []
    return [
        (machine.card, machine.card_count),
        *nodes,
        *machine.switches,
        *machine.cables,
        (machine.supply, machine.supplies),
        (machine.cooling, machine.cooling_units),
    ]


def _notes(machine: Machine, peak: Power) -> tuple[str, ...]:
    notes = []
    capacity = machine.cooling.capacity * machine.cooling_units
    if peak.heat > capacity:
        unit = machine.cooling.capacity
        notes.append(
            f"{show(capacity, 'W')} of {machine.cooling.name} cooling do not carry away the {show(peak.heat, 'W')} of "
            f"heat at full load (cards alone {show(machine.card.power * machine.card_count, 'W')}); it takes "
            f"{-(-peak.heat // unit):.0f} units of {show(unit, 'W')}, "
            f"or a load of at most {_greatest_load(machine, capacity):.0%}"
        )
    rated = machine.supply.rated * machine.supplies / 2
    if peak.it > rated:
        notes.append(f"half of the supplies give {show(rated, 'W')}, less than the peak of {show(peak.it, 'W')}")
    if "power" in machine.card.estimates:
        notes.append(f"the power of card {machine.card.name} is an estimate; watts and PUE follow from it")
    return tuple(notes)


def _greatest_load(machine: Machine, capacity: float) -> float:
    idle, peak = power(machine, load=0).heat, power(machine, load=1).heat
    return max(0.0, (capacity - idle) / (peak - idle)) if peak > idle else 0.0
