"""How does everyone send to everyone? All-to-all directly, along a ring, and level by level."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from supernode.collectives.grid import NOBODY, check_sizes, coordinates
from supernode.collectives.message import Phase, Schedule, phase


def direct_exchange(ranks: int) -> Schedule:
    """Return an all-to-all in which every rank sends to all others at once."""
    return level_exchange((ranks,), algorithm="direct")


def level_exchange(sizes: Sequence[int], *, algorithm: str = "levels") -> Schedule:
    """Return an all-to-all that first sorts inside nodes, then exchanges between them, and so on outwards.

    After the first level, rank j of a node holds all that its node has for the ranks j of other nodes; so one large
    message goes from node to node where the direct way sends many small ones.

    Args:
        sizes: ranks of a node, nodes of a rack, and so on.
    """
    check_sizes(sizes)
    ranks = math.prod(sizes)
    place = coordinates(sizes)
    slot = np.arange(ranks * ranks)
    at, goal = slot // ranks, slot % ranks
    phases = []
    for axis in range(len(sizes)):
        there = at + (place[goal, axis] - place[at, axis]) * math.prod(sizes[:axis])
        moves = there != at
        if moves.any():
            phases.append(phase(at[moves], there[moves], slot[moves], reduces=False))
        at = there
    return _exchange(algorithm, ranks, phases)


def ring_exchange(ranks: int) -> Schedule:
    """Return an all-to-all over a one-way ring: what is k ranks away is passed on k times, n (n − 1) / 2 in all."""
    check_sizes((ranks,))
    rank = np.arange(ranks)
    phases = []
    for away in range(1, ranks):
        for hop in range(away):
            slot = rank * ranks + (rank + away) % ranks
            phases.append(phase((rank + hop) % ranks, (rank + hop + 1) % ranks, slot, reduces=False))
    return _exchange("ring", ranks, phases)


def _exchange(algorithm: str, ranks: int, phases: list[Phase]) -> Schedule:
    return Schedule(
        kind="all_to_all",
        algorithm=algorithm,
        ranks=ranks,
        pieces=ranks * ranks,
        share=1 / ranks,
        lanes=(tuple(phases),),
        owner=NOBODY,
    )
