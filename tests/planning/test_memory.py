"""Memory against hand counts, and laws of sharding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supernode.hardware.assemble import build_machine
from supernode.planning.memory import memory_use
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import MemoryUse
from supernode.schema.spread import Parallelism

MACHINE = build_machine(card_count=8, card="H100")
SHAPE = DecoderShape(layers=2, width=8, heads=2, hidden=16, vocabulary=10)


def use(job: JobSpec) -> MemoryUse:
    memory = memory_use(make_plan(job, MACHINE))
    assert memory is not None
    return memory


def job(*, accumulation: int = 1, batch: int = 4, shape: DecoderShape = SHAPE, **degrees: object) -> JobSpec:
    return JobSpec(
        model=shape,
        batch=batch,
        gradient_accumulation=accumulation,
        data=DataSpec(sequence=4),
        parallelism=replace(Parallelism(data=1), **degrees),
    )


def test_one_card_holds_what_a_hand_count_gives() -> None:
    memory = use(job())

    # Block: 4 matrices of 8×8, three of 8×16, two norms of 8 = 656. Two of them, embedding 10×8 (tied); the last
    # norm of 8 is not counted.
    assert memory.weights == 4 * (2 * 656 + 80)
    assert memory.gradients == memory.weights
    assert memory.optimizer == 2 * memory.weights
    # A token of a block keeps 4×8 whole, 3×8 + 2×8 + 4×16 own elements = 136.
    assert memory.activations == 16 * 4 * 2 * 136


def test_logits_count_where_they_are_larger_than_the_temporary_of_the_update() -> None:
    wide = replace(SHAPE, vocabulary=1000)

    assert use(job(batch=64, shape=wide)).workspace == 64 * 4 * 1000 * (4 + 4 + 4)


def test_fsdp_over_four_cards_leaves_a_quarter_of_the_state() -> None:
    replicas = use(job(data=4))
    sharded = use(job(data=4, sharding="fsdp"))

    # Of two layers, the one at work and the next one are gathered: the whole model.
    assert sharded.weights == replicas.weights / 4 + replicas.weights
    assert sharded.gradients == replicas.gradients / 4
    assert sharded.optimizer == replicas.optimizer / 4
    assert sharded.activations == replicas.activations


def test_tensor_two_halves_the_state() -> None:
    whole, half = use(job()), use(job(tensor=2))

    assert half.weights == whole.weights / 2
    # Of a token, 4×8 a block stay whole on every card; 104 are cut.
    assert half.activations == 16 * 4 * 2 * (32 + 104 / 2)


def test_a_cut_with_more_layers_on_the_first_rank_fills_it_more() -> None:
    heavy = replace(SHAPE, layers=8, vocabulary=300)
    plan = make_plan(job(batch=8, accumulation=8, pipeline=2, shape=heavy), MACHINE)

    held = plan.stages[0].last - plan.stages[0].first
    assert held > 4
    assert plan.memory is not None
    # Rank 0 of two holds two micro-batches of one sample of 4 tokens.
    assert plan.memory.activations == 2 * 4 * 4 * held * 136
    assert plan.memory.weights == 4 * (held * 656 + 300 * 8)


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_ranks_follow() -> None:
    gpipe = use(job(batch=8, accumulation=8, pipeline=2, schedule="gpipe"))
    one_each = use(job(batch=8, accumulation=8, pipeline=2))

    # gpipe's fullest rank is either; rank 0 of 1f1b holds two micro-batches of the eight.
    assert gpipe.activations > 3 * one_each.activations


def test_accumulation_without_a_pipeline_holds_one_micro_batch() -> None:
    assert use(job(batch=4, accumulation=4)).activations == use(job(batch=4)).activations / 4


def test_sgd_without_momentum_keeps_nothing() -> None:
    plain = replace(job(), optimizer=OptimizerSpec(name="sgd", momentum=0.0))

    assert use(plain).optimizer == 0


def test_a_175_billion_model_needs_sixteen_bytes_of_state_per_parameter() -> None:
    # Rajbhandari et al., arXiv:1910.02054: 16 bytes per parameter with Adam; in float32 alone it is as many.
    shape = DecoderShape(layers=4, width=1024, heads=16, vocabulary=50_257)

    memory = use(job(shape=shape))

    state = memory.weights + memory.gradients + memory.optimizer
    assert state == pytest.approx(16 * shape.parameters, rel=1e-4)  # the last norm is left out
