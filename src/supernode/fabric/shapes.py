"""Which topologies do we know? Rings, meshes, switches, trees, dragonflies, and any of them within one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np

from supernode.errors import SpecError
from supernode.fabric.level import Level
from supernode.fabric.network import Edge, Network, from_edges
from supernode.registry import lookup

Line = Callable[[int, float, float], list[Edge]]


def _ring(size: int, bandwidth: float, latency: float) -> list[Edge]:
    return [(card, (card + 1) % size, bandwidth, latency) for card in range(size) if size > 1]


def _full_mesh(size: int, bandwidth: float, latency: float) -> list[Edge]:
    return [(a, b, bandwidth, latency) for a, b in combinations(range(size), 2)]


def _switch(size: int, bandwidth: float, latency: float) -> list[Edge]:
    return [(card, size, bandwidth, latency) for card in range(size)]


LINES: Mapping[str, Line] = {"ring": _ring, "full_mesh": _full_mesh, "switch": _switch}
"""Edges that join so many cards on one level; vertices above the cards are switches."""


def line(level: Level) -> Network:
    """Return the network of one group of a level."""
    edges = lookup(level.kind, LINES, kind="kind of level")(level.size, level.bandwidth, level.latency)
    return from_edges(edges, cards=level.size, half=level.half, overhead=level.overhead, sizes=(level.size,))


def joined(levels: Sequence[Level]) -> Network:
    """Return the network of levels within levels: a torus from rings, an n-dimensional full mesh from full meshes,
    rails from a switch inside the node and switches between equal cards of the nodes, and every mixture.
    """
    return product([line(level) for level in levels])


def torus(shape: Sequence[int], *, bandwidth: float, latency: float = 0.0) -> Network:
    """Return the torus of a shape, the last dim's cards next to each other."""
    return joined([Level(kind="ring", size=size, bandwidth=bandwidth, latency=latency) for size in reversed(shape)])


