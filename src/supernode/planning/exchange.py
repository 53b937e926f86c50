"""How long do cards take to exchange bytes? Ring collectives over the slowest tier that a group of ranks crosses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from supernode.hardware.machine import Machine, Tier
from supernode.schema.plan import Plan


def all_reduce_time(nbytes: float, *, cards: int, tier: Tier) -> float:
    """Return the time of a ring all-reduce: every card sends 2 (n − 1) / n of the bytes, in 2 (n − 1) messages.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
    """
    return 2 * all_gather_time(nbytes, cards=cards, tier=tier)


def all_gather_time(nbytes: float, *, cards: int, tier: Tier) -> float:
    """Return the time of a ring all-gather (or reduce-scatter) of `nbytes` in all: half an all-reduce."""
    return (cards - 1) * (nbytes / cards / tier.bandwidth + tier.latency)


def send_time(nbytes: float, *, tier: Tier) -> float:
    """Return the time of one message from card to card."""
    return nbytes / tier.bandwidth + tier.latency


def data_tier(plan: Plan, machine: Machine) -> Tier:
    """Return the slowest tier that a data group crosses."""
    tensor, block = plan.layout.tensor, plan.layout.tensor * plan.layout.data
    groups = (
        plan.cards[first + place : first + block : tensor]
        for first in range(0, plan.ranks, block)
        for place in range(tensor)
    )
    return _slowest(machine, groups)


def pipeline_tier(plan: Plan, machine: Machine) -> Tier:
    """Return the slowest tier between neighbours of the pipeline; an interleaved one goes from last to first, too."""
    block = plan.layout.tensor * plan.layout.data
    pairs = [(rank, rank + block) for rank in range(plan.ranks - block)]
    if plan.layout.interleave > 1:
        pairs += [(rank, rank + plan.ranks - block) for rank in range(block)]
    slowest = _slowest(machine, ((plan.cards[a], plan.cards[b]) for a, b in pairs))
    # Where cards are joined directly, a message takes one link of those that a card has.
    return replace(slowest, bandwidth=min(slowest.bandwidth, machine.link_bandwidth)) if machine.is_direct else slowest


def _slowest(machine: Machine, groups: Iterable[Sequence[int]]) -> Tier:
    """Return the tier of least bandwidth among those that the groups of cards cross."""
    crossed = {_crossed(machine, low=min(group), high=max(group)) for group in groups}
    return min(crossed, key=lambda tier: (tier.bandwidth, -tier.latency))


def _crossed(machine: Machine, *, low: int, high: int) -> Tier:
    """Return the innermost tier with one group that holds both cards and all between."""
    return next(tier for tier in machine.tiers if low // tier.cards == high // tier.cards)
