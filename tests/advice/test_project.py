"""Does a project add up, and does it come out as published projects did?"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from supernode.advice.pace import Pace, pace_of
from supernode.advice.project import Project, forecast
from supernode.advice.question import question_about, question_of
from supernode.advice.terms import GRID, Terms
from supernode.control.supernode import SuperNode
from supernode.errors import CapacityError, SpecError
from supernode.hardware.assemble import build_machine, predefined
from supernode.hardware.machine import Machine
from supernode.hardware.power import power
from supernode.planning.planner import make_plan
from supernode.schema.job import JobSpec
from supernode.schema.spread import Parallelism
from supernode.search.best import LIFE, TARIFF, bill_of
from supernode.simulation.completion import Rhythm, causes, expected_seconds

QUESTION = question_about("llama3-8b", batch=64, sequence=2048)
MACHINE = predefined("64xH100")
PACE = Pace(words="some", cards=64, seconds=2.0, energy=2.0 * 64 * 700, memory=1e9, is_found=True)
HOUR = 3600.0


def reckoned(*, pace: Pace = PACE, machine: Machine = MACHINE, **terms: float) -> Project:
    return forecast(QUESTION, machine, Terms(**({"steps": 100_000} | terms)), pace=pace)  # type: ignore[arg-type]


def test_time_is_work_with_failures_and_saving() -> None:
    terms = {"mtbf": 64 * 10 * HOUR, "save": 30.0, "restart": 600.0}
    project = reckoned(**terms)

    rhythm = Rhythm(mtbf=10 * HOUR, save=30, restart=600)
    assert project.ideal == 200_000
    assert project.interval == rhythm.between
    work = project.ideal * project.overhead
    assert project.seconds.middle == pytest.approx(expected_seconds(work, rhythm), rel=0.02)
    assert project.goodput.middle == pytest.approx(work / expected_seconds(work, rhythm), rel=0.01)
    assert project.restarts.middle == pytest.approx(project.seconds.middle / (10 * HOUR), rel=0.1)
    doubled = expected_seconds(work, replace(rhythm, mtbf=5 * HOUR))
    assert project.twice_the_failures == pytest.approx(doubled)


def test_the_spread_is_that_of_the_steps_where_nothing_fails() -> None:
    project = reckoned(mtbf=1e18, save=0.0)

    times = project.seconds
    assert times.high / times.middle == pytest.approx(1 + project.within, rel=0.03)
    assert times.middle / times.low == pytest.approx(1 + project.within, rel=0.03)
    assert project.within > project.band
    bare = reckoned(mtbf=1e18, save=0.0, overhead=1.0)
    assert bare.seconds.middle == pytest.approx(bare.ideal, rel=0.01)
    assert bare.within == pytest.approx(bare.band)
    assert project.restarts.high == 0


def test_tokens_become_whole_steps() -> None:
    project = reckoned(steps=0, tokens=1e9)

    assert project.steps == math.ceil(1e9 / (64 * 2048))
    assert project.tokens >= 1e9


def test_energy_cost_and_carbon_follow_from_time() -> None:
    project = reckoned(mtbf=1e18, save=0.0)

    seconds = project.seconds.middle
    assert project.energy.middle == pytest.approx(64 * 700 * seconds)
    owned = 64 * bill_of(MACHINE).price * seconds + TARIFF * project.energy.middle
    assert project.cost is not None
    assert project.cost.middle == pytest.approx(owned)
    assert project.carbon.middle == pytest.approx(project.energy.middle * GRID)
    assert project.pue == power(MACHINE).pue
    rented = reckoned(mtbf=1e18, save=0.0, price=2.5 / HOUR)
    assert rented.cost is not None
    assert rented.cost.middle == pytest.approx(project.card_hours.middle * 2.5)


def test_a_card_hour_of_an_owned_machine_costs_its_share_of_every_part() -> None:
    # 64 H100 of 28,000 USD, 8 nodes of 90,000 USD, written off over six years; switches and cables come on top.
    least = (28_000 + 90_000 / 8) / LIFE

    assert least < bill_of(MACHINE).price < 1.3 * least


def test_hardware_without_a_price_costs_nothing_known() -> None:
    machine = build_machine(64, "3D_Torus", card="TPU-v4")

    project = reckoned(machine=machine)
    assert project.cost is None
    assert not any("written off" in said or "USD/kWh" in said for said in project.assumptions)
    assert any("TPU-v4 has no price" in said and "--price" in said for said in project.assumptions)
    rented = reckoned(machine=machine, price=1 / HOUR)
    assert rented.cost is not None
    assert rented.cost.middle == pytest.approx(rented.card_hours.middle)


def test_causes_share_the_restarts_as_published() -> None:
    project = reckoned()

    # The mean; the middle of few restarts is a whole number.
    assert sum(project.by_cause.values()) == pytest.approx(
        project.seconds.middle * 64 * sum(causes().values()), rel=0.05
    )
    assert project.by_cause["faulty GPU"] / sum(project.by_cause.values()) == pytest.approx(148 / 419)
    assert not reckoned(mtbf=1e9).by_cause


def test_more_failures_never_finish_sooner() -> None:
    times = [reckoned(mtbf=64 * hours * HOUR).seconds.middle for hours in (1000, 100, 10, 2)]

    assert times == sorted(times)


def test_llama_3_keeps_more_than_nine_tenths_of_its_time() -> None:
    # arXiv:2407.21783, section 3.3.4: "higher than 90% effective training time"; 419 interruptions in 54 days.
    question = question_about("llama3-405b", batch=2048, sequence=8192)
    pace = Pace(words="", cards=16_384, seconds=6.0, energy=1.0, memory=1.0, is_found=True)
    project = forecast(question, predefined("16384xH100"), Terms(steps=100_000), pace=pace)

    assert 0.90 < project.goodput.middle < 0.95
    assert project.mtbf / HOUR == pytest.approx(54 * 24 / 419, rel=1e-6)
    days = project.seconds.middle / 86_400
    assert project.restarts.middle / days == pytest.approx(419 / 54, rel=0.05)


def test_the_same_seed_gives_the_same_project() -> None:
    assert reckoned().seconds == reckoned().seconds
    assert reckoned(seed=1).seconds != reckoned().seconds


def test_a_job_goes_as_fast_as_its_plan_says() -> None:
    job = JobSpec(model="llama3-8b", batch=64, precision="bfloat16", parallelism=Parallelism(tensor=4, data=16),
                  gradient_accumulation=4)  # fmt: skip
    pace = pace_of(question_of(job), MACHINE)
    plan = make_plan(job, MACHINE)

    assert plan.step is not None
    assert (pace.seconds, pace.cards, pace.is_found) == (plan.step.total, 64, False)
    full = 64 * bill_of(MACHINE).full * pace.seconds
    assert 0.3 * full < pace.energy < full


@pytest.mark.parametrize(
    ("key", "values", "remedy"),
    [("price", (0.0, -1.0, 1e3, math.inf, math.nan), "--price"), ("grid", (-0.1, 1e-4, 1e302, math.nan), "--grid"),
     ("overhead", (0.99, 0.0, -1.0, 1001.0, 1e300, math.inf, math.nan), "1 or more"),
     ("draws", (0, -3, 10**7), "1 life"), ("save", (-1.0, 1e10, math.inf, math.nan), "--save"),
     ("restart", (-1.0, 1e10, math.inf), "--restart"), ("mtbf", (-1.0, 1e22, math.nan), "--mtbf"),
     ("tokens", (-1.0, math.nan, math.inf), "--tokens"), ("steps", (-1, 10**12 + 1, 10**30, 10**400), "--steps")],
)  # fmt: skip
def test_terms_out_of_range_are_refused_by_name(key: str, values: tuple[float, ...], remedy: str) -> None:
    for value in values:
        with pytest.raises(SpecError, match=key) as refused:
            Terms(**{key: value})
        assert remedy in refused.value.hint


def test_the_least_terms_are_taken() -> None:
    assert Terms(overhead=1.0, grid=0.0, save=0.0, restart=0.0, draws=1).overhead == 1


def test_the_most_terms_give_finite_figures_and_more_tokens_are_refused() -> None:
    most = reckoned(steps=10**12, overhead=1000.0, grid=100 / 3.6e6, price=1e6 / HOUR, save=1.0, restart=1.0, mtbf=1e21)

    for part in (most.seconds, most.energy, most.cost, most.carbon, most.card_hours, most.restarts):
        assert part is not None
        assert 0 <= part.low <= part.middle <= part.high < math.inf
    with pytest.raises(SpecError, match="steps"):
        reckoned(steps=0, tokens=1e300)


def test_the_sdk_reckons_with_the_terms_that_the_terminal_takes() -> None:
    ours = SuperNode(machine=MACHINE).forecast(
        QUESTION, steps=1000, mtbf="100h", save="30s", restart="10min", price=2.5, grid=0.1, overhead=1.2
    )
    terms = Terms(steps=1000, mtbf=100 * HOUR, save=30.0, restart=600.0, price=2.5 / HOUR, grid=0.1 / 3.6e6,
                  overhead=1.2)  # fmt: skip

    theirs = forecast(QUESTION, MACHINE, terms)
    assert (ours.save, ours.restart, ours.overhead) == (30, 600, 1.2)
    assert ours.carbon == theirs.carbon
    assert ours.carbon.middle == pytest.approx(ours.energy.middle / 3.6e6 * 0.1)
    assert ours.assumptions == theirs.assumptions


def test_what_is_open_or_impossible_is_said() -> None:
    with pytest.raises(SpecError, match="how much to train is open"):
        reckoned(steps=0)
    with pytest.raises(SpecError, match="tokens"):
        Terms(tokens=1, steps=1)
    with pytest.raises(CapacityError, match="leave no time"):
        reckoned(mtbf=64.0)
