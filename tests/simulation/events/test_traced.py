"""The step of the user's own module takes as long event by event as its plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supernode.hardware.assemble import build_machine
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.spread import Parallelism
from supernode.schema.trace import ModelTrace, PassWork, Size, TracedPart, Work
from supernode.simulation.step import simulate_step

MACHINE = build_machine(card_count=8, card="H100")
COSTS = {"alike": [1.0] * 8, "uneven": [1.0, 2, 3, 1, 2, 1, 1, 4]}
LAYOUTS: list[dict[str, object]] = [
    {}, {"pipeline": 4}, {"pipeline": 4, "schedule": "gpipe"}, {"data": 2}, {"pipeline": 2, "data": 2},
    {"pipeline": 2, "schedule": "interleaved", "interleave": 2}, {"data": 4, "sharding": "fsdp"},
    {"pipeline": 2, "data": 2, "sharding": "fsdp"},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_events_agree_with_the_plan(costs: list[float], layout: dict[str, object]) -> None:
    parts = tuple(
        TracedPart(
            name=str(place), kind="Linear", parameters=10**7, trained=10**7, output=Size(each=1e6),
            forward=PassWork(each=Work(products=cost * 1e12), kernels=2),
            backward=PassWork(each=Work(products=2 * cost * 1e12), kernels=4),
        )
        for place, cost in enumerate(costs)
    )  # fmt: skip
    job = JobSpec(
        model="mine.py:build", data=DataSpec(dataset="mine.py:data"), batch=64, gradient_accumulation=4,
        parallelism=replace(Parallelism(data=1), **layout),
    )  # fmt: skip
    trace = ModelTrace(parts=parts, children=tuple(part.name for part in parts))
    plan = make_plan(job, MACHINE, trace=trace)

    assert plan.step is not None
    assert simulate_step(plan, MACHINE).total == pytest.approx(plan.step.total, rel=0.02)
