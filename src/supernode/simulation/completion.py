"""When is so much work done, if failures keep sending it back to the last checkpoint? By closed form, and drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from supernode.errors import CapacityError, SpecError
from supernode.simulation.goodput import DAY, checkpoint_interval

FILE = Path(__file__).parent / "interruptions.yaml"
# Failures between two checkpoints above which nothing comes of the work.
MOST_FAILURES = 50.0
# Times above which their sum is taken to be normal.
MANY = 10_000

Floats = NDArray[np.float64]


@cache
def causes() -> Mapping[str, float]:
    """Return interruptions per card and second by cause, as published of the training of Llama 3 405B."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    exposure = content["days"] * DAY * content["cards"]
    return {cause: count / exposure for cause, count in content["counts"].items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How often a job fails and saves, and what either costs.

    Attributes:
        mtbf: seconds between failures of the whole job, on average; infinity for none.
        save: seconds that a checkpoint stops the work.
        restart: seconds from a failure until the work goes on from the last checkpoint; a failure meanwhile starts
            them anew.
        interval: seconds of work between two checkpoints; 0 for the best.
    """

    mtbf: float
    save: float
    restart: float
    interval: float = 0.0

    def __post_init__(self) -> None:
        if not self.mtbf > 0 or not all(0 <= each < math.inf for each in (self.save, self.restart, self.interval)):
            raise SpecError(
                f"failures every {self.mtbf} s, saving in {self.save} s every {self.interval} s, restart in "
                f"{self.restart} s",
                hint="give a time between failures above 0, and finite times of 0 or more.",
            )

    @property
    def between(self) -> float:
        """Seconds of work between two checkpoints."""
        if self.interval:
            return self.interval
        if math.isinf(self.mtbf):
            return math.inf
        # A checkpoint that costs nothing could be written all the time; a second is often enough.
        return max(1.0, checkpoint_interval(self.mtbf, self.save))

    def parts(self, work: Floats | float) -> tuple[Floats, Floats]:
        """Return into how many equal parts work is cut by its checkpoints, and the seconds of one with its saving."""
        seconds = np.asarray(work, dtype=float)
        many = np.maximum(1.0, np.round(seconds / self.between))
        return many, seconds / many + self.save


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lives:
    """Draws of a job's life, one entry each.

    Attributes:
        seconds: until the work is done.
        restarts: how often it began again.
        away: seconds in which cards do not compute: restarting, and saving.
    """

    seconds: Floats
    restarts: Floats
    away: Floats


def expected_seconds(work: float, rhythm: Rhythm) -> float:
    """Return how long so many seconds of work take on average.

    Raises:
        CapacityError: failures come so much faster than checkpoints that the work is never done.

    Source: Daly, FGCS 22(3), 2006, section 3: M e^(R/M) (e^((τ+δ)/M) − 1) for each τ of work.

    >>> round(expected_seconds(86_400, Rhythm(mtbf=math.inf, save=10, restart=60)))
    86410
    """
    many, part = (float(value) for value in rhythm.parts(work))
    if math.isinf(rhythm.mtbf):
        return many * part
    _check(part, rhythm)
    return many * rhythm.mtbf * math.exp(rhythm.restart / rhythm.mtbf) * math.expm1(part / rhythm.mtbf)


def draw_lives(work: Floats, rhythm: Rhythm, *, rng: np.random.Generator) -> Lives:
    """Draw one life of a job for each of `work`'s entries, in seconds of work; failures come at a constant rate.

    Raises:
        CapacityError: the work is never done.
    """
    many, part = rhythm.parts(work)
    saves = many * rhythm.save
    if math.isinf(rhythm.mtbf):
        return Lives(seconds=many * part, restarts=np.zeros_like(work), away=saves)
    _check(float(part.max()), rhythm)
    # Attempts that fail before a part is done, and restarts that fail before it goes on.
    lost = rng.negative_binomial(many, np.exp(-part / rhythm.mtbf))
    again = np.zeros_like(lost)
    if rhythm.restart:
        hit = lost > 0
        again[hit] = rng.negative_binomial(lost[hit], math.exp(-rhythm.restart / rhythm.mtbf))
    wasted = np.array([_until_failure(int(n), float(c), rhythm.mtbf, rng) for n, c in zip(lost, part, strict=True)])
    failed = np.array([_until_failure(int(n), rhythm.restart, rhythm.mtbf, rng) for n in again])
    away = lost * rhythm.restart + failed
    return Lives(seconds=many * part + wasted + away, restarts=(lost + again).astype(float), away=away + saves)


def _until_failure(count: int, limit: float, mtbf: float, rng: np.random.Generator) -> float:
    """Return the sum of so many times until a failure that comes before `limit`; of very many, by their normal law."""
    if not count:
        return 0.0
    if count > MANY:
        odds = math.expm1(limit / mtbf)
        mean = mtbf - limit / odds
        variance = 2 * mtbf**2 - (limit**2 + 2 * mtbf * limit) / odds - mean**2
        return float(count * mean + rng.standard_normal() * math.sqrt(count * max(variance, 0.0)))
    below = rng.uniform(0, -math.expm1(-limit / mtbf), count)
    return float(-mtbf * np.log1p(-below).sum())


def _check(part: float, rhythm: Rhythm) -> None:
    if max(part, rhythm.restart) > math.log1p(MOST_FAILURES) * rhythm.mtbf:
        raise CapacityError(
            f"failures every {rhythm.mtbf:.3g} s leave no time for {part:.3g} s between checkpoints and restarts of "
            f"{rhythm.restart:.3g} s",
            hint="save and restart faster, or take fewer or more reliable cards.",
        )
