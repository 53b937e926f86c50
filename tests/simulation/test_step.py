"""The simulated pipeline against the published bubble, a hand schedule and laws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from supernode.errors import SpecError
from supernode.hardware.assemble import build_machine
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Parallelism
from supernode.simulation.step import Timeline, simulate_pipeline, simulate_step, slowest_replicas

MACHINE = build_machine(card_count=8, card="H100", interconnect="Fat_Tree")
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


def job(schedule: str, interleave: int, *, pipeline: int = 4, data: int = 2) -> JobSpec:
    return JobSpec(
        model=DecoderShape(layers=32, width=1024, heads=16, vocabulary=64),
        batch=64,
        gradient_accumulation=16,
        precision="bfloat16",
        data=DataSpec(sequence=1024),
        parallelism=Parallelism(
            tensor=1, pipeline=pipeline, data=data, sharding="fsdp", schedule=schedule, interleave=interleave
        ),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("schedule", "interleave"), SCHEDULES[:3])
def test_the_closed_form_agrees_within_two_per_cent_where_stages_are_alike(schedule: str, interleave: int) -> None:
    plan = make_plan(job(schedule, interleave), MACHINE)

    assert plan.step is not None
    assert plan.step.total == pytest.approx(simulate_step(plan, MACHINE).total, rel=0.02)


def test_slow_transfers_lengthen_the_step_in_both() -> None:
    slow = replace(MACHINE, tiers=tuple(replace(tier, bandwidth=2e9) for tier in MACHINE.tiers))
    plan = make_plan(job("1f1b", 1, data=1), slow)

    assert plan.step is not None
    assert plan.step.total == pytest.approx(simulate_step(plan, slow).total, rel=0.02)


def test_zero_bubble_waits_for_forward_and_backward_less_two_weights_gradients() -> None:
    step = simulate_pipeline(
        [1.0] * 4, [2.5] * 4, weights=[0.9] * 4, schedule="zero_bubble", pipeline=4, micro_batches=8
    )

    # Qi et al., arXiv:2401.10241, table 1: (p − 1) (F + B − 2 W) for ZB-H1, B with the weights' gradients.
    assert step.total == pytest.approx(8 * 3.5 + 3 * (1 + 2.5 - 1.8))


def test_a_rank_that_waits_while_it_sends_loses_the_way_each_time() -> None:
    step = simulate_pipeline(
        [1.0, 1.0], [2.0, 2.0], schedule="gpipe", pipeline=2, micro_batches=4, transfer=0.5, blocks=True
    )

    # By hand: rank 0 has passed its last forward on at 4 × 1.5, rank 1 then forwards to 7 and sends each gradient for
    # half a second after two: 7 + 4 × 2.5 at rank 0, whose last backward takes two.
    assert step.total == 7 + 4 * 2.5 + 2


def test_a_card_at_half_speed_holds_up_the_pipeline_by_hand() -> None:
    step = simulate_pipeline([1.0] * 2, [2.0] * 2, schedule="1f1b", pipeline=2, micro_batches=2, speed=[1, 0.5])

    passes = {(s.rank, s.kind, s.micro_batch): (s.start, s.end) for s in step.spans}
    assert passes[1, "forward", 0] == (1, 3)
    assert passes[1, "backward", 0] == (3, 7)
    assert passes[1, "forward", 1] == (7, 9)
    assert passes[1, "backward", 1] == (9, 13)
    assert passes[0, "backward", 1] == (13, 15)


def test_replicas_differ_where_their_cards_do() -> None:
    # Ranks are (pipeline 2, data 3, tensor 2): rank 9 is stage 1, replica 1; ranks 0 and 1 are stage 0, replica 0.
    speed = {9: 0.5, 0: 0.8, 1: 0.9}

    assert slowest_replicas(speed, tensor=2, data=3, pipeline=2) == [(0.8, 1.0), (1.0, 0.5), (1.0, 1.0)]
    assert slowest_replicas(speed, tensor=2, data=3, pipeline=2, tied=True) == [(0.8, 0.5)]


@pytest.mark.parametrize("speed", [{99: 0.5}, {0: 0.0}, {0: -1.0}])
def test_a_speed_must_be_of_a_rank_and_above_nothing(speed: dict[int, float]) -> None:
    with pytest.raises(SpecError, match="of its speed"):
        slowest_replicas(speed, tensor=1, data=2, pipeline=2)


def test_one_slow_card_slows_a_planned_step_by_what_it_computes() -> None:
    plan = make_plan(job("1f1b", 1, pipeline=1), MACHINE)
    usual, slow = simulate_step(plan, MACHINE), simulate_step(plan, MACHINE, speed={1: 0.5})

    # FSDP on one stage: every pass waits for the slow card, whose computing takes twice as long; waiting for weights,
    # of which more is hidden then, does not.
    passes = sum(s.end - s.start for s in usual.spans if s.kind in ("forward", "backward"))
    assert passes * 1.8 < sum(s.end - s.start for s in slow.spans if s.kind in ("forward", "backward")) < passes * 2
    assert slow.total < 2 * usual.total


def test_an_own_module_cannot_be_simulated() -> None:
    plan = make_plan(JobSpec(model="net.py:build", data=DataSpec(dataset="net.py:data")), MACHINE)

    with pytest.raises(SpecError, match="not known before it runs"):
        simulate_step(plan, MACHINE)
