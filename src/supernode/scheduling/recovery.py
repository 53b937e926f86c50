"""What follows when a card fails? When it is fenced, which cards the run then uses, and when a loss is a spike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from supernode.schema.event import Fenced, Spiked
from supernode.schema.lasting import RecoverySpec
from supernode.schema.plan import Plan
from supernode.schema.report import Usual

Fit = Callable[[Plan, tuple[int, ...]], Plan]
"""Lays a plan's job out on other cards; raises `SpecError` or `CapacityError` where it does not fit."""

_WARM_UP = 20
"""Steps before a loss can be a spike: the first ones fall, and their spread says nothing of the later ones'."""
_WEIGHT = 0.05
_MOST_DEVIATIONS = 3.0
"""How far above the mean a loss counts for mean and spread: a spike must not make the next one usual."""


def counted(
    losses: Mapping[int, tuple[float, ...]], cards: Sequence[int], *, now: float, window: float
) -> dict[int, tuple[float, ...]]:
    """Return the times of each card's losses within the window, after a loss of `cards` now.

    Args:
        losses: times by card, before it; Unix time.
    """
    recent = {card: tuple(time for time in times if now - time < window) for card, times in losses.items()}
    for card in cards:
        recent[card] = (*recent.get(card, ()), now)
    return {card: times for card, times in recent.items() if times}


def is_flapping(times: Sequence[float], spec: RecoverySpec) -> bool:
    """Tell whether a card with losses at these times, all within the window, is to be fenced."""
    return 0 < spec.fence_after <= len(times)


def fence(plan: Plan, card: int, *, spares: tuple[int, ...], reason: str, fit: Fit) -> Fenced:
    """Return how the run goes on without a card, as the job's policy says.

    A spare takes the very place of the card, so that layout and numbers stay; any other layout adds its sums in another
    order, and losses agree to rounding.

    Args:
        spares: cards that the run holds and does not train on.

    Raises:
        SpecError: the job cannot be laid out on the cards that are left.
        CapacityError: their memory would not hold it.
    """
    policy = plan.job.recovery.policy
    if policy == "wait":
        return Fenced(card=card, reason=reason, plan=None, spares=spares)
    if policy == "spare" and spares:
        cards = tuple(spares[0] if own == card else own for own in plan.cards)
        return Fenced(card=card, reason=reason, plan=replace(plan, cards=cards), spares=spares[1:])
    left = tuple(own for own in (*plan.cards, *spares) if own != card)
    fitted = fit(plan, left)
    return Fenced(
        card=card, reason=reason, plan=fitted, spares=tuple(own for own in left if own not in fitted.cards)
    )  # fmt: skip


def spike(usual: Usual, step: int, loss: float, *, deviations: float) -> Spiked | None:
    """Return what is to be told of a loss that lies `deviations` or more above the usual; only of the first in a row.

    Args:
        usual: before this loss.
    """
    if not deviations or usual.count < _WARM_UP or usual.is_high or not _is_high(usual, loss, deviations):
        return None
    return Spiked(step=step, loss=loss, usual=usual.mean, deviation=math.sqrt(usual.variance))


def learned(usual: Usual, loss: float, *, deviations: float) -> Usual:
    """Return the running mean and variance of the losses after one more."""
    if not math.isfinite(loss):
        return usual
    is_high = bool(deviations) and usual.count >= _WARM_UP and _is_high(usual, loss, deviations)
    if usual.count >= _WARM_UP:
        loss = min(loss, usual.mean + _MOST_DEVIATIONS * math.sqrt(usual.variance))
    weight = max(_WEIGHT, 1 / (usual.count + 1))
    off = loss - usual.mean
    variance = (1 - weight) * (usual.variance + weight * off * off)
    return Usual(count=usual.count + 1, mean=usual.mean + weight * off, variance=variance, is_high=is_high)


def _is_high(usual: Usual, loss: float, deviations: float) -> bool:
    return loss > usual.mean + deviations * math.sqrt(usual.variance)
