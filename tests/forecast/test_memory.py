"""Memory for arrays of strategies: published equations, and laws of sharding."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.forecast.memory import memory_parts
from supernode.workload.presets import public_model
from supernode.workload.shape import gpt_shape
from supernode.workload.strategy import FULL, GPIPE, NO_RECOMPUTE, SELECTIVE, Software, make_strategies

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
