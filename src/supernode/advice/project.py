"""What does a whole project take? Days, restarts, energy, money and carbon, each as low, middle and high."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from supernode.advice.pace import Pace, pace_of
from supernode.advice.question import Question
from supernode.errors import CapacityError, SpecError
from supernode.forecast.rates import is_calibrated
from supernode.forecast.trust import band
from supernode.hardware.machine import Machine
from supernode.hardware.power import power
from supernode.search.best import LIFE, TARIFF, YEAR, bill_of
from supernode.simulation.completion import Lives, Rhythm, causes, draw_lives, expected_seconds
from supernode.simulation.goodput import LLAMA_RATE

# kg of CO2 per joule: 1,650 million tonnes over 4,230,672 GWh in the United States, 2022 (EIA, State Electricity
# Profiles, US tables 5 and 7): 0.39 kg/kWh.
GRID = 1650e9 / 4_230_672e6 / 3.6e6
# Seconds from a failure until the work goes on, loading left out: an assumption under which Llama 3 405B, saved and
# loaded as below, keeps 92% of its time; its report says more than 90% (arXiv:2407.21783, section 3.3.4).
RESTART = 600.0
# Bytes/s that one node writes of a checkpoint: 2 TB/s for 16,384 cards in the same report, over 2,048 nodes.
NODE_STORE = 1e9
# Weights and two moments in float32.
SAVED_BYTES = 12
# A guess, where no published run stands behind a card.
UNKNOWN_BAND = 0.5
# What `benchmarks/calibrated.py` holds steps on a calibrated computer to.
CALIBRATED_BAND = 0.15
# 10% and 90% of a normal distribution lie so many standard deviations from its middle.
TENTH = 1.2815515655446004
NINE_TENTHS = (0.1, 0.5, 0.9)

FILE = Path(__file__).parent / "whole_runs.yaml"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a project is to be reckoned with.

    Attributes:
        tokens: to train on; 0 for `steps` of them.
        steps: optimizer steps; 0 for the job's.
        mtbf: seconds between failures of one card, of all causes; 0 for what Llama 3's training met.
        save: seconds that a checkpoint stops training; None for what writing it takes.
        restart: seconds from a failure until the work goes on; None for `RESTART` and loading.
        price: USD per card and second for everything; None for owning the machine and paying its electricity.
        grid: kg of CO2 per joule.
        overhead: time of the whole over that of its steps, failures and checkpoints; None for what published projects
            took.
        draws: lives of the project.
    """

    tokens: float = 0.0
    steps: int = 0
    mtbf: float = 0.0
    save: float | None = None
    restart: float | None = None
    price: float | None = None
    grid: float = GRID
    overhead: float | None = None
    draws: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.steps < 0 or (self.tokens and self.steps):
            raise SpecError(
                f"{self.tokens:,.0f} tokens and {self.steps:,} steps", hint="give `--tokens` or `--steps`, above 0."
            )


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
        ideal: seconds of the steps alone.
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
    rhythm = _rhythm(question, machine, terms, going)
    off, (overhead, apart) = band_of(question, machine, going), _overhead(machine, terms)
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
        assumptions=tuple(_assumptions(machine, terms, rhythm, going, off)),
    )  # fmt: skip


def spread(draws: Floats) -> Spread:
    """Return where a tenth, half and nine tenths of the draws lie below."""
    low, middle, high = (float(value) for value in np.quantile(draws, NINE_TENTHS))
    return Spread(low=low, middle=middle, high=high)


def band_of(question: Question, machine: Machine, pace: Pace) -> float:
    """Return the part by which four of five such step times may be off on a machine's cards."""
    if machine.calibration is not None:
        return CALIBRATED_BAND
    if not is_calibrated(machine.card):
        return UNKNOWN_BAND
    return band(
        machine.card.name, cards=pace.cards, width=float(question.model.width),
        mixtures=bool(question.model.mixtures), sharded=pace.is_sharded,
    )  # fmt: skip


