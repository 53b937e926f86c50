"""How much of its time does a huge cluster train, when cards keep failing? Ninety days, all cards, drawn at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from supernode.errors import SpecError

DAY = 86_400.0
# Unexpected interruptions of Llama 3 405B: 419 in 54 days on 16,384 cards (arXiv:2407.21783, table 5).
LLAMA_RATE = 419 / (54 * DAY * 16_384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often a job is interrupted, and what each interruption costs.

    Attributes:
        rate: interruptions per card and second, of all causes, independent and at a constant rate.
        pause: seconds from an interruption until all cards work again; one that comes meanwhile starts them anew.
        save: seconds that a checkpoint stops training.
        step: seconds of a step; what is kept is whole steps.
        absent: seconds that the group which failed is away, after which it joins again; the others go on without it.
            0 where a spare takes its place within `pause`.
        group: cards that are away together.
        every_step: whether each finished step is kept, in the memory of other cards, so that only the step at work is
            lost and no checkpoint is needed for it.
    """

    rate: float = LLAMA_RATE
    pause: float
    save: float = 0.0
    step: float
    absent: float = 0.0
    group: int = 512
    every_step: bool = False

    def __post_init__(self) -> None:
        times = (self.pause, self.save, self.absent)
        if min(times) < 0 or not self.step > 0 or self.rate < 0 or self.group < 1:
            raise SpecError(
                f"faults at a rate of {self.rate}, pause, save and absence of {times} s, steps of {self.step} s, in "
                f"groups of {self.group}",
                hint="give times of 0 or more, a step above 0 and a group of 1 or more.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What is left of the time.

    Attributes:
        mean: part of the cards' time that went into work that was kept, over all draws.
        low: of the draws, 5% are below.
        high: of the draws, 5% are above.
        interruptions: mean of the draws.
        interval: seconds trained between two checkpoints.
    """

    mean: float
    low: float
    high: float
    interruptions: float
    interval: float


def checkpoint_interval(mtbf: float, save: float) -> float:
    """Return how long to train between checkpoints so that the least work is lost.

    Args:
        mtbf: mean time between interruptions of the whole job, in seconds.
        save: time that a checkpoint stops training, in seconds.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval", FGCS 22(3), 2006, equation 37; Young's
    √(2 save mtbf) is its first term.

    >>> round(checkpoint_interval(mtbf=86_400, save=3))
    718
    """
    if save >= 2 * mtbf:
        return mtbf
    part = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - save


def goodput(
    faults: Faults, *, cards: int, seconds: float = 90 * DAY, draws: int = 20, rng: np.random.Generator
) -> Goodput:
    """Draw so many lives of a job of `seconds`, and return what part of its cards' time was of use.

    Cards that are away are taken to be so whether the rest trains or waits; the two shares multiply.
    """
    if cards < faults.group:
        raise SpecError(f"{cards} cards in groups of {faults.group}", hint="lower `group`, or give more cards.")
    interval, save = _rhythm(faults, cards)
    kept, counts = np.empty(draws), np.empty(draws)
    for draw in range(draws):
        count = int(rng.poisson(faults.rate * cards * seconds))
        # Given their number, interruptions at a constant rate are uniform in time.
        times = np.sort(rng.uniform(0, seconds, count))
        work = _kept(np.diff(times, prepend=-faults.pause, append=seconds), faults.pause, interval, save)
        kept[draw] = work / seconds * (1 - _absent(times, faults, cards, seconds, rng))
        counts[draw] = count
    low, high = np.quantile(kept, [0.05, 0.95])
    return Goodput(
        mean=float(kept.mean()), low=float(low), high=float(high), interruptions=float(counts.mean()), interval=interval
    )


def _rhythm(faults: Faults, cards: int) -> tuple[float, float]:
    """Return seconds between two times that work is kept, in whole steps, and what keeping stops."""
    if faults.every_step or not faults.rate or not faults.save:
        return faults.step, faults.save if faults.every_step else 0.0
    best = checkpoint_interval(1 / (faults.rate * cards), faults.save)
    return max(1, round(best / faults.step)) * faults.step, faults.save


def _kept(gaps: np.ndarray[tuple[int], np.dtype[np.float64]], pause: float, interval: float, save: float) -> float:
    """Return the seconds kept of the times between interruptions; each begins with a pause."""
    ups = np.maximum(gaps - pause, 0)
    return float(np.floor(ups / (interval + save)).sum() * interval)


def _absent(
    times: np.ndarray[tuple[int], np.dtype[np.float64]],
    faults: Faults,
    cards: int,
    seconds: float,
    rng: np.random.Generator,
) -> float:
    """Return the part of all groups' time that they are away; a failure of one that is away keeps it longer."""
    if not faults.absent or not len(times):
        return 0.0
    groups = cards // faults.group
    whose = rng.integers(0, groups, len(times))
    order = np.lexsort((times, whose))
    when, who = times[order], whose[order]
    until = np.append(np.where(who[1:] == who[:-1], when[1:], seconds), seconds)
    return float(np.minimum(until - when, faults.absent).sum() / (groups * seconds))
