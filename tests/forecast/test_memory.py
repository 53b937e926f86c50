"""Memory for arrays of strategies: published equations, and laws of sharding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from supernode.forecast.memory import fuller_rank, memory_parts
from supernode.schema.order import forwards_ahead
from supernode.workload.presets import public_model
from supernode.workload.shape import gpt_shape, make_shape
from supernode.workload.strategy import (
    FULL,
    GPIPE,
    INTERLEAVED,
    NO_RECOMPUTE,
    ONE_F_ONE_B,
    SELECTIVE,
    ZERO_BUBBLE,
    Software,
    make_strategies,
)

GPT = gpt_shape(layers=96, width=12_288, heads=96, vocabulary=51_200, positions=2048)
WRITTEN = Software(flash=False, dropout=True)


def test_activations_follow_the_published_equation() -> None:
    # Korthikanti et al., arXiv:2205.05198, equation 2: s b h L (10 + 24/t + 5 a s / (h t)) bytes.
    ways = make_strategies(tensor=8, sequence=2048, recompute=NO_RECOMPUTE)

    found = memory_parts(GPT, ways, WRITTEN).activations

    assert float(found) == pytest.approx(2048 * 12_288 * 96 * (10 + 24 / 8 + 5 * 96 * 2048 / (12_288 * 8)))


def test_sequence_parallelism_with_selective_recomputation_leaves_34_bytes_over_the_tensor_axis() -> None:
    # Equation 6: 34 s b h L / t.
    ways = make_strategies(tensor=8, sequence=2048, recompute=SELECTIVE, sequence_parallel=1)

    assert float(memory_parts(GPT, ways, WRITTEN).activations) == pytest.approx(2048 * 12_288 * 96 * 34 / 8)


def test_full_recomputation_keeps_each_layers_input() -> None:
    ways = make_strategies(tensor=8, sequence=2048, recompute=FULL)

    assert float(memory_parts(GPT, ways, WRITTEN).activations) == pytest.approx(2 * 2048 * 12_288 * 96)


def test_state_is_eighteen_bytes_a_parameter() -> None:
    found = memory_parts(GPT, make_strategies(sequence=2048), WRITTEN).state

    assert float(found / GPT.parameters) == pytest.approx(18, rel=1e-3)


def test_each_zero_stage_shards_one_part_more() -> None:
    ways = make_strategies(data=64, sequence=2048, batch=64, sharding=np.arange(4))

    found = memory_parts(public_model("llama3-8b"), ways, Software())

    assert found.optimizer[0] == pytest.approx(64 * found.optimizer[1])
    assert found.gradients[1] == pytest.approx(64 * found.gradients[2])
    assert found.weights[2] > 10 * found.weights[3]
    assert np.all(np.diff(found.total) < 0)


def test_experts_are_spread_over_their_own_axis() -> None:
    model = public_model("deepseek-v3")

    one, spread = memory_parts(model, make_strategies(data=64, batch=64, expert=np.array([1, 64])), Software()).weights

    assert one - spread == pytest.approx(2 * float(model.routed_parameters) * 63 / 64)


def test_1f1b_holds_as_many_micro_batches_as_stages_and_gpipe_all() -> None:
    ways = make_strategies(pipeline=4, batch=32, sequence=2048, schedule=np.array([1, GPIPE]))

    one_each, all_of_them = memory_parts(GPT, ways, WRITTEN).activations

    assert all_of_them / one_each == pytest.approx(32 / 4)


WIDE_HEAD = make_shape(
    width=2048, vocabulary=128_000, attentions=16, heads=16, key_value_heads=16, head_width=128, mlps=16, mlp_width=8192
)


def test_of_a_pipeline_with_a_large_vocabulary_the_last_rank_is_the_fullest() -> None:
    # Llama-like, 128,000 tokens, four ranks of four layers, bfloat16, 8,192 tokens of a micro-batch, 8 micro-batches.
    ways = make_strategies(pipeline=4, micro_batch=2, batch=16, sequence=4096, recompute=SELECTIVE)

    found = memory_parts(WIDE_HEAD, ways, Software())

    tokens, head = 2 * 4096, 128_000 * 2048
    parameters = WIDE_HEAD.body_parameters / 4 + head
    assert float(found.state) == pytest.approx(18 * float(parameters))
    # Logits in 16 bits, their softmax in 32, the gradient in 16; alone more than the first rank's other micro-batches.
    assert float(found.workspace) == pytest.approx(tokens * 128_000 * (2 + 4 + 2))
    one = memory_parts(
        WIDE_HEAD, make_strategies(micro_batch=2, batch=2, sequence=4096, recompute=SELECTIVE), Software()
    )
    assert float(found.activations) == pytest.approx(float(one.activations) / 4)  # one micro-batch at a time


def test_with_a_small_vocabulary_the_first_rank_holds_a_micro_batch_for_each_stage() -> None:
    model = replace(WIDE_HEAD, vocabulary=np.float64(256))
    ways = make_strategies(pipeline=4, micro_batch=2, batch=16, sequence=4096, recompute=SELECTIVE)

    found = memory_parts(model, ways, Software())

    one = memory_parts(model, make_strategies(micro_batch=2, batch=2, sequence=4096, recompute=SELECTIVE), Software())
    assert float(found.activations) == pytest.approx(float(one.activations))
    assert float(found.workspace) == 0


def test_gpipe_keeps_the_logits_of_all_micro_batches() -> None:
    ways = make_strategies(pipeline=2, micro_batch=2, batch=16, sequence=4096, schedule=GPIPE)

    found = memory_parts(WIDE_HEAD, ways, Software())

    assert float(found.workspace) == pytest.approx(2 * 4096 * 128_000 * (8 * (2 + 4) + 2))


@pytest.mark.parametrize(
    ("schedule", "name", "interleave"),
    [(ONE_F_ONE_B, "1f1b", 1), (GPIPE, "gpipe", 1), (INTERLEAVED, "interleaved", 2), (ZERO_BUBBLE, "zero_bubble", 1)],
)
def test_the_last_rank_holds_as_many_micro_batches_as_its_order_runs_ahead(
    schedule: int, name: str, interleave: int
) -> None:
    ways = make_strategies(
        pipeline=4, interleave=interleave, batch=16, sequence=4096, schedule=schedule, recompute=NO_RECOMPUTE
    )
    huge = replace(WIDE_HEAD, vocabulary=np.float64(4e6))  # so that the last rank is the fullest

    parts, each = fuller_rank(huge, ways, Software())

    ahead = forwards_ahead(name, rank=3, pipeline=4, interleave=interleave, micro_batches=16)
    assert float(parts.activations / each) == pytest.approx(ahead / interleave)
