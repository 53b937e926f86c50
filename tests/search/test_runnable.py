"""Is what is called runnable laid out by the planner as it stands, and nothing else?"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from supernode.errors import SpecError
from supernode.hardware.assemble import build_machine, predefined
from supernode.hardware.machine import Machine
from supernode.planning.layout import resolve_layout
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import PRESETS, DecoderShape
from supernode.search.best import Plans, best_plans
from supernode.search.exhaustive import every_strategy
from supernode.search.runnable import job_of, obstacles, planner_cut, runnable_space
from supernode.search.search import Choice
from supernode.search.space import Space
from supernode.workload.presets import public_model
from supernode.workload.shape import decoder_shape

MACHINE = build_machine(8, "Hybrid", card="H100")
JOB = JobSpec(
    model=DecoderShape(layers=6, width=512, heads=8, kv_heads=4), batch=16, data=DataSpec(sequence=256),
    precision="bfloat16",
)  # fmt: skip


def plans(*, runnable: bool) -> Plans:
    return best_plans(JOB, MACHINE, runnable=runnable, top=50)


def test_every_runnable_plan_is_one_that_the_planner_takes() -> None:
    found = plans(runnable=True)

    assert len(found.found.best) > 5
    assert not any(found.obstacles)
    for choice in (*found.found.best, *found.found.front):
        plan = make_plan(job_of(found.space, choice, JOB), MACHINE)
        axes = choice.axes
        assert (plan.layout.tensor, plan.layout.pipeline, plan.layout.data) == (
            axes["tensor"], axes["pipeline"], axes["data"],
        )  # fmt: skip
        assert plan.micro_batch == axes["micro_batch"]
        assert plan.layout.interleave == axes["interleave"]


@pytest.mark.parametrize("machine", [MACHINE, build_machine(8, "Full_Mesh", card="CPU-core")], ids=["H100", "cores"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_what_the_search_says_the_planner_says(machine: Machine, precision: Literal["bfloat16", "float32"]) -> None:
    job = replace(JOB, precision=precision, optimizer=OptimizerSpec(name="sgd", clip=0))
    found = best_plans(job, machine, runnable=True, top=50)

    uneven = [choice for choice in found.found.best if 6 % (choice.axes["pipeline"] * choice.axes["interleave"])]
    assert len(found.found.best) - len(uneven) > 4
    assert uneven
    for choice in (*found.found.best, *found.found.front):
        plan = make_plan(job_of(found.space, choice, job), machine)
        assert plan.step is not None
        assert plan.memory is not None
        assert plan.step.total == pytest.approx(choice.time, rel=1e-9)
        assert plan.memory.total == pytest.approx(choice.memory, rel=1e-6)  # whole bytes


@pytest.mark.parametrize(
    ("name", "machine", "batch", "sequence"),
    [("llama3-8b", "24xA100-80", 48, 8192), ("llama3-70b", "100xH200", 200, 4096)],
)
def test_uneven_stages_hold_what_the_planner_cuts(name: str, machine: str, batch: int, sequence: int) -> None:
    job = JobSpec(model=PRESETS[name], batch=batch, data=DataSpec(sequence=sequence), precision="bfloat16")
    held = predefined(machine)
    found = best_plans(job, held, runnable=True, objective="memory", top=50)

    staged = [choice for choice in found.found.best if choice.axes["pipeline"] > 2]
    assert staged
    for choice in staged:
        plan = make_plan(job_of(found.space, choice, job), held)
        assert plan.memory is not None
        assert plan.step is not None
        assert plan.memory.total == pytest.approx(choice.memory, rel=1e-6)
        assert plan.step.total == pytest.approx(choice.time, rel=1e-9)
        assert plan.memory.total < 0.9 * held.card.memory


def test_a_head_of_two_layers_makes_room_on_the_last_rank() -> None:
    # By hand: a layer is 2·64·(4·64 + 3·128) + 2·64·16 FLOPs a token, the head 2·64·1312, which is two layers. Eight
    # layers and two over two ranks are five each, of which the last one's are three layers and the head.
    shape = DecoderShape(layers=8, width=64, heads=4, kv_heads=4, hidden=128, vocabulary=1312)
    cut = planner_cut(decoder_shape(shape), 16)

    assert cut(2, 1) == (5, 3)
    assert cut(1, 1) == (0, 0)


def test_what_has_no_obstacle_is_what_the_planner_takes() -> None:
    space = plans(runnable=False).space
    runnable = 0
    for axes in every_strategy(space):
        choice = Choice(axes=axes, time=0, memory=0, energy=0, cost=0)
        if not obstacles(space, choice):
            resolve_layout(job_of(space, choice, JOB), 8)
            runnable += 1

    ours = runnable_space(space)
    assert 0 < runnable == sum(1 for _ in every_strategy(ours)) < ours.strategies < space.strategies


def test_tensor_ranks_share_both_pieces_of_a_context_ranks_sequence() -> None:
    # 2,056 tokens go to 4 × 2 ranks, in two pieces only where tensor ranks do not share them.
    job = replace(JOB, data=DataSpec(sequence=2056))
    assert isinstance(job.shape, DecoderShape)
    space = Space(model=decoder_shape(replace(job.shape, vocabulary=256)), cards=(8,), batch=16, sequence=2056)
    alike = dict.fromkeys(("expert", "pipeline", "schedule", "interleave", "micro_batch", "data"), 1.0)
    axes = alike | {"cards": 8.0, "tensor": 4.0, "context": 2.0, "recompute": 0.0, "sharding": 0.0, "offload": 0.0}
    whole, shared = (
        Choice(axes=axes | {"sequence_parallel": spread}, time=0, memory=0, energy=0, cost=0) for spread in (0.0, 1.0)
    )

    assert resolve_layout(job_of(space, whole, job), 8).context == 2
    (named,) = obstacles(space, shared)
    assert "a sequence that its axes cannot share evenly" in named


def test_what_the_trainer_lacks_is_named() -> None:
    found = plans(runnable=False)
    axes = found.best.axes | {"context": 3.0, "sharding": 1.0, "expert": 2.0, "offload": 1.0, "pipeline": 1.0}
    choice = Choice(axes=axes, time=1, memory=1, energy=1, cost=1)

    named = obstacles(found.space, choice)
    halved = "layers computed again under zero-bubble schedules, or a sequence that its axes cannot share evenly"
    assert {halved, "ZeRO 1", "experts of other models than its own", "offloading to the host"} <= set(named)
    with pytest.raises(SpecError, match="lacks experts of other models"):
        job_of(found.space, choice, JOB)


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt3-175b", "bert-large", "nemotron-3-nano"])
def test_models_that_the_trainer_does_not_build_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="our trainer builds"):
        runnable_space(Space(model=public_model(name), cards=(8,), batch=8, sequence=512))
