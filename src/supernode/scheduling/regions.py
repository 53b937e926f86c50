"""Which connected cards do for a slice when no block is free? Grows one card by card along the links."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from supernode.scheduling.ledger import Flags, Ints

MOST_EXACT = 4096
"""Cards up to which a diameter is counted; beyond, the fabric's own is the limit."""


def grow(cards: int, free: Flags, *, peers: Ints, units: Ints, fewest: int) -> Iterator[Ints]:
    """Yield connected sets of free cards, the tightest regions first.

    Args:
        cards: how many a set has.
        free: (C,) which may be taken.
        peers: (C, P) the card behind each port, -1 where there is none.
        units: (P,) links that a port bundles.
        fewest: links inside that each card has to keep; cards that cannot are left out.
    """
    core = _core(free, peers=peers, units=units, fewest=fewest)
    for region in sorted(_regions(core, peers), key=len):
        if len(region) >= cards:
            yield _grown(region[0], cards, core, peers)


def largest_region(free: Flags, peers: Ints) -> int:
    """Return how many free cards hang together at most."""
    return max((len(region) for region in _regions(free, peers)), default=0)


def diameter_within(cards: Ints, peers: Ints) -> int:
    """Return the most hops between two cards of a connected set along links inside it."""
    count = len(cards)
    index = np.full(int(peers.max(initial=0)) + 2, count, dtype=np.int64)
    index[cards] = np.arange(count)
    near = index[peers[cards]]  # a port without a peer, -1, reads the last entry: nobody
    # One row of bits for each card: whom it has reached. The row behind the last is nobody's.
    reached = np.zeros((count + 1, -(-count // 64)), dtype=np.uint64)
    reached[np.arange(count), np.arange(count) // 64] = np.uint64(1) << (np.arange(count) % 64).astype(np.uint64)
    everyone, hops = np.bitwise_or.reduce(reached, axis=0), 0
    while not bool((reached[:-1] == everyone).all()):
        wider = reached.copy()
        for port in near.T:
            wider[:-1] |= reached[port]
        assert not np.array_equal(wider, reached), "the set is not connected"
        reached, hops = wider, hops + 1
    return hops


def _core(free: Flags, *, peers: Ints, units: Ints, fewest: int) -> Flags:
    """Return the free cards that keep enough links to each other, after those that do not are left out."""
    core = free.copy()
    while fewest > 1:
        links = (((peers >= 0) & core[peers]) * units).sum(axis=1)
        short = core & (links < fewest)
        if not short.any():
            break
        core &= ~short
    return core


def _regions(free: Flags, peers: Ints) -> list[list[int]]:
    """Return the connected regions, each from a card at its rim."""
    near, left, regions = peers.tolist(), set(np.flatnonzero(free).tolist()), []
    degree = ((peers >= 0) & free[peers]).sum(axis=1)
    while left:
        seed = left.pop()
        region, edge = [seed], [seed]
        while edge:
            edge = list({peer for card in edge for peer in near[card] if peer in left})
            left.difference_update(edge)
            region += edge
        regions.append(sorted(region, key=lambda card: (degree[card], card)))
    return regions


def _grown(seed: int, cards: int, free: Flags, peers: Ints) -> Ints:
    """Return a set grown from a card, each time by the free neighbour with the most links inside, then the oldest."""
    taken: dict[int, None] = {}
    links, order = {seed: 0}, {seed: 0}
    heap = [(0, 0, seed)]
    while len(taken) < cards:
        minus_links, _, card = heapq.heappop(heap)
        if card in taken or -minus_links != links[card]:
            continue
        taken[card] = None
        for peer in peers[card].tolist():
            if peer >= 0 and free[peer] and peer not in taken:
                links[peer] = links.get(peer, 0) + 1
                order.setdefault(peer, len(order))
                heapq.heappush(heap, (-links[peer], order[peer], peer))
    return np.array(list(taken), dtype=np.int64)
