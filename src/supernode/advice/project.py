"""What does a whole project take? Days, restarts, energy, money and carbon, each as low, middle and high."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from supernode.advice.pace import Pace, pace_of
from supernode.advice.question import Question
from supernode.advice.terms import (
    Terms,
    assumptions,
    band_of,
    check_steps,
    every_of,
    open_end,
    overhead_of,
    restart_seconds,
    writing_seconds,
)
from supernode.errors import CapacityError
from supernode.hardware.machine import Machine
from supernode.hardware.power import power
from supernode.search.best import TARIFF, bill_of, has_price
from supernode.simulation.completion import Lives, Rhythm, causes, draw_lives, expected_seconds
from supernode.simulation.goodput import LLAMA_RATE

# 10% and 90% of a normal distribution lie so many standard deviations from its middle.
TENTH = 1.2815515655446004
NINE_TENTHS = (0.1, 0.5, 0.9)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure with what it is in one case of ten below, in the middle, and in one of ten above."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What a project takes.

    Attributes:
        steps: optimizer steps.
        seconds: from start to end.
        ideal: seconds of the steps alone, each at its best: without overhead, failures and checkpoints.
        overhead: what steps take over a project, over what they take at their best.
        goodput: part of the time in steps that count.
        restarts: how often it begins again.
        by_cause: of them, on average, where the rates are the published ones.
        interval: seconds between checkpoints; infinity for none.
        save: seconds that one stops training.
        restart: seconds from a failure until the work goes on.
        mtbf: seconds between failures of the whole job.
        energy: joules from the grid.
        pue: power usage effectiveness at full load.
        cost: USD; None where the hardware has no price.
        carbon: kg of CO2.
        card_hours: hours times cards.
        band: part by which four of five step times may be off.
        within: likewise of whole projects, failures left out.
        twice_the_failures: seconds on average, were failures twice as frequent; infinity if never done.
        assumptions: what was assumed, as sentences.
    """

    question: Question
    machine: Machine
    pace: Pace
    steps: int
    seconds: Spread
    ideal: float
    overhead: float
    goodput: Spread
    restarts: Spread
    by_cause: Mapping[str, float]
    interval: float
    save: float
    restart: float
    mtbf: float
    energy: Spread
    pue: float
    cost: Spread | None
    carbon: Spread
    card_hours: Spread
    band: float
    within: float
    twice_the_failures: float
    assumptions: tuple[str, ...]

    @property
    def tokens(self) -> float:
        """Tokens to train on."""
        return float(self.steps) * self.question.tokens


def forecast(question: Question, machine: Machine, terms: Terms, *, pace: Pace | None = None) -> Project:
    """Return what a project takes on a machine.

    Args:
        pace: how fast it goes; None for the job's own degrees if it has any, else the best plan found.

    Raises:
        SpecError: how much to train is open, or something is out of range.
        CapacityError: nothing fits, or failures leave no time to work.
    """
    steps = _steps(question, terms)
    going = pace or pace_of(question, machine)
    off, (overhead, apart) = band_of(question, machine, going), overhead_of(machine, terms)
    rhythm = _rhythm(question, machine, terms, going, overhead)
    deviation = math.hypot(math.log1p(off) / TENTH, apart)
    rng = np.random.default_rng(terms.seed)
    work = steps * going.seconds * overhead * np.exp(rng.standard_normal(terms.draws) * deviation)
    lives = draw_lives(work, rhythm, rng=rng)
    energy = _energy(machine, going, lives)
    price = _price(machine, terms)
    by_card = lives.seconds * going.cards
    cost = None if price is None else by_card * price + (0.0 if terms.price is not None else energy * TARIFF)
    restarts = spread(lives.restarts)
    rates = causes() if not terms.mtbf else {}
    often = float(lives.seconds.mean()) * going.cards
    return Project(
        question=question, machine=machine, pace=going, steps=steps, seconds=spread(lives.seconds),
        ideal=steps * going.seconds, overhead=overhead, goodput=spread(work / lives.seconds), restarts=restarts,
        by_cause={cause: rate * often for cause, rate in rates.items()}, interval=rhythm.between, save=rhythm.save,
        restart=rhythm.restart, mtbf=rhythm.mtbf, energy=spread(energy), pue=power(machine).pue,
        cost=None if cost is None else spread(cost), carbon=spread(energy * terms.grid),
        card_hours=spread(by_card / 3600), band=off, within=math.expm1(TENTH * deviation),
        twice_the_failures=_twice(steps * going.seconds * overhead, rhythm),
        assumptions=(*assumptions(question, machine, terms, rhythm, going, off), *question.notes, *going.notes),
    )  # fmt: skip


def spread(draws: Floats) -> Spread:
    """Return where a tenth, half and nine tenths of the draws lie below."""
    low, middle, high = (float(value) for value in np.quantile(draws, NINE_TENTHS))
    return Spread(low=low, middle=middle, high=high)


def _steps(question: Question, terms: Terms) -> int:
    if terms.tokens:
        check_steps(terms.tokens / question.tokens)
        return max(1, math.ceil(terms.tokens / question.tokens))
    if terms.steps:
        return terms.steps
    if question.job is None:
        raise open_end()
    check_steps(question.job.steps)
    return question.job.steps


def _rhythm(question: Question, machine: Machine, terms: Terms, pace: Pace, overhead: float) -> Rhythm:
    rate = 1 / terms.mtbf if terms.mtbf else LLAMA_RATE
    write = writing_seconds(machine, float(question.model.parameters), pace.cards)
    every = every_of(question, pace)
    return Rhythm(
        mtbf=1 / (rate * pace.cards) if rate else math.inf, save=write if terms.save is None else terms.save,
        restart=restart_seconds(machine) + write if terms.restart is None else terms.restart,
        interval=every * pace.seconds * overhead,
    )  # fmt: skip


def _energy(machine: Machine, pace: Pace, lives: Lives) -> Floats:
    """Return joules: a step's power while cards compute, work that is lost included, and rest while they do not."""
    busy, rest = pace.energy / pace.seconds, bill_of(machine).idle * pace.cards
    return busy * (lives.seconds - lives.away) + rest * lives.away


def _price(machine: Machine, terms: Terms) -> float | None:
    """Return USD per card and second."""
    if terms.price is not None:
        return terms.price
    return bill_of(machine).price if has_price(machine) else None


def _twice(work: float, rhythm: Rhythm) -> float:
    try:
        return expected_seconds(work, replace(rhythm, mtbf=rhythm.mtbf / 2))
    except CapacityError:
        return math.inf
