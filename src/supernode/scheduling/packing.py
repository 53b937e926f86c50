"""Which cards behind switches do for a slice? As few nodes, racks and uplinks as possible."""

from __future__ import annotations

import numpy as np

from supernode.scheduling.ledger import Flags, Ints, Ledger


def pack(cards: int, free: Flags, *, sizes: tuple[int, ...], ledger: Ledger, bandwidth: float) -> Ints | None:
    """Return cards in the innermost group that has room, the tightest such group; None where none has.

    A slice that a group does not hold crosses the uplinks of the groups below, and takes from each no more cards than
    the uplink can still serve with `bandwidth`.

    Args:
        free: (C,) which cards may be taken.
        sizes: cards of a group, innermost tier first; the last one holds every card.
        bandwidth: bytes/s that each card may send out of its group.
    """
    usable: list[Ints] = []
    room = np.add.reduceat(free.astype(np.int64), np.arange(0, len(free), sizes[0]))
    for level, size in enumerate(sizes):
        if level:
            below = _served(usable[-1], level - 1, ledger, bandwidth)
            usable[-1] = below
            of_group = np.arange(len(below)) * sizes[level - 1] // size
            room = np.bincount(of_group, weights=below).astype(np.int64)
        usable.append(room)
        fits = np.flatnonzero(room >= cards)
        if len(fits):
            held = np.add.reduceat((ledger.parts > 0).astype(np.int64) * free, np.arange(0, len(free), size))
            # Part-filled cards first, then the group that has least room to spare.
            group = int(fits[np.lexsort((room[fits], -held[fits]))[0]])
            return _take(cards, level, group, usable=usable, free=free, sizes=sizes, parts=ledger.parts)
    return None


def _served(room: Ints, tier: int, ledger: Ledger, bandwidth: float) -> Ints:
    if int(bandwidth) == 0 or not ledger.uplinks:
        return room
    left = ledger.uplink_capacity[tier] - ledger.uplinks[tier]
    return np.asarray(np.minimum(room, left // int(bandwidth)), dtype=np.int64)


def _take(
    cards: int, level: int, group: int, *, usable: list[Ints], free: Flags, sizes: tuple[int, ...], parts: Ints
) -> Ints:
    """Return cards of a group: its fullest subgroups, and for the rest the smallest that has enough."""
    first, last = group * sizes[level], min((group + 1) * sizes[level], len(free))
    if level == 0:
        there = first + np.flatnonzero(free[first:last])
        return np.sort(there[np.argsort(-parts[there], kind="stable")[:cards]])
    inner = range(first // sizes[level - 1], -(-last // sizes[level - 1]))
    room = {child: int(usable[level - 1][child]) for child in inner if usable[level - 1][child]}
    taken: list[Ints] = []
    while cards:
        enough = [child for child in room if room[child] >= cards]
        child = min(enough, key=room.__getitem__) if enough else max(room, key=room.__getitem__)
        count = min(cards, room.pop(child))
        taken.append(_take(count, level - 1, child, usable=usable, free=free, sizes=sizes, parts=parts))
        cards -= count
    return np.sort(np.concatenate(taken))
