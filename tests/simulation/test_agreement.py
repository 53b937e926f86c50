"""One job takes one time, whoever is asked: the search, the plan, the forecast, and a simulation in both its views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from supernode.advice.pace import pace_of
from supernode.advice.question import question_of
from supernode.control.supernode import SuperNode
from supernode.hardware.assemble import build_machine
from supernode.hardware.machine import Machine
from supernode.planning.cost import at_work, software_of
from supernode.planning.memory import strategy_of
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism
from supernode.search.best import best_plans
from supernode.search.runnable import job_of
from supernode.simulation.domain import outside
from supernode.workload.shape import decoder_shape

EVENTS = 0.02
"""How far the events may be from the closed form where nothing speaks against it, see `simulation.domain`."""
# A head so small that the plan cuts alike layers evenly, as the search does, which knows only degrees.
SHAPE = DecoderShape(layers=24, width=512, heads=8, vocabulary=256)
CASES = {
    "16 H100": {"batch": 64, "ranks": 16, "machine": lambda _: build_machine(card_count=16, card="H100")},
    "a node of H100": {"batch": 32, "ranks": 8, "machine": lambda _: build_machine(card_count=8, card="H100")},
    "6 ranks on 2 cores": {"batch": 36, "ranks": 6, "machine": lambda computer: computer(6, cores=2)},
    "8 ranks on 4 cores": {"batch": 32, "ranks": 8, "machine": lambda computer: computer(8, cores=4)},
    "6 of 8 on 2 cores": {"batch": 6, "ranks": 6, "cards": 6, "machine": lambda computer: computer(8, cores=2)},
    "4 of 7 on 2 cores": {"batch": 64, "ranks": 4, "cards": 4, "machine": lambda computer: computer(7, cores=2)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_say_the_same_of_what_a_search_finds(case: dict[str, object], computer: Callable[..., Machine]) -> None:
    machine: Machine = case["machine"](computer)  # type: ignore[operator]
    job = JobSpec(model=SHAPE, batch=case["batch"], data=DataSpec(sequence=256))  # type: ignore[arg-type]
    plans = best_plans(job, machine, runnable=True, top=6, cards=case.get("cards"))  # type: ignore[arg-type]

    layouts, compared = set(), 0
    for choice in plans.found.best:
        asked = job_of(plans.space, choice, job)
        plan = make_plan(asked, machine)
        played = SuperNode(machine=machine).simulate(replace(asked, steps=1))

        assert plan.step is not None
        assert plan.ranks == case["ranks"]
        assert choice.time == pytest.approx(plan.step.total, rel=1e-9)
        assert pace_of(question_of(asked), machine).seconds == pytest.approx(plan.step.total, rel=1e-9)
        assert sum(bar.seconds for bar in played.bars) == pytest.approx(plan.step.total, rel=1e-9)
        if machine.card.kind == "cpu" or not reasons(plan, machine):
            assert played.timeline.total == pytest.approx(plan.step.total, rel=EVENTS), plan.layout
            compared += 1
        layouts.add(plan.layout)
    assert len(layouts) > 2
    assert compared > 1


def reasons(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Return why the closed form may be further from a plan's events."""
    return outside(
        decoder_shape(SHAPE), strategy_of(plan), at_work(plan, machine), software_of(plan, machine), machine=machine,
        layers=[stage.last - stage.first for stage in plan.stages],
    )  # fmt: skip


DEGREES = [
    {"pipeline": 6}, {"pipeline": 2, "data": 3}, {"tensor": 2, "pipeline": 3}, {"data": 6}, {"pipeline": 3, "data": 2},
    {"data": 3, "tensor": 2}, {"pipeline": 3, "data": 2, "sharding": "fsdp"},
]  # fmt: skip


@pytest.mark.parametrize("idle", [0, 2])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_all_say_the_same_of_degrees_that_a_user_asks_for(
    degrees: dict[str, object], idle: int, computer: Callable[..., Machine]
) -> None:
    machine = computer(6 + idle, cores=2)
    want = replace(Parallelism(data=1), **degrees)  # type: ignore[arg-type]
    job = JobSpec(
        model=SHAPE, batch=12 * want.data, gradient_accumulation=6, data=DataSpec(sequence=128), parallelism=want
    )

    plan = make_plan(job, machine)
    played = SuperNode(machine=machine).simulate(replace(job, steps=1))

    assert plan.step is not None
    assert plan.ranks == 6
    assert plan.step.total == make_plan(job, computer(6, cores=2)).step.total  # type: ignore[union-attr]
    assert pace_of(question_of(job), machine).seconds == pytest.approx(plan.step.total, rel=1e-9)
    assert sum(bar.seconds for bar in played.bars) == pytest.approx(plan.step.total, rel=1e-9)
    assert played.timeline.total == pytest.approx(plan.step.total, rel=EVENTS)
