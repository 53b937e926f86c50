"""What do the claims of training compare? The best plan of a space, and of what a plainer trainer could do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from supernode.claims.claim import Sweep
from supernode.errors import CapacityError
from supernode.forecast.rates import card_of
from supernode.hardware.machine import Machine
from supernode.search.best import bill_of, room_of
from supernode.search.search import Choice, search
from supernode.search.space import Space
from supernode.workload.shape import ModelShape

DATA_ONLY: Mapping[str, Any] = {"most_tensor": 1, "most_context": 1, "most_expert": 1, "most_pipeline": 1}
"""Copies of the model, sharded or not (ZeRO 0 to 3), and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained: a model, on so many samples of so many tokens a step."""

    model: ModelShape
    batch: int
    sequence: int


def beside(machine: Machine, *, network: float) -> Machine:
    """Return the machine with so much of its bandwidth on the outermost tier; of a torus, on all of its links."""
    if machine.is_direct:
        card = replace(machine.card, scale_up_bandwidth=machine.card.scale_up_bandwidth * network)
        tiers = tuple(replace(tier, bandwidth=tier.bandwidth * network) for tier in machine.tiers)
        return replace(machine, card=card, tiers=tiers)
    outer = machine.tiers[-1]
    return replace(machine, tiers=(*machine.tiers[:-1], replace(outer, bandwidth=outer.bandwidth * network)))


def space_of(job: Job, machine: Machine, **limits: Any) -> Space:
    """Return the strategies of a job on all cards of a machine; nothing is put into the hosts' memory."""
    return Space(
        model=job.model, cards=(machine.card_count,), batch=job.batch, sequence=job.sequence, offloads=(0,), **limits
    )


def best(job: Job, machine: Machine, **limits: Any) -> Choice:
    """Return the fastest strategy that fits.

    Raises:
        CapacityError: nothing does.
    """
    space = space_of(job, machine, **limits)
    return search(space, card_of(machine), room_of(machine), bill_of(machine), top=1, front=False).best[0]


def swept(over: str, at: Iterable[float], figure: Callable[[float], float]) -> Sweep:
    """Return a figure at each of some places; those are left out at which what is compared does not fit."""
    points = []
    for place in at:
        with suppress(CapacityError):
            points.append((place, figure(place)))
    return Sweep(over=over, points=tuple(points))
