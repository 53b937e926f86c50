"""Bundles of flows share ports and links as max-min fairness says, by hand."""

from __future__ import annotations

import pytest

from supernode.fabric.level import Level
from supernode.fabric.shapes import joined, torus
from supernode.forecast.rates import card_of
from supernode.hardware.assemble import build_machine
from supernode.simulation.events.wire import Wire, bundles, machine_network

AHEAD, BACK, SUM = ("send", 0, 1), ("send", 1, 0), ("sync", 0, 0)


def switched() -> Wire:
    """Return two stages of two replicas, each card behind its own port of 10 bytes/s."""
    network = joined([Level(kind="switch", size=4, bandwidth=10.0, latency=0.5)])
    return Wire(network, bundles(block=2, pipeline=2, group=2, stride=1, node_cards=1, wraps=False))


def test_opposite_ways_do_not_meet() -> None:
    wire = switched()

    assert wire.rates(frozenset([AHEAD, BACK])) == {AHEAD: 10.0, BACK: 10.0}


def test_a_message_and_a_sum_of_gradients_share_the_senders_port() -> None:
    wire = switched()

    assert wire.speeds(frozenset([AHEAD, SUM])) == {AHEAD: 0.5, SUM: 0.5}
    assert wire.speeds(frozenset([SUM, ("sync", 1, 1)])) == {SUM: 1.0, ("sync", 1, 1): 1.0}


def test_the_way_through_a_switch_is_two_links() -> None:
    assert switched().latency(AHEAD) == 1.0


def test_stages_two_rows_apart_share_the_rows_between() -> None:
    # Eight cards in a ring, stages of three cards: each card sends three links far, so that three flows meet on a link.
    network = torus([9], bandwidth=9.0)
    wire = Wire(network, bundles(block=3, pipeline=3, group=1, stride=1, node_cards=1, wraps=False))

    assert wire.alone(AHEAD) == pytest.approx(3.0)
    # The second stage's messages to the third meet the first one's on its own links: five flows cross the middle.
    assert wire.rates(frozenset([AHEAD, ("send", 1, 2)]))[AHEAD] == pytest.approx(3.0)


def test_a_switched_machine_carries_messages_at_the_port_of_the_tier_they_cross() -> None:
    machine = build_machine(card_count=32, card="H100", interconnect="Hybrid")
    card = card_of(machine)
    wire = Wire(
        machine_network(machine, card, 32), bundles(block=8, pipeline=4, group=1, stride=1, node_cards=8, wraps=False)
    )

    assert wire.alone(AHEAD) == pytest.approx(machine.tiers[1].bandwidth * card.fitted.outside)
    assert wire.latency(AHEAD) == pytest.approx(machine.tiers[1].latency)
