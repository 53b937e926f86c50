"""Step time against hand counts and laws, and against the search's own evaluation of the same strategies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from supernode.forecast.efficiency import card_model
from supernode.forecast.memory import memory_parts
from supernode.forecast.network import Wires, gather_time, send_time, sum_time
from supernode.forecast.rates import card_of
from supernode.forecast.times import step_parts
from supernode.hardware.assemble import build_machine
from supernode.hardware.machine import Machine
from supernode.planning.cost import at_work, flops_per_step, software_of, stage_times
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import PRESETS, DecoderShape
from supernode.schema.plan import StepTime
from supernode.schema.spread import Parallelism
from supernode.workload.shape import decoder_shape, make_shape
from supernode.workload.strategy import GPIPE, INTERLEAVED, ONE_F_ONE_B, make_strategies

MACHINE = build_machine(card_count=16, card="H100", interconnect="Fat_Tree")
SHAPE = DecoderShape(layers=8, width=2048, heads=16, vocabulary=32_000)
SCHEDULES = {"gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED}


def job(*, batch: int = 16, accumulation: int = 1, shape: DecoderShape = SHAPE, **degrees: object) -> JobSpec:
    return JobSpec(
        model=shape,
        batch=batch,
        gradient_accumulation=accumulation,
        precision="bfloat16",
        data=DataSpec(sequence=1024),
        parallelism=replace(Parallelism(data=1), **degrees),
    )


def step(job: JobSpec, machine: Machine = MACHINE) -> StepTime:
    made = make_plan(job, machine).step
    assert made is not None
    return made


def test_a_step_of_gpt3_takes_the_published_work() -> None:
    # Brown et al., arXiv:2005.14165, table D.1: 3.14e23 FLOPs for 300e9 tokens with 175B parameters. Ours has a gated
    # MLP, so its own parameters are counted; attention adds a few per cent.
    shape = PRESETS["gpt3-175b"]

    flops = flops_per_step(shape, 300_000_000_000, 2048)

    assert flops / shape.parameters * 175e9 == pytest.approx(3.14e23, rel=0.05)


def test_the_work_is_counted_by_hand() -> None:
    shape = DecoderShape(layers=2, width=8, heads=2, hidden=16, vocabulary=10)

    # Two layers of 4 × 8² + 3 × 8 × 16 entries, and a head of 8 × 10; norms are no products, the embedding a look-up.
    assert flops_per_step(shape, 100, 4) == 100 * (6 * (2 * (256 + 384) + 80) + 12 * 2 * 8 * 4 / 2)


def test_a_model_of_this_width_computes_at_the_published_rate() -> None:
    plan = make_plan(job(), MACHINE)

    # llm-foundry's MPT-1B, as wide and as eager, reaches 41.8% of an H100's peak on 8 cards and 45,455 token/s.
    assert plan.step is not None
    assert plan.flops / MACHINE.card.flops["bfloat16"] / plan.step.total == pytest.approx(0.418, rel=0.2)


STRATEGIES = [
    {},
    {"data": 2, "batch": 32},
    {"data": 16, "batch": 64},
    {"data": 8, "batch": 64, "sharding": "fsdp"},
    {"data": 8, "batch": 64, "accumulation": 4, "sharding": "fsdp"},
    {"tensor": 2},
    {"tensor": 8, "data": 2, "batch": 32},
    {"pipeline": 2, "batch": 32, "accumulation": 8},
    {"pipeline": 4, "batch": 32, "accumulation": 8, "schedule": "gpipe"},
    {"pipeline": 4, "batch": 32, "accumulation": 8, "schedule": "interleaved", "interleave": 2},
    {"tensor": 2, "pipeline": 2, "data": 4, "batch": 64, "accumulation": 4},
    {"tensor": 4, "pipeline": 4, "batch": 32, "accumulation": 8},
    {"pipeline": 2, "data": 8, "batch": 128, "accumulation": 4, "sharding": "fsdp"},
]


@pytest.mark.parametrize("degrees", STRATEGIES, ids=str)
def test_the_plan_and_the_search_give_one_strategy_one_time_and_one_memory(degrees: dict[str, object]) -> None:
    # A head so small that the plan cuts alike layers evenly, as the search does that knows only degrees.
    plan = make_plan(job(shape=replace(SHAPE, vocabulary=256), **degrees), MACHINE)  # type: ignore[arg-type]
    layout = plan.layout
    ways = make_strategies(
        tensor=layout.tensor, pipeline=layout.pipeline, interleave=layout.interleave, data=layout.data,
        sharding=3 if layout.sharding == "fsdp" else 0, micro_batch=plan.micro_batch, batch=plan.job.batch,
        sequence=1024, schedule=SCHEDULES[layout.schedule], precision=1,
    )  # fmt: skip
    model, software = decoder_shape(replace(SHAPE, vocabulary=256)), software_of(plan, MACHINE)

    searched = step_parts(model, ways, card_of(MACHINE), software)

    assert plan.step is not None
    assert plan.memory is not None
    assert plan.step.total == pytest.approx(float(searched.total), rel=1e-9)
    held = memory_parts(model, ways, software)
    assert plan.memory.weights + plan.memory.gradients + plan.memory.optimizer == pytest.approx(
        float(held.state), abs=2
    )
    assert plan.memory.activations == pytest.approx(float(held.activations), abs=1)


def test_an_uneven_cut_is_told_by_its_fullest_rank() -> None:
    heavy = replace(SHAPE, width=512, heads=8, vocabulary=200_000)
    piped = job(shape=heavy, batch=32, accumulation=8, pipeline=2)

    plan = make_plan(piped, MACHINE)

    times = stage_times(plan, MACHINE)
    assert plan.stages[0].last > 4  # the head outweighs layers, so the last stage has fewer
    assert plan.step is not None
    assert plan.step.compute == pytest.approx(8 * max(t.computing for t in times), rel=0.05)


def test_a_ring_of_one_costs_nothing_and_a_long_one_twice_the_bytes() -> None:
    wires = Wires(node_cards=1000, inside=1e9, outside=1e9, inside_latency=0.0)

    one, two, many = sum_time(wires, np.float64(1e9), cards=np.array([1.0, 2.0, 1000.0]), stride=np.ones(()))

    assert one == 0
    assert two == pytest.approx(1.0)
    assert many == pytest.approx(2.0, rel=0.01)


def test_tensor_cuts_compute_and_waits_for_four_all_reduces_per_block() -> None:
    cut = step(job(tensor=2))

    nbytes = make_shape(width=16 * 1024 * 2048 * 2, vocabulary=1).width
    one = 2 * gather_time(card_of(MACHINE).tuned_wires, nbytes, cards=nbytes * 0 + 2, stride=nbytes * 0 + 1)
    assert cut.tensor == pytest.approx((4 * 8 + 2) * float(one))
    assert 0.5 < cut.compute / step(job()).compute < 0.6  # norms and residual sums are not cut


@pytest.mark.parametrize(("schedule", "interleave"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_bubble_of_like_stages_is_the_published_share(schedule: str, interleave: int) -> None:
    fast = replace(MACHINE, tiers=tuple(replace(tier, bandwidth=1e18, latency=0.0) for tier in MACHINE.tiers))
    # Large micro-batches, so that the head's launches weigh nothing beside a stage.
    piped = job(batch=128, accumulation=8, pipeline=2, schedule=schedule, interleave=interleave)
    light_head = replace(piped, model=replace(SHAPE, vocabulary=16))

    made = step(light_head, fast)

    # Narayanan et al., arXiv:2104.04473, section 2.2: (p - 1) / (m v).
    assert made.pipeline / made.compute == pytest.approx(1 / (8 * interleave), rel=0.03)


def test_a_slow_link_shows_what_backward_does_not_hide() -> None:
    fast, slow = (
        job(batch=32, data=2),
        replace(MACHINE, tiers=tuple(replace(tier, bandwidth=1e9) for tier in MACHINE.tiers)),
    )

    shown = step(fast, slow).data

    # All-reduce of two cards: each sends its bytes once. What backward hides is at most as long as backward.
    plan = make_plan(fast, slow)
    efficiency = card_model("H100").fitted.inside
    whole = 2 * plan.parameters / (1e9 * efficiency)
    backward = sum(t.backward for t in stage_times(plan, slow))
    assert whole - backward < shown < whole


def test_fsdp_updates_only_its_shard() -> None:
    whole, shard = step(job(data=4)), step(job(data=4, sharding="fsdp"))

    # Whole copies read and write their gradients once more, into buckets: 9 passes for 7.
    assert shard.optimizer == pytest.approx(whole.optimizer / 4 * 7 / 9)


def test_groups_within_a_node_use_the_node() -> None:
    plan = make_plan(job(tensor=8, data=2), MACHINE)

    assert at_work(plan, MACHINE).wires.node_cards == 8


def test_a_group_that_straddles_nodes_pays_for_it() -> None:
    within, across = (make_plan(job(tensor=2), MACHINE, cards) for cards in ((6, 7), (7, 8)))

    assert within.step is not None
    assert across.step is not None
    assert at_work(across, MACHINE).wires.node_cards == 1
    assert across.step.tensor > within.step.tensor


def test_a_message_on_a_torus_takes_one_link() -> None:
    torus = build_machine(card_count=64, card="H100", interconnect="3D_Ring")
    plan = make_plan(job(batch=32, accumulation=4, pipeline=2, data=8), torus)

    nbytes = 1024 * 2048 * 2
    # Six links leave a card, two along each dim.
    assert torus.link_bandwidth == pytest.approx(torus.card.scale_up_bandwidth / 6)
    message = send_time(at_work(plan, torus).tuned_wires, np.asarray(float(nbytes)), stride=np.asarray(8.0))
    assert float(message) > nbytes / torus.link_bandwidth


def test_a_switched_message_has_the_whole_port() -> None:
    wires = card_of(MACHINE).tuned_wires
    nbytes = make_shape(width=1e9, vocabulary=1).width

    seconds = send_time(wires, nbytes, stride=nbytes * 0 + 1)

    assert float(seconds) == pytest.approx(1e9 / (wires.inside * wires.inside_efficiency) + wires.inside_latency)


def test_a_step_adds_up() -> None:
    made = step(job(batch=32, accumulation=4, tensor=2, pipeline=2, data=2))

    parts = (made.compute, made.tensor, made.pipeline, made.data, made.optimizer, made.overhead)
    assert made.total == pytest.approx(sum(parts))
    assert min(parts) >= 0
