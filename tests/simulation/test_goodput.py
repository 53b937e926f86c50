import math
import time
from dataclasses import replace

import numpy as np
import pytest

from supernode.errors import SpecError
from supernode.simulation.goodput import DAY, LLAMA_RATE, Faults, checkpoint_interval, goodput

MILLION = 1_048_576
SPARE = Faults(pause=10.0, step=6.0, every_step=True)
RESTART = Faults(pause=60.0, save=1.0, step=6.0)


def mean(faults: Faults, cards: int = MILLION, seconds: float = 90 * DAY) -> float:
    return goodput(faults, cards=cards, seconds=seconds, draws=4, rng=np.random.default_rng(0)).mean


@pytest.mark.parametrize("faults", [SPARE, RESTART, replace(SPARE, absent=600.0)])
def test_goodput_falls_with_the_rate_of_failures(faults: Faults) -> None:
    found = [mean(replace(faults, rate=LLAMA_RATE * times)) for times in (0, 0.1, 1, 10)]

    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(1, abs=1e-5)


def test_llama_3_is_interrupted_every_three_hours() -> None:
    # 54 days over 419 is 3.09 h (arXiv:2407.21783, table 5, has the counts).
    hours = 1 / (LLAMA_RATE * 16_384) / 3600

    assert hours == pytest.approx(3.09, abs=0.005)


def test_goodput_is_as_the_renewal_formula_says() -> None:
    # Gaps are exponential: the chance to be up after a pause is e^(−pause / M), and of each further cycle e^(−c / M).
    lifetime, cycle = 1 / (LLAMA_RATE * MILLION), SPARE.step
    expected = math.exp(-SPARE.pause / lifetime) * cycle / lifetime / (math.exp(cycle / lifetime) - 1)

    found = goodput(SPARE, cards=MILLION, rng=np.random.default_rng(1))

    assert found.mean == pytest.approx(expected, rel=1e-3)
    assert found.low <= found.mean <= found.high


def test_supernodes_that_are_away_cost_their_share() -> None:
    away = replace(SPARE, absent=600.0)
    share = 1 - math.exp(-LLAMA_RATE * 512 * 600)  # the chance that one failed within the last ten minutes

    assert mean(away) / mean(SPARE) == pytest.approx(1 - share, abs=5e-4)


def test_dalys_interval_is_youngs_to_first_order() -> None:
    assert checkpoint_interval(mtbf=1e9, save=1.0) == pytest.approx(math.sqrt(2e9), rel=1e-4)
    assert checkpoint_interval(mtbf=1.0, save=5.0) == 1.0


@pytest.mark.parametrize("times", [0.25, 4])
def test_no_other_interval_keeps_more(times: float) -> None:
    faults = Faults(pause=60.0, save=5.0, step=1.0)
    mtbf = 1 / (faults.rate * 65_536)
    best = checkpoint_interval(mtbf, faults.save)

    def kept(interval: float) -> float:  # the renewal formula, pause left out, which is the same for all
        return interval / mtbf / (math.exp((interval + faults.save) / mtbf) - 1)

    assert kept(best) > kept(best * times)
    assert goodput(faults, cards=65_536, rng=np.random.default_rng(0)).interval == pytest.approx(best, abs=1)


def test_ninety_days_of_a_million_cards_take_less_than_a_second() -> None:
    start = time.process_time()

    goodput(replace(SPARE, absent=600.0), cards=MILLION, rng=np.random.default_rng(0))

    assert time.process_time() - start < 1


def test_one_seed_gives_one_life() -> None:
    assert mean(RESTART) == mean(RESTART)


def test_senseless_faults_are_refused() -> None:
    with pytest.raises(SpecError, match="step"):
        Faults(pause=1.0, step=0.0)
    with pytest.raises(SpecError, match="groups"):
        goodput(SPARE, cards=8, rng=np.random.default_rng(0))