@cache
def whole_runs() -> tuple[float, float]:
    """Return how much longer published projects took than their forecast, and the deviation of its logarithm.

    Evaluations, repeated stretches, slow nodes, waiting for data: one number for all of it. Fitted by
    `benchmarks/project_forecast.py --fit` to half of its rows.
    """
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return float(content["overhead"]), float(content["deviation"])


def _overhead(machine: Machine, terms: Terms) -> tuple[float, float]:
    if terms.overhead is not None:
        return terms.overhead, 0.0
    # Those projects ran on thousands of accelerators; a computer's own cores are another matter.
    return (1.0, 0.0) if machine.card.kind == "cpu" else whole_runs()


def _steps(question: Question, terms: Terms) -> int:
    if terms.tokens:
        return max(1, math.ceil(terms.tokens / question.tokens))
    if terms.steps:
        return terms.steps
    if question.job is None:
        raise SpecError("how much to train is open", hint="give `--tokens`, such as 1.4T, or `--steps`.")
    return question.job.steps


def _rhythm(question: Question, machine: Machine, terms: Terms, pace: Pace) -> Rhythm:
    rate = 1 / terms.mtbf if terms.mtbf else LLAMA_RATE
    nodes = max(1, pace.cards // machine.node_cards)
    write = SAVED_BYTES * float(question.model.parameters) / (nodes * NODE_STORE)
    return Rhythm(
        mtbf=1 / (rate * pace.cards) if rate else math.inf, save=write if terms.save is None else terms.save,
        restart=RESTART + write if terms.restart is None else terms.restart,
    )  # fmt: skip


def _energy(machine: Machine, pace: Pace, lives: Lives) -> Floats:
    """Return joules: a step's power while cards compute, work that is lost included, and rest while they do not."""
    busy, rest = pace.energy / pace.seconds, bill_of(machine).idle * pace.cards
    return busy * (lives.seconds - lives.away) + rest * lives.away


def _price(machine: Machine, terms: Terms) -> float | None:
    """Return USD per card and second."""
    if terms.price is not None:
        return terms.price
    return None if machine.card.price is None else bill_of(machine).price


def _twice(work: float, rhythm: Rhythm) -> float:
    try:
        return expected_seconds(work, replace(rhythm, mtbf=rhythm.mtbf / 2))
    except CapacityError:
        return math.inf


def _assumptions(machine: Machine, terms: Terms, rhythm: Rhythm, pace: Pace, off: float) -> Iterator[str]:
    how = "the best plan found, with current software" if pace.is_found else "the job's own degrees, by our trainer"
    yield f"a step takes {pace.seconds:.4g} s ({how}), within {off:.0%} in four of five cases" + (
        "." if off != UNKNOWN_BAND else f"; nothing published stands behind {machine.card.name}, so that is a guess."
    )
    overhead, _ = _overhead(machine, terms)
    if terms.overhead is None and overhead != 1:
        yield (
            f"a whole project takes {overhead:.2f} times its best steps, failures left out, as published ones did "
            "(evaluations, repeated stretches, slow nodes, waiting for data)."
        )
    hours = 1 / (LLAMA_RATE if not terms.mtbf else 1 / terms.mtbf) / 3600
    met = "as in Llama 3 405B's training, arXiv:2407.21783, table 5" if not terms.mtbf else "as given"
    yield f"one card fails every {hours:,.0f} h, whatever the cause ({met}); spares take over at once."
    yield (f"a checkpoint stops training for {rhythm.save:.3g} s and a failure for {rhythm.restart:.3g} s.")
    if terms.price is None:
        yield (
            f"the machine is written off over {LIFE / YEAR:.0f} years at the catalogue's prices, power costs "
            f"{TARIFF * 3.6e6:.2f} USD/kWh; no staff, no building."
        )
    else:
        yield f"a card costs {terms.price * 3600:.2f} USD an hour, power included."
    source = " (United States, 2022; EIA)" if terms.grid == GRID else ""
    yield f"the grid emits {terms.grid * 3.6e6:.2f} kg of CO2 per kWh{source}; making the hardware is left out."
