"""Routes bring every byte from its source to its target, over links that are up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supernode.errors import CapacityError
from supernode.fabric.adaptive import adaptive
from supernode.fabric.network import Ints, Network
from supernode.fabric.routes import Routes, dimension_order, shortest, spanning_tree, spread
from supernode.fabric.shapes import dragonfly, fat_tree, rail, torus

FABRICS = {
    "torus": torus((3, 4), bandwidth=1.0),
    "fat tree": fat_tree((4, 2), (2, 2), bandwidth=1.0),
    "dragonfly": dragonfly(4, 3, 1, bandwidth=1.0),
    "rails": rail(4, 3, inside=4.0, bandwidth=1.0),
}


def everyone(cards: int) -> tuple[Ints, Ints]:
    source, target = np.divmod(np.arange(cards * cards), cards)
    return source[source != target], target[source != target]


def gains(network: Network, routes: Routes) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return (V, F), the part of each flow that stays at each vertex."""
    into = np.zeros((network.vertices, network.links))
    into[network.head, np.arange(network.links)] += 1
    into[network.tail, np.arange(network.links)] -= 1
    return np.asarray(into @ routes.part.toarray())


def is_delivered(network: Network, routes: Routes) -> bool:
    wanted = np.zeros((network.vertices, routes.source.size))
    flow = np.arange(routes.source.size)
    np.add.at(wanted, (routes.target, flow), 1)
    np.subtract.at(wanted, (routes.source, flow), 1)
    return bool(np.allclose(gains(network, routes), wanted, atol=1e-6))


@pytest.mark.parametrize("name", FABRICS)
def test_every_router_delivers_everything(name: str) -> None:
    network = FABRICS[name]
    pairs = everyone(network.cards)

    for route in (shortest, spread, dimension_order, adaptive):
        assert is_delivered(network, route(network, *pairs))
    assert is_delivered(network, shortest(network, *pairs, seed=3))


@given(data=st.data(), name=st.sampled_from(["torus", "fat tree", "dragonfly"]))
@settings(max_examples=15, deadline=None)
def test_what_goes_round_a_failed_link_still_arrives(data: st.DataObject, name: str) -> None:
    whole = FABRICS[name]
    between = [
        (int(a), int(b))
        for a, b in zip(whole.tail, whole.head, strict=True)
        if a < b and (name != "dragonfly" or a >= whole.cards)
    ]
    lost = data.draw(st.sampled_from(between))
    network = whole.without(links=[lost])

    routes = spread(network, *everyone(network.cards))

    assert is_delivered(network, routes)
    assert (network.bandwidth[routes.part.tocoo().row] > 0).all()


def test_a_flow_to_itself_goes_nowhere() -> None:
    routes = spread(FABRICS["torus"], np.array([2, 0]), np.array([2, 1]))

    assert routes.part.sum(axis=0).tolist() == [0, 1]


def test_even_spreading_loads_all_links_of_a_torus_alike() -> None:
    network = torus((4, 4), bandwidth=1.0)

    load = spread(network, *everyone(16)).load(np.ones(240))

    # 240 flows of 32/15 links on average, over 64 links.
    assert load == pytest.approx(np.full(64, 8.0))


def test_dimension_order_turns_once() -> None:
    network = torus((4, 4), bandwidth=1.0)

    first, last = (dimension_order(network, np.array([0]), np.array([5]), order=order) for order in ((0, 1), (1, 0)))

    assert first.part.tocoo().row.tolist() == network.find([0, 1], [1, 5]).tolist()
    assert sorted(last.part.tocoo().row.tolist()) == sorted(network.find([0, 4], [4, 5]).tolist())


def test_a_way_that_would_turn_at_a_dead_card_is_an_error() -> None:
    network = torus((4, 4), bandwidth=1.0).without(vertices=[1])

    with pytest.raises(CapacityError, match="card 1 cut off"):
        dimension_order(network, np.array([0]), np.array([5]))
    assert is_delivered(network, spread(network, np.array([0]), np.array([5])))


def test_a_tree_keeps_one_link_less_than_it_has_vertices() -> None:
    tree = spanning_tree(FABRICS["torus"])

    assert tree.up.size == 2 * 11
