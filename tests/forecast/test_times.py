"""The vectorised step time: laws that hold whatever the fitted numbers are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from supernode.forecast.axes import data_times, host_time
from supernode.forecast.efficiency import card_model
from supernode.forecast.memory import card_parameters
from supernode.forecast.network import Curves
from supernode.forecast.times import StepParts, stage_parts, step_parts
from supernode.hardware.calibration import AxisCost
from supernode.workload.presets import public_model
from supernode.workload.strategy import FULL, ZERO_BUBBLE, Software, Strategies, make_strategies

CARD = card_model("H100")
PLAIN = Software()
MODEL = public_model("llama3-70b")
RUN = {"tensor": 8, "pipeline": 4, "data": 2, "batch": 64, "sequence": 8192, "sequence_parallel": 1}


def parts(software: Software = PLAIN, **degrees: object) -> StepParts:
    return step_parts(MODEL, make_strategies(**(RUN | degrees)), CARD, software)  # type: ignore[arg-type]


def total(software: Software = PLAIN, **degrees: object) -> float:
    return float(parts(software, **degrees).total)


def test_arrays_give_what_each_strategy_gives_alone() -> None:
    tensor = np.array([1, 2, 4, 8])

    together = parts(tensor=tensor).total

    assert together == pytest.approx([total(tensor=t) for t in tensor])


def test_parts_are_never_negative_and_add_up() -> None:
    found = parts()
    each = [getattr(found, name) for name in StepParts.__dataclass_fields__]

    assert min(float(part) for part in each) >= 0
    assert float(found.total) == pytest.approx(sum(float(part) for part in each))


def test_one_card_waits_for_nobody() -> None:
    found = parts(tensor=1, pipeline=1, data=1)

    assert (float(found.tensor), float(found.bubble), float(found.transfer), float(found.data)) == (0, 0, 0, 0)


def test_the_bubble_of_like_stages_is_the_published_share() -> None:
    # Narayanan et al., arXiv:2104.04473, section 2.2: (p − 1) / (m v) of the work; the ends add a little.
    found = parts(pipeline=4, interleave=5)
    busy = float(found.compute + found.launch + found.tensor)

    assert float(found.bubble) / busy == pytest.approx(3 / (32 * 5), rel=0.1)


def test_zero_bubble_fills_the_wait_with_the_weights_gradients() -> None:
    # Qi et al., arXiv:2401.10241, table 1: (p − 1) (F + B − 2 W) instead of (p − 1) (F + B), B with the gradients W.
    one = stage_parts(MODEL, make_strategies(**RUN), CARD, PLAIN)  # type: ignore[arg-type]
    share = float(one.body.weights + one.head.weights) / float(
        one.body.total + one.tensor + one.head.total + one.embedding
    )

    found = float(parts(schedule=ZERO_BUBBLE).bubble)

    # The last rank, with the head, is the slowest; the others' bubble is shorter by what it takes longer.
    assert found == pytest.approx(float(parts().bubble) * (1 - 2 * share), rel=0.03)
    assert 0 < found < float(parts().bubble) * 0.6


def test_full_recomputation_costs_about_a_third_more_arithmetic() -> None:
    assert float(parts(recompute=FULL).compute / parts().compute) == pytest.approx(4 / 3, rel=0.05)


def test_two_batches_take_nearly_twice_as_long() -> None:
    # Bubble, gradient sync and update come once a step.
    assert 1.7 < total(batch=128) / total(batch=64) < 2


def test_a_tensor_group_over_two_nodes_waits_longer() -> None:
    assert float(parts(tensor=16, data=1).tensor) > 2 * float(parts(tensor=8).tensor)


def test_eight_bits_are_faster_but_not_twice() -> None:
    assert 1.1 < total(precision=1) / total(precision=2) < 2


def test_overlap_hides_gradients() -> None:
    hidden, shown = parts(), parts(Software(overlaps_data=False))

    assert float(hidden.data) < float(shown.data)


def test_experts_on_one_node_cost_less_to_reach() -> None:
    model = public_model("deepseek-v3")
    ways = make_strategies(expert=np.array([8, 64]), data=128, batch=1024, sequence=4096)

    near, far = step_parts(model, ways, CARD, Software()).expert

    assert far > 2 * near


def test_launches_bind_small_models_and_graphs_free_them() -> None:
    small = {"tensor": 8, "pipeline": 1, "sequence": 128, "batch": 2}

    assert float(parts(**small).launch) > float(parts(**small).compute) / 2
    assert float(parts(Software(launches=0.0), **small).launch) == pytest.approx(0, abs=1e-12)  # rounding


def test_a_hundred_thousand_strategies_are_one_call() -> None:
    rng = np.random.default_rng(0)
    degrees = {n: 2.0 ** rng.integers(0, 4, 100_000) for n in ("tensor", "pipeline", "data", "micro_batch")}
    ways = Strategies(**degrees, batch=np.asarray(4096.0), sequence=np.asarray(4096.0))

    found = step_parts(MODEL, ways, CARD, Software()).total

    assert found.shape == (100_000,)
    assert np.all(found > 0)


CURVES = Curves(
    seconds={
        (kind, count): (np.array([1e3, 1e9]), np.array([1e-4, 1.0]) * count * weight)
        for kind, weight in (("all_reduce", 2.0), ("all_gather", 1.0), ("reduce_scatter", 1.1))
        for count in (2, 4, 8)
    }
)


@pytest.mark.parametrize("sharding", [0, 3])
def test_measured_sums_go_over_data_and_context_alike(sharding: int) -> None:
    card = replace(CARD, wires=replace(CARD.wires, curves=CURVES))
    one = np.ones(())
    ways = [make_strategies(data=d, context=c, sharding=sharding) for d, c in ((8, 1), (1, 8), (2, 4))]
    times = [[float(t) for t in data_times(MODEL, each, card, PLAIN)] for each in ways]

    assert times[0] == times[1] == times[2]
    assert min(times[0]) > 0
    costs = replace(card, axes={"fsdp" if sharding else "replicas": AxisCost(axis="replicas", ranks=2, step=0.25)})
    assert [float(host_time(each, costs, layers=one, busy=one)) for each in ways] == [0.25] * 3


def test_measured_sums_of_spread_experts_go_over_those_who_hold_the_same() -> None:
    card = replace(CARD, wires=replace(CARD.wires, curves=CURVES))
    model = public_model("deepseek-v3")

    def scatter(**degrees: float) -> float:
        return float(data_times(model, make_strategies(**degrees), card, PLAIN)[0])

    spread = make_strategies(data=4, context=2, expert=4)
    dense, routed = (float(number) * PLAIN.gradient_bytes for number in card_parameters(model, spread))
    curve = card.tuned_wires.curves
    assert curve is not None
    both = (curve.time("all_reduce", np.asarray(n), cards=k) / 2 for n, k in ((dense, 8), (routed, 2)))
    assert scatter(data=4, context=2, expert=4) == pytest.approx(float(sum(both)))
    # All of an axis of experts alone has nobody to sum them with.
    alone = curve.time("all_reduce", np.asarray(dense), cards=4) / 2
    assert scatter(data=4, expert=4) == pytest.approx(float(alone))
