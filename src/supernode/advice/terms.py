"""What is a project reckoned with? Its terms, what is assumed where they are silent, and how far off that may be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from supernode.advice.pace import Pace
from supernode.advice.question import Question
from supernode.errors import SpecError
from supernode.forecast.rates import is_calibrated
from supernode.forecast.trust import band
from supernode.hardware.machine import Machine
from supernode.search.best import LIFE, TARIFF, YEAR, has_price
from supernode.simulation.completion import Rhythm
from supernode.simulation.goodput import LLAMA_RATE

# USD per card and second that count as a price: less is a slip.
SMALLEST = 1e-15
# More is a slip, too; times in seconds, and beyond `LONGEST` no card fails anyway.
MOST_STEPS = 10**12
MOST_WAIT = 1e9
LONGEST = 1e21
MOST_TIMES = 1000.0
MOST_PRICE = 1e6 / 3600
MOST_GRID = 100 / 3.6e6
# kg of CO2 per joule: 1,650 million tonnes over 4,230,672 GWh in the United States, 2022 (EIA, State Electricity
# Profiles, US tables 5 and 7): 0.39 kg/kWh.
GRID = 1650e9 / 4_230_672e6 / 3.6e6
# Seconds from a failure until the work goes on, loading left out: an assumption under which Llama 3 405B, saved and
# loaded as below, keeps 92% of its time; its report says more than 90% (arXiv:2407.21783, section 3.3.4).
RESTART = 600.0
# Bytes/s that one node writes of a checkpoint: 2 TB/s for 16,384 cards in the same report, over 2,048 nodes.
NODE_STORE = 1e9
# From a failure on this computer until ranks compute again, loading left out: they are forked, not scheduled.
LOCAL_RESTART = 5.0
# Weights and two moments in float32.
SAVED_BYTES = 12
# A guess, where no published run stands behind a card.
UNKNOWN_BAND = 0.5
# What `benchmarks/calibrated.py` holds steps on a calibrated computer to.
CALIBRATED_BAND = 0.15

FILE = Path(__file__).parent / "whole_runs.yaml"


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
        if not 0 <= self.tokens < math.inf or self.steps < 0 or (self.tokens and self.steps):
            raise SpecError(
                f"{self.tokens:,.0f} tokens and {self.steps:,} steps", hint="give `--tokens` or `--steps`, above 0."
            )
        check_steps(self.steps)
        for key, value, least, most, hint in (
            ("mtbf", self.mtbf, 0.0, LONGEST,
             "give hours, such as `--mtbf 5000h`, or leave it out for Llama 3's; up to 1e21 s."),
            ("save", self.save, 0.0, MOST_WAIT, "give a time of 0 or more, such as `--save 30s`, up to 30 years."),
            ("restart", self.restart, 0.0, MOST_WAIT,
             "give a time of 0 or more, such as `--restart 10min`, up to 30 years."),
            ("price", self.price, SMALLEST, MOST_PRICE,
             "give USD above 0 for a card and hour, such as `--price 2.5`, up to a million."),
            ("grid", self.grid, 0.0, MOST_GRID, "give kg of CO2 per kWh, 0 or more, such as `--grid 0.4`, up to 100."),
            ("overhead", self.overhead, 1.0, MOST_TIMES,
             f"a whole takes no less than its steps: give `--overhead` 1 or more, up to {MOST_TIMES:g}."),
            ("draws", self.draws, 1, 10**6, "draw 1 life or more, up to a million."),
        ):  # fmt: skip
            # A price or a grid of exactly the most, in hours or kWh, may lie a digit above it in seconds or joules.
            if value is not None and not least <= value <= most * (1 + 1e-9):
                raise SpecError(f"`{key}` is {value:g}", hint=hint)


def open_end() -> SpecError:
    """Return what to say where nobody says how much to train."""
    return SpecError("how much to train is open", hint="give `--tokens`, such as 1.4T, or `--steps`.")


def check_steps(steps: float) -> None:
    """Raise a SpecError where there are more steps than anybody can take."""
    if steps > MOST_STEPS:
        raise SpecError(
            f"{float(min(steps, 1e300)):.3g} steps", hint=f"give `--steps` up to {MOST_STEPS:,}, or as few `--tokens`."
        )


def band_of(question: Question, machine: Machine, pace: Pace) -> float:
    """Return the part by which four of five such step times may be off on a machine's cards."""
    if guessed(machine, pace):
        return UNKNOWN_BAND
    if machine.calibration is not None:
        return CALIBRATED_BAND
    return band(
        machine.card.name, cards=pace.cards, width=float(question.model.width),
        mixtures=bool(question.model.mixtures), sharded=pace.is_sharded,
    )  # fmt: skip


