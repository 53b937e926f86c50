"""Closed forms are what the flows say, and what a hand calculation says."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.collectives import exchange as exchanges
from supernode.collectives import grid, outline, tree
from supernode.collectives.message import Schedule
from supernode.collectives.outline import Outline
from supernode.errors import SpecError
from supernode.fabric.flows import schedule_time
from supernode.fabric.level import Assumptions, Level, levels_of, outline_time, port_bound
from supernode.fabric.shapes import joined
from supernode.hardware.assemble import build_machine, predefined

MB = 1e6


def level(kind: str, size: int, *, bandwidth: float = 10e9, latency: float = 1e-6) -> Level:
    return Level(kind=kind, size=size, bandwidth=bandwidth, latency=latency, overhead=0.2e-6)


FABRICS = {
    "ring of 5": [level("ring", 5)],
    "ring of 8": [level("ring", 8)],
    "ring of 2": [level("ring", 2)],
    "full mesh of 5": [level("full_mesh", 5)],
    "switch of 8": [level("switch", 8)],
    "torus 4×4": [level("ring", 4)] * 2,
    "torus 3×3×3": [level("ring", 3)] * 3,
    "torus 4×2": [level("ring", 2), level("ring", 4)],
    "full mesh 3×4": [level("full_mesh", 4), level("full_mesh", 3)],
    "three tiers": [
        level("full_mesh", 4, bandwidth=40e9), level("switch", 2), level("switch", 3, bandwidth=5e9, latency=3e-6)
    ],
}  # fmt: skip


def agree(closed: Outline, schedule: Schedule, levels: list[Level], *, within: float = 1e-6) -> bool:
    """Return whether the closed form is the time of the flows."""
    theirs = schedule_time(schedule, joined(levels), 8 * MB)
    return float(outline_time(closed, levels, 8 * MB)) == pytest.approx(theirs, rel=within)


@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("method", ["ring", "direct", "halving"])
def test_hierarchies_cost_what_their_messages_do(name: str, kind: str, method: str) -> None:
    levels = FABRICS[name]
    sizes = [one.size for one in levels]
    if method == "halving" and any(size & (size - 1) for size in sizes):
        with pytest.raises(SpecError, match="power of two"):
            outline.hierarchical(kind, sizes, (method,) * len(sizes))
        return
    methods = (method,) * len(sizes)

    assert agree(outline.hierarchical(kind, sizes, methods), grid.hierarchical(kind, sizes, methods), levels)


@pytest.mark.parametrize("name", FABRICS)
def test_exchanges_cost_what_their_messages_do(name: str) -> None:
    sizes = [one.size for one in FABRICS[name]]

    assert agree(outline.exchange(sizes), exchanges.level_exchange(sizes), FABRICS[name])


@pytest.mark.parametrize("name", ["ring of 5", "ring of 8", "ring of 2", "torus 4×4", "torus 3×3×3"])
def test_all_dims_at_once_cost_what_their_messages_do(name: str) -> None:
    sizes = [one.size for one in FABRICS[name]]

    assert agree(outline.multi_ring("all_reduce", sizes), grid.multi_ring("all_reduce", sizes), FABRICS[name])


def test_one_way_rings_trees_and_chains_cost_what_their_messages_do() -> None:
    ring, switch = [level("ring", 8)], [level("switch", 8)]

    assert agree(outline.exchange((8,), ("ring",)), exchanges.ring_exchange(8), ring)
    assert agree(outline.binomial(8), tree.binomial(8), switch)
    assert agree(outline.chain(8), tree.chain(8), switch)
    # The closed form charges the first and last steps of a tree like the others: 16 parts, 5 % at most.
    assert agree(outline.double_tree(8), tree.double_tree(8), switch, within=0.05)
    assert agree(outline.in_network(8), tree.in_network(8), switch, within=0.001)


def test_small_messages_use_links_as_badly_in_both() -> None:
    levels = [Level(kind="switch", size=4, bandwidth=10e9, half=100_000)]

    assert agree(outline.hierarchical("all_gather", (4,)), grid.flat("all_gather", 4), levels)


def test_a_ring_of_eight_by_hand() -> None:
    levels = [Level(kind="ring", size=8, bandwidth=50e9, latency=0.5e-6)]

    time = outline_time(outline.hierarchical("all_reduce", (8,)), levels, 8 * MB)

    # 14 steps of 1 MB: 20 µs at 50 GB/s, and 0.5 µs of latency each.
    assert time == pytest.approx(14 * 20.5e-6)


def test_a_torus_that_uses_all_links_is_as_many_times_faster_as_it_has_directions() -> None:
    levels = [Level(kind="ring", size=4, bandwidth=50e9)] * 3

    rings = outline_time(outline.hierarchical("all_reduce", (4, 4, 4)), levels, 64 * MB)
    everything = outline_time(outline.multi_ring("all_reduce", (4, 4, 4)), levels, 64 * MB)

    # One dim after the other keeps one of six links busy, and only for 16/21 of the time the busiest.
    assert rings / everything == pytest.approx(6)


@pytest.mark.parametrize("name", FABRICS)
def test_nothing_beats_the_ports(name: str) -> None:
    sizes = [one.size for one in FABRICS[name]]
    for closed in (outline.hierarchical("all_reduce", sizes), outline.exchange(sizes)):
        assert outline_time(closed, FABRICS[name], MB) >= port_bound(closed, FABRICS[name], MB)


def test_a_switch_that_stores_whole_messages_doubles_large_transfers() -> None:
    levels = [Level(kind="switch", size=8, bandwidth=50e9)]
    closed = outline.hierarchical("all_reduce", (8,))

    stored = outline_time(closed, levels, MB, given=Assumptions(store_and_forward=True))

    assert stored == pytest.approx(2 * np.asarray(outline_time(closed, levels, MB)))


def test_a_million_cards_cost_as_many_legs_as_eight() -> None:
    small, large = (outline.hierarchical("all_reduce", sizes) for sizes in ((2, 2, 2), (8, 64, 2048)))

    assert len(small.lanes[0]) == len(large.lanes[0]) == 6
    assert large.cards == 1_048_576


def test_an_array_of_sizes_gives_an_array() -> None:
    levels = FABRICS["torus 4×4"]

    times = outline_time(outline.exchange((4, 4)), levels, np.array([MB, 2 * MB]))

    assert np.shape(times) == (2,)


def test_a_machine_has_the_levels_of_its_wiring() -> None:
    torus, hybrid = levels_of(predefined("supernode-512")), levels_of(build_machine(512, "Hybrid", card="H100"))

    assert [(one.kind, one.size) for one in torus] == [("ring", 8)] * 3
    assert [(one.kind, one.size) for one in hybrid] == [("switch", 8), ("switch", 8), ("switch", 8)]
    assert hybrid[0].bandwidth > hybrid[1].bandwidth


@pytest.mark.parametrize(
    ("name", "sizes"), [("96xH100", (8, 12)), ("12xGB200", (8, 2)), ("100xH200", (8, 13)), ("128xH100", (8, 8, 2))]
)
def test_racks_that_a_machine_does_not_fill_are_left_out_and_its_last_node_is_part_filled(
    name: str, sizes: tuple[int, ...]
) -> None:
    levels = levels_of(predefined(name))

    assert tuple(one.size for one in levels) == sizes
    assert levels[-1].bandwidth == predefined(name).tiers[-1].bandwidth


def test_levels_of_other_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match=r"groups of \[8\] on levels of \[4\]"):
        outline_time(outline.exchange((8,)), [level("ring", 4)], MB)
