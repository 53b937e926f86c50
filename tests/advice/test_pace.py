"""Does a project go as fast, with as many joules and as many doubts, as its plan says?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from supernode.advice.pace import pace_of, pace_of_best
from supernode.advice.project import forecast
from supernode.advice.question import question_about, question_of, search
from supernode.advice.terms import CALIBRATED_BAND, UNKNOWN_BAND, Terms, band_of
from supernode.control.simulate import simulate
from supernode.forecast.trust import band
from supernode.hardware.assemble import build_machine, predefined
from supernode.hardware.machine import Machine
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.lasting import CheckpointSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Parallelism
from supernode.search.runnable import job_of

JOB = JobSpec(
    model=DecoderShape(layers=6, width=512, heads=8, kv_heads=4, vocabulary=256), batch=16, steps=100,
    data=DataSpec(sequence=256), precision="bfloat16",
)  # fmt: skip
SMALL = replace(JOB, precision="float32", gradient_accumulation=2)


@pytest.mark.parametrize("card", ["H100", "CPU-core"])
def test_a_plan_takes_the_same_joules_searched_and_laid_out(card: str) -> None:
    machine = build_machine(8, "Full_Mesh", card=card)
    plans = search(question_of(JOB), machine, runnable=True, top=50)
    even = [choice for choice in plans.found.best if 6 % (choice.axes["pipeline"] * choice.axes["interleave"]) == 0]

    assert len(even) > 4
    for choice in even:
        laid_out = pace_of(question_of(job_of(plans.space, choice, JOB)), machine)
        assert not laid_out.is_found
        assert laid_out.seconds == pytest.approx(choice.time, rel=0.005)
        assert laid_out.energy == pytest.approx(choice.energy, rel=0.005)


def test_what_a_plan_is_to_be_doubted_for_reaches_the_project() -> None:
    machine = predefined("64xH100")
    job = replace(JOB, parallelism=Parallelism(tensor=2, data=16))  # of 64 cards, 32 stay idle
    project = forecast(question_of(job), machine, Terms())

    assert any(said.startswith("32 of 64 cards stay idle") for said in project.assumptions)
    assert project.pace.is_outside
    assert any("outside what they were fitted on: the width 512" in said for said in project.assumptions)
    assert project.band == UNKNOWN_BAND
    assert "the plan lies outside of what was fitted, so that is a guess" in project.assumptions[0]


def test_a_plan_on_known_ground_keeps_the_tight_band_and_one_outside_does_not() -> None:
    machine = predefined("64xH100")
    near, far = (question_about("llama3-8b", batch=64, sequence=length) for length in (8192, 2**21))
    inside, outside = (pace_of_best(search(question, machine, top=1)) for question in (near, far))

    assert (inside.is_outside, outside.is_outside) == (False, True)
    assert band_of(near, machine, inside) == band(
        "H100", cards=64, width=4096, sharded=inside.is_sharded
    ) < UNKNOWN_BAND == band_of(far, machine, outside)  # fmt: skip


def test_fifteen_per_cent_are_for_what_our_trainer_runs_on_a_calibrated_computer(calibrated: Machine) -> None:
    own, found = question_of(replace(SMALL, parallelism=Parallelism(pipeline=2, data=2))), question_of(SMALL)
    roomy = replace(calibrated, card=replace(calibrated.card, memory=10**13))
    mixture = question_about("mixtral-8x7b", batch=4, sequence=128, precision="float32")

    assert band_of(own, calibrated, pace_of(own, calibrated)) == CALIBRATED_BAND
    assert band_of(found, calibrated, pace_of(found, calibrated, runnable=True)) == CALIBRATED_BAND
    strange = forecast(mixture, roomy, Terms(steps=10))
    assert strange.band == UNKNOWN_BAND
    assert "our trainer cannot run this plan here" in strange.assumptions[0]


def test_an_assumed_shape_is_told_of_in_a_project() -> None:
    question = question_about("nemotron-3.5-lightning", batch=64, sequence=4096)
    project = forecast(question, predefined("64xH100"), Terms(tokens=1e9))

    assert question.notes == (
        "the shape of nemotron-3.5-lightning is partly assumed: all of it; Nemotron 3 Nano with two layers more and a "
        "token predicted further ahead (source: none published).",
    )
    assert question.notes[0] in project.assumptions
    assert not question_about("llama3-8b", batch=64, sequence=4096).notes


@pytest.mark.parametrize("every", [5, 20])
def test_a_job_of_ours_saves_as_often_in_a_forecast_as_in_a_simulation(every: int, calibrated: Machine) -> None:
    job = replace(SMALL, parallelism=Parallelism(pipeline=2, data=2), checkpoint=CheckpointSpec(every=every))
    plan = make_plan(job, calibrated)
    played = simulate(plan, calibrated, mtbf=float("inf"), seed=0)
    project = forecast(question_of(job), calibrated, Terms(mtbf=1e15, draws=1))

    assert project.interval == pytest.approx(every * project.pace.seconds)
    assert played.state.saves == 100 // every
    assert project.save == pytest.approx(played.save_seconds, rel=0.01)
    assert project.restart == pytest.approx(played.restart_seconds + played.save_seconds, rel=0.01)
    # 100 steps and as many savings; the start is told apart, and steps event by event differ a little.
    assert played.seconds - played.restart_seconds == pytest.approx(
        100 * played.timeline.total + played.state.saves * played.save_seconds, rel=0.01
    )
    assert any(f"every {every} steps, as the job has them" in said for said in project.assumptions)
    assert any(f"every {every} steps, as the job has them" in said for said in played.terms)


def test_another_s_program_saves_as_often_as_is_best() -> None:
    question = question_of(replace(JOB, model="llama3-8b", batch=64))
    project = forecast(question, predefined("64xH100"), Terms(steps=10_000))

    assert not project.pace.is_ours
    assert project.interval == pytest.approx((2 * project.save * project.mtbf) ** 0.5, rel=0.05)  # Young's
