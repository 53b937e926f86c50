"""Why does a strategy take as long as it does? Its parts, and what each resource would bring if it were 10% better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from supernode.errors import CapacityError
from supernode.forecast.efficiency import CardModel
from supernode.forecast.network import Curves
from supernode.forecast.times import step_parts
from supernode.search.offload import Room, holding, moved, waiting
from supernode.search.search import DEGREES, OBJECTIVES, Bill, Choice, winner
from supernode.search.space import Space, row_table

BETTER = 1.1

Change = Callable[[CardModel, Room], tuple[CardModel, Room]]


def _peaks(card: CardModel, room: Room) -> tuple[CardModel, Room]:
    rates = tuple(rate * BETTER for rate in card.peaks)
    return replace(card, peaks=rates, exponentials=card.exponentials * BETTER), room


def _bandwidth(card: CardModel, room: Room) -> tuple[CardModel, Room]:
    return replace(card, memory_bandwidth=card.memory_bandwidth * BETTER), room


def _inside(card: CardModel, room: Room) -> tuple[CardModel, Room]:
    wires = card.wires
    curves = _faster(wires.curves, links=BETTER)
    return replace(card, wires=replace(wires, inside=wires.inside * BETTER, curves=curves)), room


def _outside(card: CardModel, room: Room) -> tuple[CardModel, Room]:
    return replace(card, wires=replace(card.wires, outside=card.wires.outside * BETTER)), room


def _latency(card: CardModel, room: Room) -> tuple[CardModel, Room]:
    wires = card.wires
    inside, outside = wires.inside_latency / BETTER, wires.outside_latency / BETTER
    curves = _faster(wires.curves, latency=BETTER)
    changed = replace(wires, inside_latency=inside, outside_latency=outside, curves=curves)
    return replace(card, wires=changed), room


def _faster(curves: Curves | None, *, links: float = 1.0, latency: float = 1.0) -> Curves | None:
    """Return measured collectives on better links; what the quickest of a curve takes is latency, the rest its bytes.

    One computer's ranks are one node, so that all of it is the node's.
    """
    if curves is None:
        return None
    better = {
        key: (sizes, seconds.min() / latency + (seconds - seconds.min()) / links)
        for key, (sizes, seconds) in curves.seconds.items()
    }
    return Curves(seconds=better)


def _launches(card: CardModel, room: Room) -> tuple[CardModel, Room]:
    fitted = card.fitted
    # A core that launches by itself hides nothing of it: there it is the gap behind each kernel.
    tail = fitted.tail if fitted.launch else fitted.tail / BETTER
    return replace(card, fitted=replace(fitted, launch=fitted.launch / BETTER, tail=tail)), room


def _host(card: CardModel, room: Room) -> tuple[CardModel, Room]:
    return card, replace(room, host_bandwidth=room.host_bandwidth * BETTER)


RESOURCES: Mapping[str, Change] = {
    "compute": _peaks,
    "memory bandwidth": _bandwidth,
    "links in the node": _inside,
    "network between nodes": _outside,
    "latency": _latency,
    "launches": _launches,
    "host link": _host,
}
CAPACITY = "memory"
"""The one resource that makes no strategy faster but may allow a faster one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What a strategy's time consists of.

    Attributes:
        parts: seconds of a step: compute (with launches, optimizer, what surrounds a step, and what axes cost a host
            that computes itself), waiting for the tensor, context, expert, pipeline and data axes, and for what is
            offloaded.
        held: bytes of the fullest card by part, and what of them lies with the host, negative.
        saved: by resource, the part of the step's time that goes when it is 10% better; for memory, when there is 10%
            more of it and the rest of the strategy may follow at the same degrees.
    """

    parts: Mapping[str, float]
    held: Mapping[str, float]
    saved: Mapping[str, float]

    @property
    def binds(self) -> str:
        """The resource that brings most."""
        return max(self.saved, key=lambda name: self.saved[name])

    @property
    def largest_wait(self) -> str:
        """The largest part that is not computing."""
        return max((name for name in self.parts if name != "compute"), key=lambda name: self.parts[name])


def why(space: Space, card: CardModel, room: Room, bill: Bill, choice: Choice) -> Why:
    """Return what a choice's time consists of and depends on."""
    parts = time_parts(space, card, room, choice)
    now = sum(parts.values())
    # Where the host's launches bind, a faster core leaves the model less time to hide the context axis behind, though
    # launches leave as much: up to 0.2% of a step that nobody loses.
    saved = {
        name: max(0.0, 1 - sum(time_parts(space, *change(card, room), choice).values()) / now)
        for name, change in RESOURCES.items()
    }
    held = held_parts(space, choice)
    return Why(parts=parts, held=held, saved=saved | {CAPACITY: _with_more_memory(space, card, room, bill, choice)})


def time_parts(space: Space, card: CardModel, room: Room, choice: Choice) -> dict[str, float]:
    """Return the seconds of a choice's step by what it waits for."""
    ways, software = choice.ways(space), choice.software(space)
    step = step_parts(space.model, ways, card, software)
    held = holding(space.model, ways, software)
    waits = {
        "tensor": step.tensor,
        "context": step.context,
        "expert": step.expert,
        "pipeline": step.bubble + step.transfer,
        "data": step.data,
    }
    away = waiting(held, int(choice.axes["offload"]), ways, step.total - step.optimizer - step.step, room)
    parts = {"compute": step.total - sum(waits.values()), **waits, "offload": away}
    return {name: float(seconds) for name, seconds in parts.items()}


def held_parts(space: Space, choice: Choice) -> dict[str, float]:
    """Return the bytes that a choice's fullest card holds, by part."""
    held = holding(space.model, choice.ways(space), choice.software(space))
    parts = {entry.name: float(getattr(held.parts, entry.name)) for entry in fields(held.parts)}
    return parts | {"on the host": -float(moved(held, int(choice.axes["offload"])))}


def _with_more_memory(space: Space, card: CardModel, room: Room, bill: Bill, choice: Choice) -> float:
    """Return the part of the time that the fastest strategy of the same degrees saves with more memory."""
    table = row_table(space)
    alike = np.flatnonzero(np.logical_and.reduce([table[name] == choice.axes[name] for name in DEGREES]))
    times = []
    for memory in (room.memory, room.memory * BETTER):
        larger = replace(room, memory=memory)
        try:
            times.append(winner(space, card, larger, bill, alike, column=OBJECTIVES["time"], table=table).time)
        except CapacityError:
            return 0.0
    return max(0.0, 1 - times[1] / times[0])


def against(first: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return by how much another strategy's parts differ from the first one's, largest difference first."""
    apart = [(name, other[name] - value) for name, value in first.items()]
    return sorted(apart, key=lambda item: -abs(item[1]))
