"""Which way do bytes go? Shortest paths, one or all of them, dimension order, a spanning tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_tree, dijkstra

from supernode.errors import SpecError
from supernode.fabric.network import Floats, Ints, Network


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """The ways of F flows over L links.

    Attributes:
        source: (F,) vertex.
        target: (F,) vertex.
        part: (L, F), the part of each flow's bytes that goes over each link.
        latency: (F,) seconds, the mean over a flow's ways.
    """

    source: Ints
    target: Ints
    part: csr_array
    latency: Floats

    def load(self, nbytes: Floats) -> Floats:
        """Return (L,), the bytes that go over each link."""
        return np.asarray(self.part @ nbytes, dtype=np.float64)


Router = Callable[[Network, Ints, Ints], Routes]
"""Finds the ways of flows from sources to targets."""


def routes_from(network: Network, source: Ints, target: Ints, *, link: Ints, flow: Ints, part: Floats) -> Routes:
    """Return routes from their entries; entries of one link and flow are added."""
    matrix = csr_array((part, (link, flow)), shape=(network.links, source.size))
    return Routes(source=source, target=target, part=matrix, latency=np.asarray(matrix.T @ network.latency))


def checked(network: Network, source: Ints, target: Ints) -> tuple[Ints, Ints]:
    ends = [np.atleast_1d(np.asarray(end, dtype=np.int64)) for end in (source, target)]
    if ends[0].shape != ends[1].shape or min(end.min(initial=0) for end in ends) < 0:
        raise SpecError("sources and targets do not pair up", hint="give as many of both, numbered from 0.")
    if max(end.max(initial=0) for end in ends) >= network.vertices:
        raise SpecError(f"a vertex above {network.vertices - 1}", hint="number cards first, then switches.")
    network.check_reach(*ends)
    return ends[0], ends[1]


def distances(network: Network, target: Ints) -> tuple[Floats, Ints]:
    """Return (targets, V), links from every vertex to each different target, and which row each target has."""
    different, row = np.unique(target, return_inverse=True)
    back = network.graph(np.ones(network.links)).T.tocsr()
    hops = dijkstra(back, directed=True, indices=different, unweighted=True)
    return np.atleast_2d(hops), row


def walk(
    network: Network, source: Ints, target: Ints, dice: np.random.Generator | None, *, single: bool
) -> tuple[Ints, Ints, Floats]:
    """Return entries (link, flow, part) of flows that step closer to their targets, over one next link or over all."""
    hops, row = distances(network, target)
    up = network.up
    order = up[np.argsort(network.tail[up], kind="stable")]
    first = np.searchsorted(network.tail[order], np.arange(network.vertices + 1))
    flow, at, part = np.arange(source.size), source.copy(), np.ones(source.size)
    found: list[tuple[Ints, Ints, Floats]] = []
    while (moving := at != target[flow]).any():
        flow, at, part = flow[moving], at[moving], part[moving]
        degree = first[at + 1] - first[at]
        entry = np.repeat(np.arange(at.size), degree)
        link = order[np.arange(entry.size) - np.repeat(np.cumsum(degree) - degree, degree) + first[at][entry]]
        where = row[flow]
        closer = hops[where[entry], network.head[link]] == hops[where, at][entry] - 1
        entry, link = entry[closer], link[closer]
        if single:
            chance = dice.random(entry.size) if dice else np.zeros(entry.size)
            pick = np.lexsort((chance, entry))
            pick = pick[np.unique(entry[pick], return_index=True)[1]]
            entry, link = entry[pick], link[pick]
        share = part[entry] / np.bincount(entry, minlength=at.size)[entry]
        found.append((link, flow[entry], share))
        key, inverse = np.unique(flow[entry] * network.vertices + network.head[link], return_inverse=True)
        flow, at = key // network.vertices, key % network.vertices
        part = np.bincount(inverse, weights=share).astype(np.float64)
    if not found:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
    link, flow, part = (np.concatenate(column) for column in zip(*found, strict=True))
    return link, flow, part


def shortest(network: Network, source: Ints, target: Ints, *, seed: int | None = None) -> Routes:
    """Return one shortest path a flow: the first, or with a seed any, as a hash of the flow would choose.

    Raises:
        CapacityError: a target cannot be reached.
    """
    source, target = checked(network, source, target)
    dice = None if seed is None else np.random.default_rng(seed)
    link, flow, part = walk(network, source, target, dice, single=True)
    return routes_from(network, source, target, link=link, flow=flow, part=part)


def spread(network: Network, source: Ints, target: Ints) -> Routes:
    """Return all shortest paths: at each vertex a flow parts evenly over the next links (equal-cost multipath).

    Raises:
        CapacityError: a target cannot be reached.
    """
    source, target = checked(network, source, target)
    link, flow, part = walk(network, source, target, None, single=False)
    return routes_from(network, source, target, link=link, flow=flow, part=part)


def dimension_order(network: Network, source: Ints, target: Ints, *, order: Sequence[int] = ()) -> Routes:
    """Return paths that settle one axis of the grid after the other, both ways round where they are equally long.

    Args:
        order: axes; empty goes from the innermost out.

    Raises:
        SpecError: ends that are no cards.
        CapacityError: a target, or a card where a way turns, cannot be reached.
    """
    source, target = checked(network, source, target)
    if max(source.max(initial=0), target.max(initial=0)) >= network.cards or not network.sizes:
        raise SpecError("dimension order between switches, or without a grid", hint="use `shortest` or `spread`.")
    at, found = source.copy(), []
    for axis in order or range(len(network.sizes)):
        step, size = int(np.prod(network.sizes[:axis])), network.sizes[axis]
        there = at + (target // step % size - at // step % size) * step
        network.check_reach(at, there)
        found.append(walk(network, at, there, None, single=False))
        at = there
    link, flow, part = (np.concatenate(column) for column in zip(*found, strict=True))
    return routes_from(network, source, target, link=link, flow=flow, part=part)


def cheapest(network: Network, source: Ints, target: Ints, price: Floats) -> tuple[Floats, Ints, Ints]:
    """Return each flow's price of its cheapest path (F,), and those paths as entries of links and flows.

    Args:
        price: (L,), above 0 where the link is up.
    """
    roots, row = np.unique(source, return_inverse=True)
    cost, before = dijkstra(network.graph(price), directed=True, indices=roots, return_predecessors=True)
    flow, at = np.flatnonzero(source != target), target[source != target]
    links, flows = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    while flow.size:
        last = before[row[flow], at].astype(np.int64)
        links.append(network.find(last, at))
        flows.append(flow)
        moving = last != source[flow]
        flow, at = flow[moving], last[moving]
    return cost[row, target], np.concatenate(links), np.concatenate(flows)


def spanning_tree(network: Network, *, root: int = -1) -> Network:
    """Return the network with only the links of one tree, as bridged Ethernet keeps them; the rest are down.

    Args:
        root: vertex; −1 takes the last, a switch of the top layer where there are any.
    """
    top = network.vertices - 1 if root < 0 else root
    tree = breadth_first_tree(network.graph(np.ones(network.links)), top, directed=True).tocoo()
    keep = np.zeros(network.links, dtype=bool)
    keep[network.find(tree.row, tree.col)] = True
    keep[network.find(tree.col, tree.row)] = True
    pairs = [(int(a), int(b)) for a, b in zip(network.tail[~keep], network.head[~keep], strict=True) if a < b]
    return network.without(links=pairs)
