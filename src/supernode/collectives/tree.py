"""How do trees and switches spread and add? Double binary tree, binomial and chained broadcast, in-network sums."""

from __future__ import annotations

import numpy as np

from supernode.collectives.grid import NOBODY, check_sizes
from supernode.collectives.message import Ints, Phase, Schedule, phase

PARTS = 16  # pieces in flight: enough that filling the pipe costs little, few enough to stay above small messages


def parents(ranks: int) -> Ints:
    """Return (ranks,), each rank's parent in a binary tree in which every second rank is a leaf; −1 for the root, 0.

    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
    """
    parent = np.full(ranks, -1, dtype=np.int64)
    for rank in range(1, ranks):
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        parent[rank] = up if up < ranks else rank ^ bit
    return parent


def second(parent: Ints) -> Ints:
    """Return the tree that works where the first one rests: shifted by one if the ranks are odd, else mirrored."""
    ranks = parent.size
    rank = np.arange(ranks)
    name = (rank + 1) % ranks if ranks % 2 else ranks - 1 - rank
    other = np.full(ranks, -1, dtype=np.int64)
    has = parent >= 0
    other[name[has]] = name[parent[has]]
    return other


def depths(parent: Ints) -> Ints:
    """Return (ranks,), links between each rank and the root."""
    depth, at = np.zeros(parent.size, dtype=np.int64), parent.copy()
    while (at >= 0).any():
        depth += at >= 0
        at = np.where(at >= 0, parent[at], -1)
    return depth


def _upwards(parent: Ints, *, first: int, parts: int) -> list[Phase]:
    """Return the phases in which sums rise through a tree, the parts one behind the other."""
    depth = depths(parent)
    child = np.flatnonzero(parent >= 0)
    deepest, phases = int(depth.max(initial=0)), []
    for step in range(deepest + parts - 1):
        part = step - (deepest - depth[child])
        moves = (part >= 0) & (part < parts)
        sender = child[moves]
        phases.append(phase(sender, parent[sender], first + part[moves], reduces=True))
    return phases


def _downwards(parent: Ints, *, first: int, parts: int) -> list[Phase]:
    """Return the phases in which copies fall from the root to all."""
    depth = depths(parent)
    child = np.flatnonzero(parent >= 0)
    phases = []
    for step in range(int(depth.max(initial=0)) + parts - 1):
        part = step - (depth[child] - 1)
        moves = (part >= 0) & (part < parts)
        receiver = child[moves]
        phases.append(phase(parent[receiver], receiver, first + part[moves], reduces=False))
    return phases


def double_tree(ranks: int, *, parts: int = PARTS) -> Schedule:
    """Return an all-reduce in which two trees carry half of the vector each; every rank is a leaf of one of them."""
    check_sizes((ranks,))
    one = parents(ranks)
    lanes = [
        (*_upwards(tree, first=index * parts, parts=parts), *_downwards(tree, first=index * parts, parts=parts))
        for index, tree in enumerate((one, second(one)))
        if ranks > 1
    ]
    return Schedule(
        kind="all_reduce",
        algorithm="double_tree",
        ranks=ranks,
        pieces=2 * parts,
        share=1 / (2 * parts),
        lanes=tuple(lanes),
        owner=NOBODY,
    )


def binomial(ranks: int, *, root: int = 0) -> Schedule:
    """Return a broadcast in which those who have the vector double each time."""
    check_sizes((ranks,))
    phases, reach = [], 1
    while reach < ranks:
        sender = np.arange(min(reach, ranks - reach))
        phases.append(phase((sender + root) % ranks, (sender + reach + root) % ranks, 0, reduces=False))
        reach *= 2
    return _broadcast("binomial", ranks, phases, pieces=1, root=root)


def chain(ranks: int, *, root: int = 0, parts: int = PARTS) -> Schedule:
    """Return a broadcast in which each rank passes on one part while the next arrives."""
    check_sizes((ranks,))
    parent = np.arange(-1, ranks - 1)
    down = _downwards(parent, first=0, parts=parts) if ranks > 1 else []
    phases = [phase((one.source + root) % ranks, (one.target + root) % ranks, one.piece, reduces=False) for one in down]
    return _broadcast("chain", ranks, phases, pieces=parts, root=root)


def _broadcast(algorithm: str, ranks: int, phases: list[Phase], *, pieces: int, root: int) -> Schedule:
    return Schedule(
        kind="broadcast",
        algorithm=algorithm,
        ranks=ranks,
        pieces=pieces,
        share=1 / pieces,
        lanes=(tuple(phases),),
        owner=NOBODY,
        root=root,
    )


def in_network(ranks: int, *, parts: int = PARTS) -> Schedule:
    """Return an all-reduce in which the switch adds: one part rises while the sum of the one before falls.

    Source: Graham et al., "Scalable hierarchical aggregation protocol (SHArP)", COMHPC 2016.
    """
    check_sizes((ranks,))
    rank, switch = np.arange(ranks), ranks
    phases = []
    for step in range(parts + 1):
        up = (rank, np.full(ranks, switch), np.full(ranks, step), np.ones(ranks)) if step < parts else None
        down = (np.full(ranks, switch), rank, np.full(ranks, step - 1), np.zeros(ranks)) if step else None
        source, target, piece, adds = np.concatenate([rows for rows in (up, down) if rows is not None], axis=1)
        phases.append(phase(source, target, piece, reduces=adds))
    return Schedule(
        kind="all_reduce",
        algorithm="in_network",
        ranks=ranks,
        pieces=parts,
        share=1 / parts,
        lanes=(tuple(phases),) if ranks > 1 else (),
        owner=NOBODY,
        helpers=1,
    )
