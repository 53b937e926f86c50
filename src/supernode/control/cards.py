"""Which cards does a run hold, and how is it laid out once one of them is not used any more?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from supernode.errors import CapacityError, SpecError
from supernode.hardware.machine import Machine
from supernode.planning.layout import fit_layout
from supernode.planning.planner import make_plan
from supernode.scheduling.pool import Pool
from supernode.scheduling.recovery import Fit
from supernode.schema.job import JobSpec
from supernode.schema.plan import Plan
from supernode.schema.slice import Request
from supernode.schema.trace import ModelTrace


def cards_to_train_on(job: JobSpec, cards: int) -> int:
    """Return how many of a machine's cards a run may train on: its spares are none of them.

    Raises:
        SpecError: there are no more cards than spares.
    """
    left = cards - job.recovery.spares
    if left < 1:
        raise SpecError(
            f"`recovery.spares` is {job.recovery.spares}, and {cards} cards are up",
            hint=f"set it to at most {cards - 1}.",
        )
    return left


@contextmanager
def held(pool: Pool, ranks: int, spares: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Hold the cards of a run meanwhile; yields those that it trains on, in rank order, and its spares.

    Raises:
        CapacityError: so many are not free.
    """
    free = pool.free_cards
    if spares and ranks <= free < ranks + spares:
        raise CapacityError(
            f"{ranks} cards and {spares} spares are asked for, and {free} cards are free",
            hint=f"set `recovery.spares` to at most {free - ranks}.",
        )
    one = pool.allocate(Request(cards=ranks + spares))
    try:
        yield one.cards[:ranks], one.cards[ranks:]
    finally:
        pool.release(one)


def fitting(machine: Machine, trace: ModelTrace | None) -> Fit:
    """Return what lays a plan's job out on other cards of a machine, as near to its own layout as can be."""

    def fit(plan: Plan, cards: tuple[int, ...]) -> Plan:
        job = fit_layout(plan.job, len(cards))
        made = make_plan(job, machine, cards, vocabulary=plan.vocabulary, trace=trace)
        return replace(made, trace=None)

    return fit
