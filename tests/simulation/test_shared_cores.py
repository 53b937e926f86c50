"""Ranks that share cores take as long event by event as their plan says, and as long as the cores' work at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from supernode.hardware.machine import Machine
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Parallelism
from supernode.schema.trace import ModelTrace, PassWork, Size, TracedPart, Work
from supernode.simulation.events.engine import Engine
from supernode.simulation.events.work import StageWork, StepWork
from supernode.simulation.step import simulate_step

Computer = Callable[..., Machine]
ALIKE = 0.02
"""How far closed form and events may be apart where stages are alike."""
UNEVEN = 0.06
"""Where one stage takes a third longer than the others."""
LAYOUTS: list[dict[str, object]] = [
    {"pipeline": 6}, {"pipeline": 2, "data": 3}, {"tensor": 2, "pipeline": 3}, {"pipeline": 3}, {"pipeline": 4},
    {"pipeline": 4, "schedule": "gpipe"}, {"pipeline": 2, "schedule": "interleaved", "interleave": 2},
    {"pipeline": 2, "data": 2, "sharding": "fsdp"}, {"tensor": 2, "data": 2}, {"data": 4},
]  # fmt: skip


def ranks(degrees: dict[str, object]) -> Parallelism:
    return replace(Parallelism(data=1), **degrees)  # type: ignore[arg-type]


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_a_shape_s_events_agree_with_its_plan(degrees: dict[str, object], cores: int, computer: Computer) -> None:
    want = ranks(degrees)
    shape = DecoderShape(layers=12, width=256, heads=8, vocabulary=256)
    job = JobSpec(
        model=shape, batch=12 * want.data, gradient_accumulation=6, data=DataSpec(sequence=128), parallelism=want
    )
    machine = computer(want.tensor * want.pipeline * want.data, cores=cores)
    plan = make_plan(job, machine)

    assert plan.step is not None
    assert simulate_step(plan, machine).total == pytest.approx(plan.step.total, rel=ALIKE)


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("degrees", [each for each in LAYOUTS if "tensor" not in each], ids=str)
@pytest.mark.parametrize(("costs", "apart"), [([1.0] * 12, ALIKE), ([1.0] * 11 + [2.0], UNEVEN)], ids=["alike", "head"])
def test_a_module_s_events_agree_with_its_plan(
    costs: list[float], apart: float, degrees: dict[str, object], cores: int, computer: Computer
) -> None:
    want = ranks(degrees)
    parts = tuple(
        TracedPart(
            name=str(place), kind="Linear", parameters=10**5, trained=10**5, output=Size(each=1e5),
            forward=PassWork(each=Work(products=cost * 1e9), kernels=2),
            backward=PassWork(each=Work(products=2 * cost * 1e9), kernels=4),
        )
        for place, cost in enumerate(costs)
    )  # fmt: skip
    job = JobSpec(
        model="mine.py:build", data=DataSpec(dataset="mine.py:data"), batch=12 * want.data, gradient_accumulation=6,
        parallelism=want,
    )  # fmt: skip
    machine = computer(want.pipeline * want.data, cores=cores)
    plan = make_plan(job, machine, trace=ModelTrace(parts=parts, children=tuple(part.name for part in parts)))

    assert plan.step is not None
    assert simulate_step(plan, machine).total == pytest.approx(plan.step.total, rel=apart)
    # Twelve samples of a copy, three times the forward's products, over cores at 70 GFLOP/s: nothing is faster.
    assert plan.step.total > 12 * want.data * 3e9 * sum(costs) / 7e10 / min(cores, want.pipeline * want.data)


def shared(sharing: float, **changes: object) -> float:
    stages = tuple(StageWork(layers=1, forward=1.0, backward=2.0) for _ in range(3))
    given = {"stages": stages, "schedule": "1f1b", "pipeline": 3, "micro_batches": 3, "sharing": sharing} | changes
    return Engine(StepWork(**given)).run()  # type: ignore[arg-type]


def test_three_ranks_on_one_core_take_the_sum_of_their_work() -> None:
    # At a third of the core each, 3 s a micro-batch; whoever is alone goes three times as fast.
    assert shared(3.0) == pytest.approx(3 * 3)


def test_ranks_with_cores_of_their_own_wait_as_ever() -> None:
    assert shared(1.0) == pytest.approx(3 * (3 + 3 - 1))


def test_two_cores_for_three_ranks_by_hand() -> None:
    # One micro-batch: three forwards and three backwards one after the other, each rank alone at a whole core, which
    # is one and a half times its share.
    assert shared(1.5, micro_batches=1) == pytest.approx((3 * 1 + 3 * 2) / 1.5)


def test_two_replicas_of_a_stage_need_two_cores() -> None:
    # Four ranks on three cores: a stage's two, alone, have a core each, four thirds of their share.
    stages = tuple(StageWork(layers=1, forward=1.0, backward=2.0) for _ in range(2))
    work = StepWork(stages=stages, schedule="1f1b", pipeline=2, micro_batches=1, sharing=4 / 3)

    assert Engine(work).run() == pytest.approx((1 + 1 + 2 + 2) * 3 / 4)
