"""Do closed form, draws and the older simulation of a cluster's life say the same?"""

from __future__ import annotations

import math

import numpy as np
import pytest

from supernode.errors import CapacityError, SpecError
from supernode.simulation import completion
from supernode.simulation.completion import Rhythm, causes, draw_lives, expected_seconds
from supernode.simulation.goodput import DAY, LLAMA_RATE, Faults, checkpoint_interval, goodput

RHYTHMS = [
    Rhythm(mtbf=3 * 3600, save=30, restart=600),
    Rhythm(mtbf=600, save=20, restart=120),
    Rhythm(mtbf=3600, save=0, restart=300),
    Rhythm(mtbf=5 * DAY, save=60, restart=0),
    Rhythm(mtbf=7200, save=30, restart=600, interval=5000),
]


def test_the_causes_add_up_to_the_published_rate() -> None:
    assert len(causes()) == 18
    assert sum(causes().values()) == pytest.approx(LLAMA_RATE, rel=1e-12)
    assert causes()["faulty GPU"] / LLAMA_RATE == pytest.approx(148 / 419)


@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_draws_take_on_average_what_the_closed_form_says(rhythm: Rhythm) -> None:
    work = 20 * DAY
    lives = draw_lives(np.full(400, work), rhythm, rng=np.random.default_rng(1))

    error = lives.seconds.std() / math.sqrt(400)
    assert lives.seconds.mean() == pytest.approx(expected_seconds(work, rhythm), abs=4 * error + 1)
    assert np.all(lives.seconds >= work)
    # Failures come at a constant rate, whatever the job does meanwhile.
    assert lives.restarts.mean() == pytest.approx(lives.seconds.mean() / rhythm.mtbf, rel=0.03)
    assert np.all(lives.away <= lives.seconds - work + 1e-6)


def test_it_agrees_with_a_life_drawn_failure_by_failure() -> None:
    # `goodput` draws the times of failures and counts what is kept between them.
    cards, faults = 16_384, Faults(pause=600.0, save=30.0, step=1.0, group=1)
    older = goodput(faults, cards=cards, draws=40, rng=np.random.default_rng(2))

    rhythm = Rhythm(mtbf=1 / (LLAMA_RATE * cards), save=faults.save, restart=faults.pause)
    ours = 90 * DAY / expected_seconds(90 * DAY, rhythm)
    assert ours == pytest.approx(older.mean, rel=3e-3)
    assert rhythm.between == pytest.approx(checkpoint_interval(rhythm.mtbf, faults.save))


@pytest.mark.parametrize("times", [0.3, 3])
def test_no_other_interval_is_faster(times: float) -> None:
    best = Rhythm(mtbf=10_800, save=60, restart=600)
    other = Rhythm(mtbf=10_800, save=60, restart=600, interval=best.between * times)

    assert expected_seconds(50 * DAY, best) < expected_seconds(50 * DAY, other)


def test_very_many_failures_are_summed_by_their_normal_law() -> None:
    # More failures than are drawn one by one, and an eighth of them, which are.
    rhythm, rng = Rhythm(mtbf=60, save=2, restart=30), np.random.default_rng(3)
    many = draw_lives(np.full(500, 8 * DAY), rhythm, rng=rng)
    few = draw_lives(np.full(500, DAY), rhythm, rng=rng)

    assert many.restarts.min() > 2 * completion.MANY > few.restarts.max()
    assert many.seconds.mean() == pytest.approx(expected_seconds(8 * DAY, rhythm), rel=2e-3)
    assert few.seconds.mean() == pytest.approx(expected_seconds(DAY, rhythm), rel=5e-3)
    # Independent times: eight times as many spread √8 times as wide.
    assert many.seconds.std() / few.seconds.std() == pytest.approx(math.sqrt(8), rel=0.15)


def test_work_shorter_than_an_interval_is_not_lost() -> None:
    rhythm = Rhythm(mtbf=1000 * DAY, save=10, restart=60)

    assert expected_seconds(100, rhythm) == pytest.approx(110, rel=1e-3)


def test_without_failures_only_saving_comes_on_top() -> None:
    rhythm = Rhythm(mtbf=math.inf, save=5, restart=9)
    lives = draw_lives(np.array([1000.0, 2000.0]), rhythm, rng=np.random.default_rng())

    assert lives.seconds.tolist() == [1005.0, 2005.0]
    assert lives.restarts.tolist() == [0.0, 0.0]


def test_what_is_never_done_is_said() -> None:
    with pytest.raises(CapacityError, match="leave no time"):
        expected_seconds(DAY, Rhythm(mtbf=60, save=10, restart=3600))
    with pytest.raises(SpecError, match="every 0 s"):
        Rhythm(mtbf=0, save=1, restart=1)
