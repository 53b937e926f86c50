"""Neighbours, links and distances are those of the drawing on paper."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.errors import SpecError
from supernode.fabric.topology import Fabric, build_fabric
from supernode.hardware.assemble import build_machine


def fabric_of(cards: int, interconnect: str, **more: object) -> Fabric:
    return build_fabric(build_machine(cards, interconnect, **more))  # type: ignore[arg-type]


def walked(fabric: Fabric, source: int) -> list[int]:
    """Return hops from a card by walking over its neighbours."""
    hops, edge = {source: 0}, [source]
    while edge:
        card = edge.pop(0)
        for peer in fabric.neighbours(card).tolist():
            if peer not in hops:
                hops[peer] = hops[card] + 1
                edge.append(peer)
    return [hops[card] for card in range(fabric.cards)]


def test_a_ring_closes() -> None:
    fabric = fabric_of(8, "Ring")

    assert fabric.neighbours(0).tolist() == [1, 7]
    assert fabric.hops(0, 5) == 3


def test_a_cube_of_three_has_six_neighbours_each() -> None:
    fabric = fabric_of(27, "3D_Torus")

    # Card 0 lies at (0, 0, 0): one step along the last dim is 1, the middle 3, the first 9.
    assert fabric.neighbours(0).tolist() == [1, 2, 3, 6, 9, 18]
    assert fabric.coordinates[14].tolist() == [1, 1, 2]


def test_a_dim_of_two_joins_its_cards_by_two_links_behind_one_port() -> None:
    fabric = fabric_of(8, "3D_Torus")

    pairs, links = fabric.links()

    assert len(pairs) == 12  # a cube's edges
    assert set(links.tolist()) == {2}


@pytest.mark.parametrize(("cards", "name"), [(12, "2D_Torus"), (60, "3D_Torus"), (7, "Ring"), (16, "2D_Torus")])
def test_every_card_of_a_torus_uses_all_its_links(cards: int, name: str) -> None:
    fabric = fabric_of(cards, name)

    pairs, links = fabric.links()

    dims = sum(size > 1 for size in fabric.shape)
    assert links.sum() * 2 == cards * 2 * dims
    assert np.bincount(pairs.ravel(), weights=np.repeat(links, 2)).tolist() == [2 * dims] * cards


@pytest.mark.parametrize(("cards", "name"), [(12, "2D_Torus"), (60, "3D_Torus"), (9, "Ring"), (10, "Full_Mesh")])
def test_hops_are_what_walking_finds(cards: int, name: str) -> None:
    fabric = fabric_of(cards, name)
    everyone = np.arange(cards)

    assert [fabric.hops(card, everyone).tolist() for card in range(cards)] == [
        walked(fabric, card) for card in range(cards)
    ]
    assert fabric.diameter == max(max(walked(fabric, card)) for card in range(cards))


def test_a_mesh_joins_every_pair_once() -> None:
    pairs, links = fabric_of(10, "Full_Mesh").links()

    assert len(pairs) == 45
    assert links.sum() == 45


def test_behind_switches_a_node_is_two_links_away_and_a_rack_four() -> None:
    fabric = fabric_of(512, "Hybrid")

    assert fabric.hops(0, np.array([0, 7, 8, 63, 64])).tolist() == [0, 2, 4, 4, 6]
    assert fabric.diameter == 6
    assert fabric.neighbours(0).tolist() == []


def test_one_card_has_nobody() -> None:
    fabric = fabric_of(1, "3D_Torus")

    assert fabric.neighbours(0).tolist() == []
    assert fabric.diameter == 0


def test_a_card_outside_is_refused() -> None:
    with pytest.raises(SpecError, match="choose 0 to 7"):
        fabric_of(8, "Ring").hops(0, 8)
