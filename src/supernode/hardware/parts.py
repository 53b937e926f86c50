"""What are machines made of? Cards, nodes, links, switches, supplies and cooling as values, all in SI and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from supernode.errors import SpecError

KINDS = ("gpu", "npu", "tpu", "xpu", "cpu")


def _check(part: Card | Node | Link | Switch | Supply | Cooling, *, may_be_zero: tuple[str, ...]) -> None:
    """Check that every number of a part is finite and positive (or zero, where that means something)."""
    for entry in fields(part):
        value = getattr(part, entry.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        least_is_met = value >= 0 if entry.name in may_be_zero else value > 0
        if not math.isfinite(value) or not least_is_met:
            limit = "of 0 or more" if entry.name in may_be_zero else "above 0"
            raise SpecError(
                f"`{entry.name}` of {type(part).__name__.lower()} {part.name} is {value}",
                hint=f"give `{entry.name}` a finite number {limit}.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One accelerator, or a CPU core that stands in for one.

    Attributes:
        kind: gpu, npu, tpu, xpu or cpu.
        memory: bytes.
        memory_bandwidth: bytes/s.
        flops: dense peak FLOP/s of matrix products, by precision (`float32`, `bfloat16`, `float8`).
        links: scale-up links.
        scale_up_bandwidth: bytes/s that all links carry together, one direction.
        scale_up_latency: seconds that a small message takes to a neighbour.
        power: watts at full load.
        idle_power: watts at rest.
        price: USD; None where nobody sells it.
        efficiency: part of the peak that large matrix products reach.
        source: where the numbers come from.
        estimates: names of the attributes that are estimates.
    """

    name: str
    vendor: str
    kind: str
    memory: int
    memory_bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    links: int
    scale_up_bandwidth: float
    scale_up_latency: float
    power: float
    idle_power: float
    price: float | None = None
    efficiency: float = 1.0
    source: str = ""
    estimates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, may_be_zero=("scale_up_latency", "idle_power", "price"))
        if self.kind not in KINDS:
            raise SpecError(f"`kind` of card {self.name} is {self.kind!r}", hint=f"choose one of {', '.join(KINDS)}.")
        if not self.flops or not all(math.isfinite(rate) and rate > 0 for rate in self.flops.values()):
            raise SpecError(f"`flops` of card {self.name} is {dict(self.flops)}", hint="give FLOP/s above 0.")
        if self.efficiency > 1 or self.idle_power > self.power:
            raise SpecError(
                f"card {self.name}: efficiency {self.efficiency}, idle_power {self.idle_power} W, power {self.power} W",
                hint="`efficiency` is at most 1, and `idle_power` at most `power`.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What surrounds the cards of one host.

    Attributes:
        cards: cards that the host holds.
        cpus: CPU packages.
        memory: bytes of host memory.
        power: watts at full load without the cards: CPUs, memory, network cards, fans or pumps.
        idle_power: watts at rest, likewise.
        price: USD without the cards; None where nobody sells it.
    """

    name: str
    cards: int
    cpus: int
    memory: int
    power: float
    idle_power: float
    price: float | None = None
    source: str = ""
    estimates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, may_be_zero=("power", "idle_power", "price"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of connection between two ends.

    Attributes:
        bandwidth: bytes/s, one direction.
        latency: seconds from end to end for a small message, software included.
        power: watts for both ends together.
        price: USD for cable and both ends.
    """

    name: str
    medium: str
    bandwidth: float
    latency: float
    power: float
    price: float | None = None
    source: str = ""
    estimates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, may_be_zero=("latency", "power", "price"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One switch.

    Attributes:
        port_bandwidth: bytes/s of one port, one direction.
        latency: seconds from port to port.
        power: watts at full load.
        idle_power: watts at rest.
    """

    name: str
    ports: int
    port_bandwidth: float
    latency: float
    power: float
    idle_power: float
    price: float | None = None
    source: str = ""
    estimates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, may_be_zero=("latency", "idle_power", "price"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """One power supply unit.

    Attributes:
        rated: watts that it delivers at most.
        efficiency: delivered over drawn watts at half load.
    """

    name: str
    rated: float
    efficiency: float
    price: float | None = None
    source: str = ""
    estimates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, may_be_zero=("price",))
        if self.efficiency > 1:
            raise SpecError(f"`efficiency` of supply {self.name} is {self.efficiency}", hint="it is at most 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooling:
    """How heat leaves.

    Attributes:
        overhead: watts of pumps, fans and chillers for one watt of heat; 1 + overhead is its part of the PUE.
        capacity: watts of heat that one unit carries away.
        price: USD of one unit.
    """

    name: str
    overhead: float
    capacity: float
    price: float | None = None
    source: str = ""
    estimates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, may_be_zero=("overhead", "price"))