def guessed(machine: Machine, pace: Pace) -> str:
    """Return why nobody knows how far off a step's time may be; empty where measured steps stand behind it."""
    if machine.calibration is not None:
        return "" if pace.is_ours else "our trainer cannot run this plan here, and only its steps were measured"
    if not is_calibrated(machine.card):
        return f"nothing published stands behind {machine.card.name}"
    return "the plan lies outside of what was fitted" if pace.is_outside else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRuns:
    """How much longer published projects took than their forecast.

    Evaluations, repeated stretches, slow nodes, waiting for data: one number for all of it. Fitted by
    `benchmarks/project_forecast.py --fit` to those rows alone of which everything was read in its source.

    Attributes:
        overhead: times.
        deviation: of its logarithm, from row to row.
        fitted: rows that it was fitted to.
        known: rows that there are; figures of the others are from memory, or are no whole runs.
    """

    overhead: float
    deviation: float
    fitted: int
    known: int


@cache
def whole_runs() -> WholeRuns:
    """Return what was fitted."""
    return WholeRuns(**yaml.safe_load(FILE.read_text(encoding="utf-8")))


def overhead_of(machine: Machine, terms: Terms) -> tuple[float, float]:
    """Return the time of the whole over that of its best steps, and the deviation of its logarithm."""
    if terms.overhead is not None:
        return terms.overhead, 0.0
    # Those projects ran on thousands of accelerators; a computer's own cores are another matter.
    return (1.0, 0.0) if machine.card.kind == "cpu" else (whole_runs().overhead, whole_runs().deviation)


def writing_seconds(machine: Machine, parameters: float, cards: int) -> float:
    """Return how long writing or loading a checkpoint takes, all nodes at once."""
    return SAVED_BYTES * parameters / (max(1, cards // machine.node_cards) * NODE_STORE)


def restart_seconds(machine: Machine) -> float:
    """Return the time from a failure until work goes on, loading left out."""
    return LOCAL_RESTART if machine.card.kind == "cpu" else RESTART


def every_of(question: Question, pace: Pace) -> int:
    """Return the steps between two checkpoints where our trainer runs the job, which then says so; else 0."""
    return question.job.checkpoint.every if question.job is not None and pace.is_ours else 0


def assumptions(
    question: Question, machine: Machine, terms: Terms, rhythm: Rhythm, pace: Pace, off: float
) -> Iterator[str]:  # fmt: skip
    """Yield what a project's figures assume, as sentences."""
    how = "the best plan found" if pace.is_found else "the job's own degrees"
    how += ", by our trainer" if pace.is_ours else ", with current software"
    guess = guessed(machine, pace)
    yield f"a step takes {pace.seconds:.4g} s ({how}), within {off:.0%} in four of five cases" + (
        f"; {guess}, so that is a guess." if guess else "."
    )
    overhead, _ = overhead_of(machine, terms)
    if terms.overhead is None and overhead != 1:
        yield (
            f"a whole project takes {overhead:.2f} times its best steps, failures left out, as "
            f"{whole_runs().fitted} published ones did (evaluations, repeated stretches, slow nodes, waiting for "
            f"data); of {whole_runs().known} known ones, those are left out of which a figure is from memory."
        )
    elif terms.overhead is None:
        yield "nothing but failures and checkpoints comes on top of its steps."
    hours = 1 / (LLAMA_RATE if not terms.mtbf else 1 / terms.mtbf) / 3600
    met = "as in Llama 3 405B's training, arXiv:2407.21783, table 5" if not terms.mtbf else "as given"
    yield f"one card fails every {hours:,.0f} h, whatever the cause ({met}); spares take over at once."
    yield (f"a checkpoint stops training for {rhythm.save:.3g} s and a failure for {rhythm.restart:.3g} s.")
    if every := every_of(question, pace):
        best = replace(rhythm, interval=0.0).between
        yield (
            f"checkpoints come every {every:,} steps, as the job has them (`checkpoint.every`); every "
            f"{max(1, round(best / rhythm.interval * every)):,} would cost least."
            if math.isfinite(best) else f"checkpoints come every {every:,} steps, as the job has them."
        )  # fmt: skip
    if terms.price is None and not has_price(machine):
        yield f"{machine.card.name} has no price, so that cost is open; `--price` gives one."
    elif terms.price is None:
        yield (
            f"the machine is written off over {LIFE / YEAR:.0f} years at the catalogue's prices, power costs "
            f"{TARIFF * 3.6e6:.2f} USD/kWh; no staff, no building."
        )
    else:
        yield f"a card costs {terms.price * 3600:.2f} USD an hour, power included."
    source = " (United States, 2022; EIA)" if terms.grid == GRID else ""
    yield f"the grid emits {terms.grid * 3.6e6:.2f} kg of CO2 per kWh{source}; making the hardware is left out."
