"""Does the order of the axes follow the fabric, and the cut the layers' costs?"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supernode.forecast.efficiency import card_model
from supernode.forecast.times import step_parts
from supernode.hardware.assemble import build_machine
from supernode.hardware.calibration import AxisCost
from supernode.hardware.machine import Tier
from supernode.placing.balance import balance, layer_times, slowest_ranks
from supernode.placing.placement import (
    RANK_ORDER,
    best_order,
    best_place,
    every_order,
    place,
    ring_bytes,
    slow_bytes,
    tiers_of,
    with_spares,
)
from supernode.workload.presets import public_model
from supernode.workload.shape import gpt_shape
from supernode.workload.strategy import Software, Strategies, make_strategies

CARD = card_model("H100")
MODEL = gpt_shape(layers=32, width=4096, heads=32, vocabulary=51_200, positions=2048)
MIXTURE = public_model("qwen3-30b-a3b")
SOFTWARE = Software()


def ways(**degrees: float) -> Strategies:
    """Return a strategy with a batch of 128 samples of 2048 tokens."""
    return make_strategies(**{"batch": 128, "sequence": 2048, "sharding": 1, "sequence_parallel": 1, **degrees})


@settings(max_examples=25, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4, 8]), context=st.sampled_from([1, 2]), data=st.sampled_from([1, 2, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_in_rank_order_the_step_takes_what_the_time_model_says(
    tensor: int, context: int, data: int, pipeline: int
) -> None:
    one = ways(tensor=tensor, context=context, data=data, pipeline=pipeline)
    tiers = tiers_of(CARD.wires, tensor * context * data * pipeline)
    placed = place(MODEL, one, CARD, SOFTWARE, tiers)

    # Save that a pipeline whose hops partly leave the node is as slow as those that do.
    stride = tensor * context * data
    if pipeline == 1 or stride * pipeline <= 8 or stride >= 8:
        assert placed.time == pytest.approx(float(step_parts(MODEL, one, CARD, SOFTWARE).total), rel=1e-9)


def test_the_tensor_axis_stays_inside_the_node() -> None:
    one = ways(tensor=8, data=8)
    best = best_order(MODEL, one, CARD, SOFTWARE, tiers_of(CARD.wires, 64))
    worst = max(every_order(MODEL, one, CARD, SOFTWARE, tiers_of(CARD.wires, 64)), key=lambda placed: placed.time)

    assert best.order[0] == "tensor"
    assert worst.order[0] == "data"
    assert best.slow_bytes < worst.slow_bytes / 2


def test_the_order_does_not_matter_on_a_flat_fabric() -> None:
    flat = (Tier(name="machine", cards=64, bandwidth=450e9, latency=5e-6),)
    one = ways(tensor=4, data=4, pipeline=4)
    placed = list(every_order(MODEL, one, CARD, SOFTWARE, flat))

    assert len(placed) == 6
    assert max(p.time for p in placed) == pytest.approx(min(p.time for p in placed))
    assert {p.slow_bytes for p in placed} == {0.0}
    assert best_order(MODEL, one, CARD, SOFTWARE, flat).order == (*("tensor", "data", "pipeline"), "context")


def test_where_all_tiers_are_as_fast_as_a_node_none_is_slow() -> None:
    node = Tier(name="node", cards=8, bandwidth=450e9, latency=1e-6)
    flat = (node, Tier(name="machine", cards=64, bandwidth=450e9, latency=2e-6))

    assert slow_bytes(MODEL, ways(tensor=8, data=8), SOFTWARE, flat, order=RANK_ORDER) == 0.0
    slower = (node, Tier(name="machine", cards=64, bandwidth=449e9, latency=2e-6))
    assert slow_bytes(MODEL, ways(tensor=8, data=8), SOFTWARE, slower, order=RANK_ORDER) > 0.0


def test_bytes_of_a_data_axis_across_nodes_are_those_of_a_ring_shared_by_its_members() -> None:
    one = ways(data=64)
    # 64 cards hold whole gradients; a ring of 64 passes 63/64 of gathers and scatters, once for each node of eight.
    body = float(MODEL.body_parameters + MODEL.vocabulary * MODEL.width)

    sent = slow_bytes(MODEL, one, SOFTWARE, tiers_of(CARD.wires, 64), order=RANK_ORDER)
    assert ring_bytes(MODEL, one, SOFTWARE)["data"] == pytest.approx(body * (4 + 2))
    assert sent == pytest.approx(body * 6 * 63 / 64 / 8)


def test_experts_in_one_node_send_nothing_over_the_network() -> None:
    tiers = tiers_of(CARD.wires, 64)
    near = slow_bytes(MIXTURE, ways(data=64, expert=8), SOFTWARE, tiers, order=RANK_ORDER)
    far = slow_bytes(MIXTURE, ways(data=64, expert=64), SOFTWARE, tiers, order=RANK_ORDER)

    assert far > near


def test_a_pipeline_sends_over_the_network_only_where_it_leaves_a_node() -> None:
    tiers = tiers_of(CARD.wires, 16)
    sent = slow_bytes(MODEL, ways(pipeline=16), SOFTWARE, tiers, order=("pipeline", "tensor", "context", "data"))

    # 16 stages on two nodes: one of 15 hops leaves; activations and gradients of 128 samples, averaged over 16 cards.
    assert sent == pytest.approx(2 * 128 * 2048 * 4096 * 2 / 16)


def test_three_tiers_are_kept_where_they_nest() -> None:
    tiers = build_machine(512, "Hybrid", card="H100").nested_tiers

    assert [tier.cards for tier in tiers] == [8, 64, 512]
    torus = build_machine(384, card="B200").nested_tiers
    assert all(outer.cards % inner.cards == 0 for inner, outer in pairwise(torus))


def test_a_large_head_makes_room_on_the_last_stage() -> None:
    small = gpt_shape(layers=26, width=1024, heads=16, vocabulary=256_000, positions=2048)
    one = ways(pipeline=4, batch=64)
    found = balance(small, one, CARD, SOFTWARE)
    closed = float(step_parts(small, one, CARD, SOFTWARE).total)

    assert found.cut < 0.9 * found.equal
    assert found.step(closed, slowest=found.cut) < found.step(closed, slowest=found.equal)


def test_without_a_pipeline_there_is_nothing_to_cut() -> None:
    found = balance(MODEL, ways(tensor=8), CARD, SOFTWARE)

    assert found.equal == found.cut == found.model


def domains(size: int, count: int) -> tuple[Tier, ...]:
    """Return so many domains of so many cards, with a network between that is an eighteenth as fast."""
    return (
        Tier(name="node", cards=size, bandwidth=900e9, latency=5e-6),
        Tier(name="machine", cards=size * count, bandwidth=50e9, latency=12e-6),
    )


def test_groups_of_64_lie_across_domains_of_72_unless_cards_are_left_out() -> None:
    one = ways(data=256, expert=64)
    naive = place(MIXTURE, one, CARD, SOFTWARE, domains(72, 4))
    aligned = place(MIXTURE, one, CARD, SOFTWARE, domains(64, 4))
    best = best_place(MIXTURE, one, CARD, SOFTWARE, domains(72, 4))

    # Cards 64 to 127 are a group; eight of them are in the first domain.
    assert naive.parts["expert"] > 3 * aligned.parts["expert"]
    assert best.parts == aligned.parts
    assert best.slow_bytes < naive.slow_bytes


def test_cards_are_left_out_only_where_enough_remain() -> None:
    assert [tiers[0].cards for tiers in with_spares(domains(72, 4), 288)] == [72]
    assert [tiers[0].cards for tiers in with_spares(domains(72, 4), 280)] == [72, 71, 70]
    assert [tiers[-1].cards for tiers in with_spares(domains(72, 4), 280)] == [288, 284, 280]


def test_nodes_of_ten_cards_hold_tensor_groups_of_eight_with_two_left_out() -> None:
    one = ways(tensor=8, data=8)
    naive, best = (find(MODEL, one, CARD, SOFTWARE, domains(10, 8)) for find in (place, best_place))

    # Cards 8 to 15 would be two in one node and six in the next.
    assert naive.parts["tensor"] > 3 * best.parts["tensor"]
    assert best.parts == place(MODEL, one, CARD, SOFTWARE, domains(8, 8)).parts


def test_a_mixed_stack_is_cut_by_what_its_layers_take() -> None:
    # Four light layers and four of three times their weight, over two stages: 4 + 12 alike, 4 + 2 × 3 at best.
    assert slowest_ranks([1.0] * 4 + [3.0] * 4, pipeline=2) == (12.0, 9.0)
    # With a stage's worth of head, the last rank holds less.
    assert slowest_ranks([1.0] * 8, pipeline=2, head=4.0) == (8.0, 6.0)


def test_layers_add_up_to_the_body_and_dense_ones_come_before_mixtures() -> None:
    model = public_model("deepseek-v3")
    found = layer_times(model, ways(pipeline=4), CARD, SOFTWARE, body=7.0)

    assert len(found) == 61
    assert sum(found) == pytest.approx(7.0)
    assert len(set(found[:3])) == 1
    assert len(set(found[3:])) == 1
    assert found[2] != found[3]


def test_each_kind_of_a_hybrids_layers_is_spread_evenly() -> None:
    model = public_model("nemotron-3-nano")
    found = layer_times(model, ways(pipeline=4), CARD, SOFTWARE, body=1.0)
    kinds = sorted(set(found), key=found.count)

    assert len(found) == int(model.layers)
    assert [found.count(kind) for kind in kinds] == sorted(
        int(n) for n in (model.attentions, model.mixtures, model.mambas)
    )
    rarest = [place for place, seconds in enumerate(found) if seconds == kinds[0]]
    assert max(b - a for a, b in pairwise(rarest)) - min(b - a for a, b in pairwise(rarest)) <= 2


def test_what_axes_cost_a_host_is_part_of_a_placed_step() -> None:
    card = replace(CARD, axes={"tensor": AxisCost(axis="tensor", ranks=64, step=0.5)})
    spread = ways(tensor=8, data=8)

    placed = place(MODEL, spread, card, SOFTWARE, tiers_of(card.wires, 64))

    assert placed.time == pytest.approx(float(step_parts(MODEL, spread, card, SOFTWARE).total))
    assert placed.parts["alone"] > 0.5
