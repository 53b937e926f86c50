"""The interval is where the time lost to saves and to failures is least, found here by trying them all."""

from __future__ import annotations

import math

import pytest

from supernode.errors import SpecError
from supernode.keeping.interval import Cost, best_every


def lost(work: float, *, stall: float, between: float) -> float:
    """Return seconds of a run per second of work: a stretch of work and save is begun anew until no failure hits it.

    Exact for failures at a constant rate and restarts that take no time (Daly 2006, equation 13).
    """
    return between * (math.exp((work + stall) / between) - 1) / work


@pytest.mark.parametrize(("stall", "between"), [(3.0, 86_400.0), (0.03, 3600.0), (60.0, 3600.0), (300.0, 1800.0)])
def test_no_other_interval_loses_less(stall: float, between: float) -> None:
    step = 0.01
    (every,) = best_every((Cost(stall=stall, took=0.0, between_failures=between),), step=step)

    at_best = min(lost(steps * step, stall=stall, between=between) for steps in range(1, int(3 * between), 7))
    assert lost(every * step, stall=stall, between=between) - 1 <= (at_best - 1) * 1.01  # Daly: within 1% of the best.


def test_no_save_begins_before_the_last_is_there_and_none_is_farther_and_more_often() -> None:
    memory = Cost(stall=0.03, took=0.1, between_failures=3600.0)
    disk = Cost(stall=0.03, took=40.0, between_failures=100_000.0)

    near, far = best_every((memory, disk), step=1.5)
    assert near == round((math.sqrt(2 * 0.03 * 3600) - 0.03) / 1.5) == 10
    assert far == 52  # √(2 · 0.03 · 10⁵) = 77.5 s
    slow = Cost(stall=0.03, took=100.0, between_failures=100_000.0)
    assert best_every((memory, slow), step=1.5) == (10, 67)
    assert best_every((disk, memory), step=1.5) == (52, 52)
    assert best_every((memory, Cost(stall=1.0, took=1.0, between_failures=math.inf)), step=1.5) == (10, 10**9)
    assert best_every((Cost(stall=0.0, took=0.0, between_failures=1.0),), step=1.5) == (1,)


@pytest.mark.parametrize("words", [{"stall": -1.0}, {"took": math.inf}, {"between_failures": 0.0}, {"stall": math.nan}])
def test_what_no_clock_shows_is_refused(words: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="apart"):
        Cost(**{"stall": 1.0, "took": 1.0, "between_failures": 1.0, **words})
    with pytest.raises(SpecError, match="a step of 0"):
        best_every((), step=0.0)
