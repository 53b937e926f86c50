"""What programs do, as read in their sources, against hand calculations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from supernode.forecast.efficiency import card_model
from supernode.forecast.times import StepParts, step_parts
from supernode.validation.cases_megatron import DEEPSPEED_BF16, MEGATRON_2021
from supernode.workload.presets import public_model
from supernode.workload.shape import gpt_shape
from supernode.workload.strategy import FULL, INTERLEAVED, Software, Strategies, make_strategies
from supernode.workload.sublayers import mixture_demand

A100 = card_model("A100-80")
GPT_530B = gpt_shape(layers=105, width=20480, heads=128, vocabulary=51_200, positions=2048)


def selene(software: Software) -> StepParts:
    ways = make_strategies(tensor=8, pipeline=35, data=8, batch=1920, sequence=2048, recompute=FULL, precision=1)
    return step_parts(GPT_530B, ways, A100, software)


def test_deepspeed_sends_whole_gradients_and_one_thing_after_the_other() -> None:
    # 2048 × 20480 × 2 bytes are 84 MB; of an activation each card of eight sends a part. Megatron's two transfers of an
    # exchange run at once. 240 micro-batches have two exchanges each, on all but the ends; the way in and out has 34.
    whole, part = 2048 * 20480 * 2, 2048 * 20480 * 2 / 8
    rate, latency = A100.tuned_wires.outside * A100.fitted.outside, A100.wires.outside_latency
    ahead, back = part / rate + latency, whole / rate + latency

    found = float(selene(DEEPSPEED_BF16).transfer - selene(replace(MEGATRON_2021, accumulate_bytes=18)).transfer)

    assert found == pytest.approx(240 * 2 * (ahead + back - ahead) + 34 * (back - ahead), rel=0.01)


def test_sums_in_float32_are_read_and_written_for_each_micro_batch() -> None:
    # 1.9e9 weights a card; 18 bytes each, 12 more than Megatron's 6, 240 times and once on each other stage's way.
    weights = (12 * 105 * 20480**2 / 35 + 51_200 * 20480) / 8
    more = weights * 12 / (A100.memory_bandwidth * A100.fitted.memory)

    slow, fast = selene(replace(MEGATRON_2021, accumulate_bytes=18)), selene(MEGATRON_2021)

    assert float(slow.compute - fast.compute) == pytest.approx(240 * more, rel=0.02)
    assert float(slow.bubble - fast.bubble) == pytest.approx(34 * more, rel=0.02)


def test_one_of_eight_network_cards_takes_eight_times_as_long() -> None:
    slow, fast = selene(DEEPSPEED_BF16), selene(replace(DEEPSPEED_BF16, rails=1.0))

    assert float(slow.data) == pytest.approx(8 * float(fast.data), rel=0.02)


def test_interleaving_hides_gradients_behind_the_other_parts_passes() -> None:
    def data(interleave: int) -> float:
        ways = make_strategies(
            tensor=8, pipeline=4, data=64, interleave=interleave, batch=1024, sequence=4096, sharding=1,
            schedule=INTERLEAVED,
        )  # fmt: skip
        return float(step_parts(public_model("llama3-70b"), ways, card_model("H100"), Software()).data)

    assert data(5) < data(1)


def mixture(software: Software) -> tuple[float, float]:
    ways = make_strategies(expert=8, data=8, batch=64, sequence=4096)
    demand = mixture_demand(public_model("gpt-oss-120b"), ways, software)
    return float(demand.traffic), float(demand.kernels)


def test_experts_biases_take_passes_of_their_own_unless_experts_are_one_kernel() -> None:
    # Four experts for each of 4096 tokens, 2880 wide, in 16 bits: weighed, added, put together is six passes.
    passes = 4 * 4096 * 2880 * 2 * 6
    plain = public_model("gpt-oss-120b")
    unbiased = mixture_demand(
        replace(plain, biased=np.zeros(())), make_strategies(expert=8, data=8, batch=64, sequence=4096), Software()
    )

    traffic, kernels = mixture(Software())

    assert traffic - float(unbiased.traffic) == pytest.approx(passes)
    assert kernels - float(unbiased.kernels) == pytest.approx(3 * 128 / 8)
    assert mixture(Software(fused_experts=True))[1] == pytest.approx(60)


def expert_wait(ways: Strategies, software: Software) -> float:
    return float(step_parts(public_model("qwen3-235b-a22b"), ways, card_model("H100"), software).expert)


def test_a_plain_all_to_all_crosses_the_network_once_for_each_expert() -> None:
    # Eight experts on four nodes: 8 × 3/4 copies cross; sent once to each node, 4 (1 − (3/4)^8) × 3/4.
    ways = make_strategies(expert=32, data=32, batch=32, sequence=4096)
    one = 4096 * 4096 * 2 / (card_model("H100").tuned_wires.outside * card_model("H100").fitted.outside)
    saved = 4 * 94 * one * (8 - 4 * (1 - 0.75**8)) * 3 / 4

    found = expert_wait(ways, Software(fused_dispatch=False)) - expert_wait(ways, Software())

    assert found == pytest.approx(saved, rel=0.01)
