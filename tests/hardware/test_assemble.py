"""Machines come out as described: shapes, tiers and the predefined ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supernode.errors import SpecError
from supernode.hardware.assemble import INTERCONNECTS, MACHINES, build_machine, predefined, torus_shape


def test_the_default_is_512_b200_on_a_cube() -> None:
    machine = build_machine()

    assert (machine.card_count, machine.card.name, machine.shape, machine.cooling.name) == (
        512,
        "B200",
        (8, 8, 8),
        "liquid",
    )


@given(cards=st.integers(1, 3000), dims=st.integers(1, 3))
def test_a_torus_has_exactly_its_cards(cards: int, dims: int) -> None:
    assert math.prod(torus_shape(cards, dims)) == cards


def test_a_million_cards_make_a_torus() -> None:
    assert build_machine(1_048_576).shape == (64, 128, 128)


@pytest.mark.parametrize("name", INTERCONNECTS)
@pytest.mark.parametrize("cards", [1, 2, 7, 8, 12, 64, 100])
def test_every_interconnect_joins_any_number_of_cards(name: str, cards: int) -> None:
    machine = build_machine(cards, name)

    assert machine.tiers[-1].cards == cards
    assert machine.nodes * machine.node_cards >= cards


def test_a_b200_shares_its_links_over_six_directions() -> None:
    assert build_machine().link_bandwidth == pytest.approx(150e9)


def test_contiguous_groups_of_a_torus_have_the_links_that_stay_inside() -> None:
    machine = build_machine(512)

    # Half a row is a line (one link at its ends), a row a ring (two), a plane four, the whole six; 150 GB/s each.
    assert [machine.tier_for(cards).bandwidth / 150e9 for cards in (4, 8, 16, 64, 512)] == [1, 2, 3, 4, 6]


def test_a_group_that_a_node_cannot_hold_aligned_crosses_nodes() -> None:
    machine = build_machine(64, "Hybrid", card="H100")

    assert machine.tier_for(4).bandwidth == 450e9
    assert machine.tier_for(8).bandwidth == 450e9
    assert machine.tier_for(6).bandwidth == 50e9  # the second six are cards 6 to 11, on two nodes
    assert machine.tier_for(16).bandwidth == 50e9


def test_a_hybrid_has_three_tiers_each_slower_to_reach() -> None:
    tiers = build_machine(512, "Hybrid").tiers

    assert [tier.cards for tier in tiers] == [8, 64, 512]
    assert [tier.latency for tier in tiers] == sorted(tier.latency for tier in tiers)


def test_oversubscription_narrows_the_outermost_tier() -> None:
    full, half = build_machine(64, "Fat_Tree"), build_machine(64, "Fat_Tree", oversubscription=2)

    assert half.tiers[-1].bandwidth == full.tiers[-1].bandwidth / 2
    assert half.tiers[0] == full.tiers[0]


def test_72_cards_take_nine_switch_trays_as_in_the_nvl72() -> None:
    machine = build_machine(72, "Switched", card="GB200")

    assert [(switch.name, count) for switch, count in machine.switches] == [("NVLink-5", 9)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"card_count": 0}, "`card_count` is 0"),
        ({"card_count": 1_048_577}, "choose 1 to 1,048,576"),
        ({"card_count": True}, "`card_count` is True"),
        ({"interconnect": "3D_Rnig"}, "did you mean `3D_Ring`"),
        ({"cooling": "ice"}, "unknown cooling"),
        ({"card": "B2000"}, "did you mean `B200`"),
        ({"shape": (4, 4, 4)}, "the sizes multiply to the cards"),
        ({"oversubscription": 0.5}, "`oversubscription` is 0.5"),
        ({"card_count": 2048, "interconnect": "Full_Mesh"}, "at most 1024"),
    ],
)
def test_a_wrong_word_is_named_with_its_remedy(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        build_machine(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MACHINES)
def test_the_predefined_machines_have_the_cards_in_their_names(name: str) -> None:
    machine = predefined(name)

    assert machine.name == name
    assert machine.card_count == int(name.rpartition("-")[2])


@pytest.mark.parametrize("name", ["٥١٢xH100", "５xH100", "", None, 512])
def test_what_names_no_machine_is_refused(name: Any) -> None:
    with pytest.raises(SpecError, match="machine") as refused:
        predefined(name)
    assert "512xH100" in refused.value.hint


def test_the_1024_card_machine_has_16_cpus_and_4_dpus() -> None:
    machine = predefined("supernode-1024")

    assert (machine.cpus, machine.dpus) == (16, 4)
