from dataclasses import replace
from itertools import pairwise

import pytest

from supernode.errors import SpecError
from supernode.forecast.efficiency import card_model
from supernode.forecast.times import step_parts
from supernode.simulation.leverage import efficiency_at, least_bandwidth, sensitivities, strong_sensitivities
from supernode.simulation.million import (
    GOOD,
    SIZES,
    Point,
    Tiers,
    Work,
    breakpoint_of,
    curve,
    data_levels,
    memory_share,
    scatter_time,
    slowest,
    step_at,
    strong_curve,
    ways_of,
)

TIERS, WORK = Tiers(), Work()


def test_one_supernode_is_the_whole() -> None:
    assert curve(TIERS, WORK, (1,))[0].efficiency == 1.0


def test_the_largest_cluster_has_a_million_cards_and_its_model_fits_a_card() -> None:
    assert step_at(TIERS, WORK, SIZES[-1]).cards == 1_048_576
    assert float(ways_of(TIERS, WORK, SIZES[-1]).cards) == 1_048_576
    assert memory_share(TIERS, WORK) < 0.9


def test_efficiency_falls_with_size() -> None:
    found = [point.efficiency for point in curve(TIERS, WORK)]

    assert all(after < before for before, after in pairwise(found))


@pytest.mark.parametrize("supernodes", [1, 2, 64, 2048])
def test_doubling_the_bandwidth_between_supernodes_never_hurts(supernodes: int) -> None:
    faster = replace(TIERS, between=2 * TIERS.between)

    assert step_at(faster, WORK, supernodes).seconds <= step_at(TIERS, WORK, supernodes).seconds


def test_a_data_group_lies_on_three_tiers() -> None:
    levels = data_levels(TIERS, WORK, 2048)

    # Tensor 4 leaves 2 copies in a node of 8; 8 copies in a supernode are on 4 nodes.
    assert [level.size for level in levels] == [2, 4, 2048]


def test_a_long_sum_costs_each_tier_what_the_tiers_inside_left() -> None:
    fitted, nbytes = card_model(TIERS.card).fitted, 1e13
    still = replace(TIERS, near=0.0, far=0.0, overhead=0.0)

    _, seconds = scatter_time(still, data_levels(still, WORK, 2048), nbytes)

    inside = nbytes / 2 / (450e9 * fitted.inside)
    across = nbytes / 2 * 3 / 4 / (392e9 * fitted.inside)
    between = nbytes / 8 * 2047 / 2048 / (50e9 * fitted.outside)
    assert seconds == pytest.approx(inside + across + between, rel=1e-9)


def test_without_data_the_step_is_the_time_models_own() -> None:
    tiers = replace(TIERS, supernode_cards=64, spread=0.0, across=TIERS.inside)
    ways = ways_of(tiers, WORK, 1)

    found = step_at(tiers, WORK, 1)

    own = step_parts(WORK.model, ways, card_model(tiers.card), WORK.software)
    assert found.parts["compute"] == pytest.approx(float(own.compute), rel=1e-12)
    assert found.parts["bubble"] == pytest.approx(float(own.bubble), rel=1e-12)
    assert found.parts["data"] == 0


def test_the_slowest_of_two_nodes_is_as_blom_says() -> None:
    # The mean of the larger of two normal numbers is 1/√π = 0.564; Blom's score for two is within 5% of it.
    assert slowest(0.01, 2) == pytest.approx(1 + 0.01 * 0.564, rel=5e-4)
    assert slowest(0.0, 131_072) == 1


def test_the_least_bandwidth_is_where_95_percent_breaks() -> None:
    least = least_bandwidth(TIERS, WORK, 2048)

    assert efficiency_at(replace(TIERS, between=least), WORK, 2048) >= GOOD
    assert efficiency_at(replace(TIERS, between=least * 0.97), WORK, 2048) < GOOD


def test_a_breakpoint_lies_between_the_sizes_around_it() -> None:
    def at(cards: int, efficiency: float) -> Point:
        return Point(cards=cards, seconds=1.0, parts={}, scatter="", scatter_seconds=0.0, efficiency=efficiency)

    assert breakpoint_of([at(512, 1.0), at(2048, 0.9)]) == pytest.approx(1024)
    assert breakpoint_of([at(512, 1.0), at(2048, 0.96)]) is None


def test_one_batch_for_all_scales_worse_than_a_batch_for_each() -> None:
    strong = strong_curve(TIERS, WORK, 16_384, (1, 64))

    assert strong[-1].efficiency < efficiency_at(TIERS, WORK, 64)


def test_what_saves_communication_helps_and_what_costs_it_hurts() -> None:
    found = {name: points[-1].efficiency for name, points in sensitivities(TIERS, WORK, (1, 2048)).items()}
    usual = found["as assumed"]

    helps = {"2 × bandwidth between supernodes", "2 × batch", "gradients compressed to 10%", "gradients of 2 bytes"}
    hurts = {"half the bandwidth between supernodes", "1/4 of the batch", "no overlap with the backward"}
    assert all(found[name] > usual for name in helps)
    assert all(found[name] < usual for name in hurts)


def test_a_larger_batch_for_all_breaks_later() -> None:
    found = {name: breakpoint_of(points) for name, points in strong_sensitivities(TIERS, WORK, 16_384).items()}

    assert found["1/4 of the batch"] < found["as assumed"] < found["2 × batch"]  # type: ignore[operator]


def test_degrees_that_do_not_fill_a_supernode_are_refused() -> None:
    with pytest.raises(SpecError, match="tensor 4 × pipeline 24"):
        step_at(TIERS, replace(WORK, pipeline=24), 1)
    with pytest.raises(SpecError, match="100 samples over 8 copies"):
        strong_curve(TIERS, WORK, 100, (1,))
