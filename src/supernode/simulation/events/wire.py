"""How fast is what is under way between pipeline ranks? Messages of all replicas at once over the fabric's links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from supernode.fabric.flows import fair_rates
from supernode.fabric.level import Level, levels_of
from supernode.fabric.network import Ints, Network
from supernode.fabric.routes import spread
from supernode.fabric.shapes import joined
from supernode.forecast.efficiency import CardModel
from supernode.hardware.machine import Machine

Key = tuple[str, int, int]
"""What a bundle of flows is: `send` from one pipeline rank to another, `sync` of one with itself."""
# Routes are found for every card; above this the symmetric levels leave each card a port of its own, so that nothing
# but a card's own messages meet there, and a few replicas show the same.
MOST_CARDS = 1024


class Wire:
    """The fabric under one job: bundles of flows, each between all cards of two pipeline ranks, in max-min fair shares.

    A bundle is as fast as its slowest flow, as all cards of a rank go on together.

    Args:
        network: cards first, in rank order: pipeline rank r has cards r × `block` to (r + 1) × `block` − 1.
        ends: of each bundle, the cards that send and those that receive.
    """

    def __init__(self, network: Network, ends: Mapping[Key, tuple[Ints, Ints]]) -> None:
        self._network = network
        keys = sorted(ends)
        source = np.concatenate([ends[key][0] for key in keys] or [np.zeros(0, dtype=np.int64)])
        target = np.concatenate([ends[key][1] for key in keys] or [np.zeros(0, dtype=np.int64)])
        firsts = np.cumsum([0, *(ends[key][0].size for key in keys)])
        self._columns = {key: np.arange(firsts[i], firsts[i + 1]) for i, key in enumerate(keys)}
        routes = spread(network, source, target)
        self._part = routes.part.tocsc()
        self._latency = routes.latency
        self._known: dict[frozenset[Key], dict[Key, float]] = {}

    def carries(self, key: Key) -> bool:
        """Return whether there is such a bundle; sums within a tensor group cross none of these links."""
        return key in self._columns

    def latency(self, key: Key) -> float:
        """Return the seconds of a bundle's farthest way."""
        return float(self._latency[self._columns[key]].max(initial=0.0))

    def rates(self, active: frozenset[Key]) -> dict[Key, float]:
        """Return bytes/s of each flow of each bundle while all of them are under way."""
        if active not in self._known:
            order = sorted(active)
            columns = np.concatenate([self._columns[key] for key in order] or [np.zeros(0, dtype=np.int64)])
            rate = fair_rates(self._part[:, columns].tocsr(), self._network.bandwidth)
            found, first = {}, 0
            for key in order:
                size = self._columns[key].size
                found[key] = float(rate[first : first + size].min(initial=math.inf))
                first += size
            self._known[active] = found
        return self._known[active]

    def speeds(self, active: frozenset[Key]) -> dict[Key, float]:
        """Return which part of the rate that it has alone each bundle is left with."""
        return {key: rate / self.alone(key) for key, rate in self.rates(active).items()}

    def alone(self, key: Key) -> float:
        """Return bytes/s of each flow of a bundle that has the fabric to itself."""
        return self.rates(frozenset([key]))[key]


def card_network(card: CardModel, cards: int) -> Network:
    """Return nodes of cards behind a switch, and a rail to the equal cards of other nodes, at the rates reached."""
    wires = card.wires
    inner = min(wires.node_cards, cards)
    levels = [
        Level(
            kind="switch", size=inner, bandwidth=wires.inside * card.fitted.inside, latency=wires.inside_latency / 2
        ),
        Level(
            kind="switch", size=-(-cards // inner), bandwidth=wires.outside * card.fitted.outside,
            latency=wires.outside_latency / 2,
        ),
    ]  # fmt: skip
    return joined([level for level in levels if level.size > 1] or levels[:1])


def machine_network(machine: Machine, card: CardModel, cards: int) -> Network:
    """Return a machine's own fabric at the rates that collectives reach, as far as the first `cards` cards need it."""
    reached = (card.fitted.inside, card.fitted.outside)
    levels, below = [], 1
    for place, level in enumerate(levels_of(machine)):
        # A torus goes round: it cannot be cut off where the job ends.
        size = level.size if machine.is_direct else min(level.size, -(-cards // below))
        part = reached[0] if machine.is_direct else reached[min(place, 1)]
        levels.append(replace(level, size=size, bandwidth=level.bandwidth * part))
        below *= size
    return joined([level for level in levels if level.size > 1] or levels[:1])


def bundles(
    *, block: int, pipeline: int, group: int, stride: int, node_cards: int, wraps: bool, cards: Sequence[int] = ()
) -> dict[Key, tuple[Ints, Ints]]:
    """Return who sends to whom: between pipeline ranks that are neighbours, and within each over its data axis.

    Args:
        block: cards of a pipeline rank.
        group: cards over which gradients are summed.
        stride: ranks from one of them to the next.
        node_cards: cards that the fast links join; within a group, its members there share what goes to other nodes.
        wraps: the last rank sends to the first and back, too, as an interleaved schedule does.
        cards: of each rank; empty takes rank r on card r.
    """
    at = np.asarray(cards or range(block * pipeline), dtype=np.int64)
    own = at.reshape(pipeline, block)
    pairs = [(r, r + 1) for r in range(pipeline - 1)] + [(pipeline - 1, 0)] * (wraps and pipeline > 2)
    made = {}
    for a, b in pairs:
        made["send", a, b] = own[a], own[b]
        made["send", b, a] = own[b], own[a]
    if group > 1:
        # (groups, members, ranks between two members)
        shaped = own.reshape(pipeline, -1, group, stride)
        inside = int(np.clip(node_cards // stride, 1, group))
        step = inside if inside < group else 1
        for rank in range(pipeline):
            follower = np.roll(shaped[rank], -step, axis=1)
            made["sync", rank, rank] = shaped[rank].ravel(), follower.ravel()
    return made
