"""How long do collectives take? Two tiers, the node's links and the network cards, for arrays of groups at once.

Where collectives were measured on the machine itself, their curves take the place of tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from supernode.workload.shape import Numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """Measured collectives.

    Attributes:
        seconds: by kind and cards of a group: sizes in bytes, ascending, and the seconds of each.
    """

    seconds: Mapping[tuple[str, int], tuple[Numbers, Numbers]]

    def time(self, kind: str, nbytes: Numbers, *, cards: Numbers | float) -> Numbers:
        """Return the seconds of collectives, for each pair of size and group that broadcast together.

        Between sizes as a power of the size, below the least one alike, above the largest in proportion. Between
        groups as a straight line over the cards, beyond the largest in proportion to its other members.
        """
        size, group = np.broadcast_arrays(np.asarray(nbytes, float), np.asarray(cards, float))
        known = sorted(count for name, count in self.seconds if name == kind)
        rows = np.stack([self._of_size(kind, count, size) for count in known])
        found = np.asarray(rows[-1] * np.maximum((group - 1) / (known[-1] - 1), 1))
        for place in range(len(known) - 1, 0, -1):
            least, most = known[place - 1], known[place]
            part = np.clip((group - least) / (most - least), 0, 1)
            found = np.where(group <= most, rows[place - 1] * (1 - part) + rows[place] * part, found)
        return np.where(group > 1, found, 0.0)

    def _of_size(self, kind: str, count: int, size: Numbers) -> Numbers:
        sizes, seconds = self.seconds[kind, count]
        logs = np.log(np.clip(size, sizes[0], sizes[-1]))
        found: Numbers = np.exp(np.interp(logs, np.log(sizes), np.log(seconds))) * np.maximum(size / sizes[-1], 1)
        return found


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
        link: bytes/s of the one link that a message between neighbours takes where cards are joined directly; 0 where
            it has all that a card has.
        curves: of collectives measured on the machine itself, which then count instead of all this.
    """

    node_cards: int
    inside: float
    outside: float
    inside_efficiency: float = 1.0
    outside_efficiency: float = 1.0
    inside_latency: float = 5e-6
    outside_latency: float = 12e-6
    link: float = 0.0
    curves: Curves | None = None


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
    if wires.curves is not None:
        return wires.curves.time("all_gather", nbytes, cards=cards)
    inside = members_inside(wires, cards, stride)
    nodes = np.ceil(cards / inside)
    latency = wires.inside_latency * np.log2(np.maximum(inside, 1)) + wires.outside_latency * np.log2(nodes)
    return (cards - 1) / cards * nbytes / ring_bandwidth(wires, cards, stride) + latency


def sum_time(wires: Wires, nbytes: Numbers, *, cards: Numbers, stride: Numbers) -> Numbers:
    """Return the time of an all-reduce of `nbytes`: a reduce-scatter and an all-gather."""
    if wires.curves is not None:
        return wires.curves.time("all_reduce", nbytes, cards=cards)
    return 2 * gather_time(wires, nbytes, cards=cards, stride=stride)


def scatter_time(wires: Wires, nbytes: Numbers, *, cards: Numbers, stride: Numbers) -> Numbers:
    """Return the time of a reduce-scatter of `nbytes` in all."""
    if wires.curves is not None:
        return wires.curves.time("reduce_scatter", nbytes, cards=cards)
    return gather_time(wires, nbytes, cards=cards, stride=stride)


def exchange_time(wires: Wires, nbytes: Numbers, *, cards: Numbers, stride: Numbers) -> Numbers:
    """Return the time of an all-to-all in which each member holds `nbytes` for all."""
    inside = members_inside(wires, cards, stride)
    within = nbytes * (inside - 1) / cards / (wires.inside * wires.inside_efficiency)
    across = nbytes * (cards - inside) / cards / (wires.outside * wires.outside_efficiency)
    latency = np.where(cards > inside, wires.outside_latency, wires.inside_latency) * (cards > 1)
    return np.asarray(np.maximum(within, across) + latency)


def send_time(wires: Wires, nbytes: Numbers, *, stride: Numbers) -> Numbers:
    """Return the time of a message to the card `stride` ranks away."""
    if wires.curves is not None:
        return wires.curves.time("send", nbytes, cards=2.0)
    inside = stride < wires.node_cards
    most = wires.link or np.inf
    within = nbytes / (min(wires.inside, most) * wires.inside_efficiency) + wires.inside_latency
    across = nbytes / (min(wires.outside, most) * wires.outside_efficiency) + wires.outside_latency
    return np.asarray(np.where(inside, within, across))
