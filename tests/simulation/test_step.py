"""The simulated pipeline against the published bubble, a hand schedule and laws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from supernode.errors import SpecError
from supernode.hardware.assemble import build_machine
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec, Parallelism
from supernode.schema.model import DecoderShape
from supernode.simulation.step import Timeline, simulate_pipeline, simulate_step

MACHINE = build_machine(card_count=8, card="H100")
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]


def uniform(schedule: str, *, pipeline: int, interleave: int, micro_batches: int, transfer: float = 0) -> Timeline:
    stages = pipeline * interleave
    return simulate_pipeline(
        [1.0] * stages,
        [2.0] * stages,
        schedule=schedule,
        pipeline=pipeline,
        micro_batches=micro_batches,
        transfer=transfer,
    )


@pytest.mark.parametrize(("schedule", "interleave"), SCHEDULES)
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 32)])
def test_like_stages_have_the_published_bubble(
    schedule: str, interleave: int, pipeline: int, micro_batches: int
) -> None:
    step = uniform(schedule, pipeline=pipeline, interleave=interleave, micro_batches=micro_batches)

    # Narayanan et al., arXiv:2104.04473, section 2.2: the bubble is (p - 1) / (m v) of the work of 3 s per pass.
    assert step.total == pytest.approx(3 * (micro_batches * interleave + pipeline - 1))


def test_two_ranks_and_two_micro_batches_by_hand() -> None:
    step = uniform("1f1b", pipeline=2, interleave=1, micro_batches=2, transfer=0.5)

    passes = {(s.rank, s.kind, s.micro_batch): (s.start, s.end) for s in step.spans}
    assert passes[0, "forward", 0] == (0, 1)
    assert passes[0, "send", 0] == (1, 1.5)
    assert passes[1, "forward", 0] == (1.5, 2.5)
    assert passes[1, "backward", 0] == (2.5, 4.5)
    assert passes[0, "backward", 0] == (5.0, 7.0)
    assert passes[1, "backward", 1] == (5.5, 7.5)
    assert passes[0, "backward", 1] == (8.0, 10.0)
    assert step.total == 10


@pytest.mark.parametrize(("schedule", "interleave"), SCHEDULES)
def test_a_rank_does_one_thing_at_a_time_and_each_pass_once(schedule: str, interleave: int) -> None:
    step = uniform(schedule, pipeline=4, interleave=interleave, micro_batches=8, transfer=0.3)

    passes = [span for span in step.spans if span.kind != "send"]
    counts = Counter((span.stage, span.kind, span.micro_batch) for span in passes)
    assert set(counts.values()) == {1}
    assert len(counts) == 4 * interleave * 8 * 2
    for rank in range(4):
        mine = sorted((s.start, s.end) for s in passes if s.rank == rank)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))


@pytest.mark.parametrize(("schedule", "interleave"), SCHEDULES)
def test_no_pass_starts_before_its_input_has_come(schedule: str, interleave: int) -> None:
    step = uniform(schedule, pipeline=2, interleave=interleave, micro_batches=4, transfer=0.25)

    passes = {(s.stage, s.kind, s.micro_batch): s for s in step.spans if s.kind != "send"}
    for (stage, kind, micro_batch), span in passes.items():
        source = stage - 1 if kind == "forward" else stage + 1
        before = passes.get((source, kind, micro_batch))
        if before:
            assert span.start >= before.end + 0.25 - 1e-9


def test_interleaving_shrinks_the_bubble() -> None:
    plain = uniform("1f1b", pipeline=4, interleave=1, micro_batches=8)
    halved = simulate_pipeline([0.5] * 8, [1.0] * 8, schedule="interleaved", pipeline=4, micro_batches=8)

    assert halved.total < plain.total


def job(schedule: str, interleave: int, *, pipeline: int = 4) -> JobSpec:
    return JobSpec(
        model=DecoderShape(layers=32, width=1024, heads=16, vocabulary=64),
        batch=64,
        gradient_accumulation=16,
        precision="bfloat16",
        data=DataSpec(sequence=1024),
        parallelism=Parallelism(
            tensor=1, pipeline=pipeline, data=2, sharding="fsdp", schedule=schedule, interleave=interleave
        ),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("schedule", "interleave"), SCHEDULES[:3])
def test_the_closed_form_agrees_within_two_per_cent_where_stages_are_alike(schedule: str, interleave: int) -> None:
    plan = make_plan(job(schedule, interleave), MACHINE)

    assert plan.step is not None
    assert plan.step.total == pytest.approx(simulate_step(plan, MACHINE).total, rel=0.02)


def test_slow_transfers_lengthen_the_step_in_both() -> None:
    slow = replace(MACHINE, tiers=tuple(replace(tier, bandwidth=2e9) for tier in MACHINE.tiers))
    plan = make_plan(job("1f1b", 1), slow)

    assert plan.step is not None
    assert plan.step.total == pytest.approx(simulate_step(plan, slow).total, rel=0.02)


def test_an_own_module_cannot_be_simulated() -> None:
    plan = make_plan(JobSpec(model="net.py:build", data=DataSpec(dataset="net.py:data")), MACHINE)

    with pytest.raises(SpecError, match="not known before it runs"):
        simulate_step(plan, MACHINE)
