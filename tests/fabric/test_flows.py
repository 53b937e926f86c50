"""Links are shared fairly, and bytes arrive when a hand calculation says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from supernode.collectives.grid import flat, unequal
from supernode.errors import CapacityError
from supernode.fabric.flows import fair_rates, rates, schedule_time, transfer
from supernode.fabric.level import Level
from supernode.fabric.network import from_edges
from supernode.fabric.routes import shortest, spread
from supernode.fabric.shapes import joined, torus


def test_three_flows_on_two_links_share_as_in_the_textbook() -> None:
    # One flow over both links, one on each: 10 is shared by two, then the other has what is left of 30.
    part = csr_array(np.array([[1.0, 1, 0], [1, 0, 1]]))

    assert fair_rates(part, np.array([10.0, 30])).tolist() == [5, 5, 25]


@given(seed=st.integers(0, 10_000), flows=st.integers(1, 12), links=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_every_flow_has_a_full_link_where_nobody_has_more(seed: int, flows: int, links: int) -> None:
    dice = np.random.default_rng(seed)
    part = (dice.random((links, flows)) < 0.5).astype(float)
    part[dice.integers(links), :] = 1
    bandwidth = dice.uniform(1, 10, links)

    rate = fair_rates(csr_array(part), bandwidth)

    load = part @ rate
    full = load >= bandwidth * (1 - 1e-6)
    most = np.array([(rate * (row > 0)).max() for row in part])
    assert (load <= bandwidth * (1 + 1e-6)).all()
    for flow in range(flows):
        mine = full & (part[:, flow] > 0)
        assert (rate[flow] >= most[mine] * (1 - 1e-6)).any()


def test_who_stays_gets_what_the_first_leaves() -> None:
    network = from_edges([(0, 2, 10.0, 0.5), (1, 2, 100.0, 0.5), (2, 3, 10.0, 0.5)], cards=4)
    routes = shortest(network, np.array([0, 1]), np.array([3, 3]))

    done = transfer(network, routes, np.array([10.0, 30.0]))

    # Both at 5 until the first is through after 2 s; the other then has 20 left at 10. One second of latency.
    assert done.finish == pytest.approx([3, 5])
    assert done.first_rate == pytest.approx([5, 5])


def test_small_messages_use_links_badly() -> None:
    ring = joined([Level(kind="ring", size=4, bandwidth=100.0, half=50.0)])
    routes = shortest(ring, np.array([0]), np.array([1]))

    assert rates(ring, routes, np.array([50.0])) == pytest.approx([50])
    assert rates(ring, routes) == pytest.approx([100])


def test_messages_keep_their_sender_busy_one_after_the_other() -> None:
    mesh = joined([Level(kind="full_mesh", size=4, bandwidth=10.0, overhead=1.0)])
    routes = shortest(mesh, np.array([0, 0, 1]), np.array([1, 2, 0]))

    assert transfer(mesh, routes, np.full(3, 10.0)).finish == pytest.approx([3, 3, 2])


def test_one_slow_card_holds_up_the_whole_ring() -> None:
    ring = torus((8,), bandwidth=10.0)
    schedule = flat("all_reduce", 8)

    whole, slow = (schedule_time(schedule, one, 80.0) for one in (ring, ring.slowed(cards={3: 0.25})))

    assert slow == pytest.approx(4 * whole)


def test_groups_of_different_sizes_cost_no_less_than_their_ports_allow() -> None:
    switch = joined([Level(kind="switch", size=7, bandwidth=10.0)])

    time = schedule_time(unequal([4, 3]), switch, 120.0)

    # No rank can send less than 2 (n − 1) / n of the vector to take part in a sum, over a port of 10.
    assert time >= unequal([4, 3]).sent().max() * 120 / 10 * (1 - 1e-9)


def test_ranks_out_of_order_make_a_ring_slower() -> None:
    ring, schedule = torus((6,), bandwidth=10.0), flat("all_gather", 6)

    ordered, mixed = (schedule_time(schedule, ring, 60.0, ranks=ranks) for ranks in ((), (0, 2, 4, 1, 3, 5)))

    assert mixed > ordered


def test_a_way_over_a_failed_link_is_refused() -> None:
    ring = torus((4,), bandwidth=1.0)
    routes = spread(ring, np.array([0]), np.array([1]))

    with pytest.raises(CapacityError, match="link that is down"):
        rates(ring.without(links=[(0, 1)]), routes)
