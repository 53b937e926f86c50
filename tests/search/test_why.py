"""Do a plan's parts add up to its time, and do resources bring what they should?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from supernode.errors import SpecError
from supernode.forecast.rates import card_of
from supernode.forecast.times import step_parts
from supernode.hardware.assemble import build_machine, predefined
from supernode.hardware.machine import Machine
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.search.best import Plans, best_plans
from supernode.search.offload import Room, holding
from supernode.search.runnable import job_of
from supernode.search.why import BETTER, RESOURCES
from supernode.simulation.waterfall import plans_waterfall
from supernode.workload.presets import public_model

JOB = JobSpec(
    model=DecoderShape(layers=6, width=256, heads=8, vocabulary=256), batch=4, data=DataSpec(sequence=128),
)  # fmt: skip


def found(machine: Machine, **asked: object) -> Plans:
    return best_plans(JOB, machine, top=50, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["calibrated", "accelerators", "offloading"])
def test_parts_add_up_to_the_time(kind: str, calibrated: Machine) -> None:
    if kind == "calibrated":
        plans = found(calibrated)
    elif kind == "accelerators":
        plans = found(build_machine(8, "Hybrid", card="H100"))
    else:
        plans = best_plans(public_model("llama3-70b"), predefined("16xH100"), 16, sequence=4096, objective="memory")

    assert len(plans.found.best) > 3
    for choice, reason in zip(plans.found.best, plans.reasons, strict=True):
        assert sum(reason.parts.values()) == pytest.approx(choice.time, rel=1e-9)
        step = step_parts(plans.space.model, choice.ways(plans.space), plans.card, choice.software(plans.space))
        computing = step.compute + step.launch + step.optimizer + step.step + step.host
        assert reason.parts["compute"] == pytest.approx(float(computing), rel=1e-9)
    assert (plans.reasons[0].parts["offload"] > 0) == (kind == "offloading")
    if kind == "calibrated":
        spread = [choice for choice in plans.found.best if choice.axes["tensor"] * choice.axes["data"] > 1]
        assert all(float(step_parts(plans.space.model, choice.ways(plans.space), plans.card,
                                    choice.software(plans.space)).host) > 0 for choice in spread)  # fmt: skip


def test_a_host_link_works_while_the_card_waits_for_others() -> None:
    plans = best_plans(public_model("kimi-k2"), predefined("512xGPU"), 1024, sequence=4096, top=5, objective="memory")
    room = plans.room
    for choice, reason in zip(plans.found.best, plans.reasons, strict=True):
        ways, software = choice.ways(plans.space), choice.software(plans.space)
        step, held = (
            step_parts(plans.space.model, ways, plans.card, software),
            holding(plans.space.model, ways, software),
        )
        # By hand: weights and activations stream both ways for each micro-batch, beside all but the update.
        stream = float(2 * ways.micro_batches * (held.parts.weights + held.each)) / room.host_bandwidth
        states = float(held.parts.optimizer) / room.host_bandwidth
        passes = float(step.total - step.optimizer - step.step)

        assert choice.axes["offload"] == 7
        assert choice.time == pytest.approx(max(passes, stream) + states + float(step.optimizer + step.step), rel=1e-9)
        assert min(reason.saved.values()) >= 0


@pytest.mark.parametrize("machine", ["512xGPU", "512xA100-80", "64xAscend-910C"])
@pytest.mark.parametrize("name", ["kimi-k2", "gpt-oss-120b", "qwen3-30b-a3b"])
def test_nothing_better_makes_a_step_longer(name: str, machine: str) -> None:
    plans = best_plans(public_model(name), predefined(machine), 1024, sequence=4096, top=4)

    assert min(saved for reason in plans.reasons for saved in reason.saved.values()) >= 0


def test_measured_links_and_latency_are_told_apart(calibrated: Machine) -> None:
    card, room = card_of(calibrated, 4), Room(memory=1e12)
    curves = {
        name: RESOURCES[name](card, room)[0].wires.curves for name in ("links in the node", "latency", "compute")
    }  # fmt: skip

    for nbytes in (4.0, 1e5, 1e7):  # as measured: a millisecond, and a nanosecond a byte
        seconds = {
            name: float(curve.time("all_reduce", np.asarray(nbytes), cards=4.0))
            for name, curve in curves.items() if curve is not None
        }  # fmt: skip
        grown = seconds["compute"] / (1e-3 + nbytes * 1e-9)
        start, rest = (1e-3 + 4e-9) * grown, (nbytes - 4) * 1e-9 * grown
        assert seconds["links in the node"] == pytest.approx(start + rest / BETTER)
        assert seconds["latency"] == pytest.approx(start / BETTER + rest)


def test_what_waits_on_a_calibrated_computer_gains_from_links_and_latency(calibrated: Machine) -> None:
    plans = found(calibrated)

    for choice, reason in zip(plans.found.best, plans.reasons, strict=True):
        waits = choice.axes["tensor"] > 1 or choice.axes["data"] > 1
        assert (reason.saved["links in the node"] > 0) == waits or choice.axes["pipeline"] > 1
        assert not waits or reason.saved["latency"] > 0
        assert reason.saved["network between nodes"] == 0
        both = reason.saved["links in the node"] + reason.saved["latency"]
        measured = sum(seconds for name, seconds in reason.parts.items() if name in ("tensor", "data"))
        assert measured == 0 or both > 0.05 * measured / choice.time


@pytest.mark.parametrize("cards", [None, 5, 4, 2])
def test_a_search_and_the_plan_of_what_it_found_agree_with_fewer_cards_than_there_are(
    calibrated: Machine, cards: int | None
) -> None:
    plans = found(calibrated, cards=cards)

    assert {int(choice.axes["cards"]) for choice in plans.found.best} == {min(cards or 4, 4)}
    for choice in plans.found.best:
        if 6 % (choice.axes["pipeline"] * choice.axes["interleave"]):
            continue
        plan = make_plan(job_of(plans.space, choice, JOB), calibrated)
        assert plan.step is not None
        assert plan.step.total == pytest.approx(choice.time, rel=0.005)
    assert sum(bar.seconds for bar in plans_waterfall(plans)) == pytest.approx(plans.best.time)
    assert plans.card.sharing == min(cards or 4, 4) / 2  # so many ranks take turns on two cores


def test_on_cores_only_what_our_trainer_runs_is_searched(calibrated: Machine) -> None:
    ours, asked = found(calibrated), found(calibrated, runnable=True)
    roomy = replace(calibrated, card=replace(calibrated.card, memory=10**13))
    mixture = best_plans(public_model("mixtral-8x7b"), roomy, 4, sequence=128, top=1)

    assert ours.is_ours
    assert not any(ours.obstacles)
    assert ours.found.best == asked.found.best
    assert not mixture.is_ours
    assert any("our trainer cannot run this" in note for note in mixture.notes)


def test_our_trainer_computes_in_two_precisions() -> None:
    with pytest.raises(SpecError, match="does not compute in float8"):
        best_plans(public_model("llama3-8b"), predefined("8xH100"), 8, sequence=128, precision=2, runnable=True)


def test_hardware_without_a_price_costs_nothing_known() -> None:
    machine, model = build_machine(16, "3D_Torus", card="TPU-v4"), public_model("llama3-8b")
    plans = best_plans(model, machine, 16, sequence=2048, top=1)

    assert {choice.cost for choice in (*plans.found.best, *plans.found.front)} == {None}
    with pytest.raises(SpecError, match="has no price") as refused:
        best_plans(model, machine, 16, sequence=2048, objective="cost")
    assert "--price" in refused.value.hint


@pytest.mark.parametrize("card", ["TPU-v4", "H100"])
def test_with_a_price_the_least_cost_is_the_fewest_card_seconds(card: str) -> None:
    machine = build_machine(16, "3D_Torus", card=card)
    plans = best_plans(public_model("llama3-8b"), machine, 16, sequence=2048, objective="cost", price=3.6 / 3600)

    for choice in plans.found.best:
        assert choice.cost == pytest.approx(choice.axes["cards"] * choice.time * 1e-3)
    fastest = best_plans(public_model("llama3-8b"), machine, 16, sequence=2048, top=1)
    assert plans.best.time == pytest.approx(fastest.best.time)
