"""Links are those of the drawing, and faults take away what they should."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.errors import CapacityError, SpecError
from supernode.fabric.level import Level
from supernode.fabric.network import from_edges
from supernode.fabric.shapes import dragonfly, fat_tree, joined, layered, product, rail, torus


def test_a_torus_has_two_links_a_card_and_dim() -> None:
    network = torus((3, 4, 5), bandwidth=1.0)

    assert np.bincount(network.tail).tolist() == [6] * 60
    assert network.vertices == 60


def test_a_dim_of_two_has_one_link_of_twice_the_bandwidth() -> None:
    network = torus((2, 3), bandwidth=1.0)

    assert network.bandwidth[network.find(0, 3)].tolist() == [2.0]
    assert network.bandwidth[network.find(0, 1)].tolist() == [1.0]


def test_levels_join_equal_cards_of_different_groups() -> None:
    network = joined([Level(kind="full_mesh", size=4, bandwidth=4.0), Level(kind="switch", size=3, bandwidth=1.0)])

    # Twelve cards and a switch for each of the four places in a node.
    assert (network.cards, network.vertices) == (12, 16)
    assert network.head[(network.tail == 5)].tolist() == [4, 6, 7, 13]


def test_any_shape_fits_inside_any_other() -> None:
    tree = fat_tree((2, 2), (1, 2), bandwidth=1.0)

    network = product([torus((3,), bandwidth=5.0), tree])

    assert network.cards == 12
    assert network.vertices == 12 + 3 * (tree.vertices - tree.cards)
    assert network.links == 4 * 6 + 3 * tree.links


def test_a_full_fat_tree_has_as_much_above_as_below() -> None:
    network = fat_tree((8, 4), (1, 8), bandwidth=1.0)
    leaf = network.tail // 1 >= 32

    assert (network.cards, network.vertices) == (32, 32 + 4 + 8)
    assert network.bandwidth[leaf & (network.head >= 32) & (network.tail < 36)].sum() == 32


def test_four_layers_of_eight_switches_join_256_cards() -> None:
    network = layered(256, 4, 32, bandwidth=50e9)
    ports = np.bincount(network.tail)

    assert network.vertices - network.cards == 32
    assert set(ports[:256].tolist()) == {4}
    assert set(ports[256:].tolist()) == {32}


def test_a_dragonfly_joins_every_two_groups() -> None:
    network = dragonfly(5, 4, 2, bandwidth=1.0)
    group = np.concatenate([np.arange(40) // 8, np.arange(20) // 4])
    pairs = set(zip(group[network.tail].tolist(), group[network.head].tolist(), strict=True))

    assert pairs == {(a, b) for a in range(5) for b in range(5)}


def test_rails_meet_at_spines_only() -> None:
    apart, met = (rail(4, 2, inside=4.0, bandwidth=1.0, spines=spines) for spines in (0, 2))

    assert met.vertices == apart.vertices + 2
    assert met.links == apart.links + 2 * 2 * 2


def test_edges_between_the_same_ends_are_one_link() -> None:
    network = from_edges([(0, 1, 3.0, 2e-6), (1, 0, 1.0, 1e-6)], cards=2)

    assert network.bandwidth.tolist() == [4.0, 4.0]
    assert network.latency.tolist() == [1e-6, 1e-6]


def test_a_slow_card_slows_its_links_and_no_others() -> None:
    network = torus((4,), bandwidth=8.0).slowed(cards={1: 0.25}, links={(2, 3): 0.5})

    assert network.bandwidth[network.find([0, 1, 2, 3], [1, 2, 3, 0])].tolist() == [2.0, 2.0, 4.0, 8.0]


def test_who_is_cut_off_is_named_with_the_links_that_are_down() -> None:
    network = torus((4,), bandwidth=1.0).without(links=[(0, 1), (2, 3)])

    with pytest.raises(CapacityError, match="card 0 – card 1, card 3 – card 2"):
        network.check_reach(np.array([0]), np.array([2]))


def test_a_link_that_is_not_there_is_refused() -> None:
    with pytest.raises(SpecError, match="card 0 has links to card 1, card 3"):
        torus((4,), bandwidth=1.0).without(links=[(0, 2)])


@pytest.mark.parametrize("edge", [(0, 0, 1.0, 0.0), (0, 5, 1.0, 0.0)])
def test_an_edge_without_two_ends_is_refused(edge: tuple[int, int, float, float]) -> None:
    with pytest.raises(SpecError, match="end"):
        from_edges([edge], cards=2, vertices=2)


def test_an_edge_without_bandwidth_is_refused() -> None:
    with pytest.raises(SpecError, match="bandwidth"):
        from_edges([(0, 1, 0.0, 0.0)], cards=2)
