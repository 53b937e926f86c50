"""How long do collectives take? Two tiers, the node's links and the network cards, for arrays of groups at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supernode.workload.shape import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """What a card has towards others.

    Attributes:
        node_cards: cards that the fast links join.
        inside: bytes/s of a card towards its node, one direction.
        outside: bytes/s of a card's share of the node's network cards.
        inside_efficiency: part of `inside` that long collectives reach; fitted.
        outside_efficiency: likewise.
        inside_latency: seconds of one message, software included.
        outside_latency: likewise between nodes.
    """

    node_cards: int
    inside: float
    outside: float
    inside_efficiency: float = 1.0
    outside_efficiency: float = 1.0
    inside_latency: float = 5e-6
    outside_latency: float = 12e-6


def members_inside(wires: Wires, cards: Numbers, stride: Numbers) -> Numbers:
    """Return how many members of a group lie in one node.

    Args:
        cards: of the group.
        stride: ranks from one member to the next.
    """
    return np.clip(np.floor(wires.node_cards / stride), 1, cards)


def ring_bandwidth(wires: Wires, cards: Numbers, stride: Numbers) -> Numbers:
    """Return the bytes/s at which a ring turns.

    Between nodes, the members inside a node share its network cards with the node's other groups, all of which turn
    at once; so a group of k members in a node has k cards' share of them.
    """
    inside = members_inside(wires, cards, stride)
    within = wires.inside * wires.inside_efficiency
    across = np.minimum(within, wires.outside * wires.outside_efficiency * inside)
    return np.where(inside >= cards, within, across)


def gather_time(wires: Wires, nbytes: Numbers, *, cards: Numbers, stride: Numbers) -> Numbers:
    """Return the time of an all-gather or a reduce-scatter of `nbytes` in all; half an all-reduce.

    Latency grows with the logarithm of the nodes, as trees and NCCL's own choice make it.
    """
    inside = members_inside(wires, cards, stride)
    nodes = np.ceil(cards / inside)
    latency = wires.inside_latency * np.log2(np.maximum(inside, 1)) + wires.outside_latency * np.log2(nodes)
    return (cards - 1) / cards * nbytes / ring_bandwidth(wires, cards, stride) + latency


def exchange_time(wires: Wires, nbytes: Numbers, *, cards: Numbers, stride: Numbers) -> Numbers:
    """Return the time of an all-to-all in which each member holds `nbytes` for all."""
    inside = members_inside(wires, cards, stride)
    within = nbytes * (inside - 1) / cards / (wires.inside * wires.inside_efficiency)
    across = nbytes * (cards - inside) / cards / (wires.outside * wires.outside_efficiency)
    latency = np.where(cards > inside, wires.outside_latency, wires.inside_latency) * (cards > 1)
    return np.asarray(np.maximum(within, across) + latency)


def send_time(wires: Wires, nbytes: Numbers, *, stride: Numbers) -> Numbers:
    """Return the time of a message to the card `stride` ranks away."""
    inside = stride < wires.node_cards
    within = nbytes / (wires.inside * wires.inside_efficiency) + wires.inside_latency
    across = nbytes / (wires.outside * wires.outside_efficiency) + wires.outside_latency
    return np.asarray(np.where(inside, within, across))