def product(parts: Sequence[Network]) -> Network:
    """Return the network in which each part joins, on its own axis, cards that are alike on all others.

    Args:
        parts: innermost first; of any shape, fat trees and edge lists, too.
    """
    cards = math.prod(part.cards for part in parts)
    columns: list[list[np.ndarray[tuple[int], np.dtype[np.float64]]]] = [[], [], [], [], []]
    vertices, step = cards, 1
    for part in parts:
        everyone = np.arange(cards)
        lines = everyone[everyone // step % part.cards == 0]
        switches = part.vertices - part.cards
        # (lines, vertices of the part): the number of each in the whole.
        number = np.concatenate(
            [
                lines[:, None] + np.arange(part.cards) * step,
                vertices + np.arange(lines.size * switches).reshape(lines.size, switches),
            ],
            axis=1,
        )
        values = (number[:, part.tail], number[:, part.head], part.bandwidth, part.latency, part.half)
        for column, value in zip(columns, values, strict=True):
            column.append(np.broadcast_to(value, (lines.size, part.links)).ravel().astype(np.float64))
        vertices += lines.size * switches
        step *= part.cards
    tail, head, bandwidth, latency, half = (np.concatenate(column) for column in columns)
    return Network(
        cards=cards,
        vertices=vertices,
        tail=tail.astype(np.int64),
        head=head.astype(np.int64),
        bandwidth=bandwidth,
        latency=latency,
        half=half,
        overhead=max(part.overhead for part in parts),
        sizes=tuple(part.cards for part in parts),
    )


def fat_tree(down: Sequence[int], up: Sequence[int], *, bandwidth: float, latency: float = 0.0) -> Network:
    """Return a folded Clos network of as many layers of switches as there are numbers.

    Of `down=(8, 4)` and `up=(1, 8)`: leaf switches with 8 cards, 4 leaves under each spine, 8 spines above each leaf,
    so as much bandwidth above as below; `up=(1, 4)` would have half of it.

    Args:
        down: vertices of the layer below that each switch of a layer has.
        up: switches of a layer that each vertex of the layer below has.

    Source: Öhring et al., "On generalized fat trees", IPPS 1995.
    """
    if len(down) != len(up) or not down or min(*down, *up) < 1:
        raise SpecError(f"layers {list(down)} down and {list(up)} up", hint="give as many of both, each 1 or more.")
    cards, edges = math.prod(down), []
    first, below = cards, 0
    for layer in range(len(down)):
        above_m, under_w = math.prod(down[layer + 1 :]), math.prod(up[:layer])
        for high in range(above_m):
            for low in range(under_w):
                for child in range(down[layer]):
                    lower = below + (high * down[layer] + child) * under_w + low
                    for parent in range(up[layer]):
                        upper = first + (high * under_w + low) * up[layer] + parent
                        edges.append((lower, upper, bandwidth, latency))
        below, first = first, first + above_m * under_w * up[layer]
    return from_edges(edges, cards=cards, sizes=(cards,))


def rail(
    nodes: int, node_cards: int, *, inside: float, bandwidth: float, spines: int = 0, latency: float = 0.0
) -> Network:
    """Return nodes whose cards share a switch inside, and a leaf switch with the equal cards of all nodes outside.

    Args:
        inside: bytes/s of a card's port in its node.
        bandwidth: bytes/s of its port to its rail.
        spines: switches that join the rails, with a node's share of bandwidth each; 0 leaves them apart.

    Source: NVIDIA DGX SuperPOD reference architecture, rail-optimised leaf and spine.
    """
    base = joined(
        [
            Level(kind="switch", size=node_cards, bandwidth=inside, latency=latency),
            Level(kind="switch", size=nodes, bandwidth=bandwidth, latency=latency),
        ]
    )
    edges = [
        (int(a), int(b), float(rate), float(seconds))
        for a, b, rate, seconds in zip(base.tail, base.head, base.bandwidth, base.latency, strict=True)
        if a < b
    ]
    leaves = range(base.cards + nodes, base.vertices)
    between = [
        (leaf, base.vertices + spine, bandwidth * nodes / spines, latency) for leaf in leaves for spine in range(spines)
    ]
    return from_edges(edges + between, cards=base.cards, vertices=base.vertices + spines, sizes=base.sizes)


def layered(cards: int, layers: int, ports: int, *, bandwidth: float, latency: float = 0.0) -> Network:
    """Return layers of switches without links between them: a port of every card on every layer, grouped differently.

    The first layer groups cards in number order, the second those of equal remainder, the others along diagonals; so
    any two cards meet on a switch, or each meets a third one that passes messages on. This is the requirement's
    machine: 256 cards, four layers, eight switches of 32 ports each.

    Raises:
        SpecError: the ports do not divide the cards.
    """
    groups = cards // ports
    if cards % ports:
        raise SpecError(f"{cards} cards on switches of {ports} ports", hint="choose cards that the ports divide.")
    card = np.arange(cards)
    edges = []
    for layer in range(layers):
        group = card // ports if layer == 0 else (card % groups + (layer - 1) * (card // groups)) % groups
        switch = cards + layer * groups + group
        edges += [(int(a), int(b), bandwidth, latency) for a, b in zip(card, switch, strict=True)]
    return from_edges(edges, cards=cards, sizes=(cards,))


def dragonfly(
    groups: int, routers: int, router_cards: int, *, bandwidth: float, latency: float = 0.0, links: int = 1
) -> Network:
    """Return groups of fully joined routers, with links between every two groups.

    Args:
        routers: of a group.
        router_cards: cards of a router.
        links: between two groups; they are dealt out to the groups' routers in turn.

    Source: Kim, Dally, Scott and Abts, "Technology-driven, highly-scalable dragonfly topology", ISCA 2008.
    """
    cards = groups * routers * router_cards
    edges: list[Edge] = [(card, cards + card // router_cards, bandwidth, latency) for card in range(cards)]
    for group in range(groups):
        first = cards + group * routers
        edges += [(first + a, first + b, bandwidth, latency) for a, b in combinations(range(routers), 2)]
    dealt = [0] * groups
    for a, b in combinations(range(groups), 2):
        for _ in range(links):
            ends = [cards + group * routers + dealt[group] % routers for group in (a, b)]
            edges.append((ends[0], ends[1], bandwidth, latency))
            dealt[a], dealt[b] = dealt[a] + 1, dealt[b] + 1
    return from_edges(edges, cards=cards, sizes=(cards,))
