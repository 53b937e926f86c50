"""How does one group reduce and scatter? Ring, direct exchange and recursive halving among n ranks, n pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from supernode.collectives.message import Phase, phase

Method = Callable[[int], tuple[Phase, ...]]


def ring(ranks: int) -> tuple[Phase, ...]:
    """Return a reduce-scatter in which each rank sends to the next, n − 1 times.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
    """
    if ranks == 1:
        return ()
    rank = np.arange(ranks)
    step = phase(
        rank, (rank + 1) % ranks, (rank - 1) % ranks, reduces=True, stride=-1, wrap=ranks, repeats=ranks - 1
    )  # fmt: skip
    return (step,)


def ring_down(ranks: int) -> tuple[Phase, ...]:
    """Return the same ring the other way round."""
    if ranks == 1:
        return ()
    rank = np.arange(ranks)
    step = phase(
        rank, (rank - 1) % ranks, (rank + 1) % ranks, reduces=True, stride=1, wrap=ranks, repeats=ranks - 1
    )  # fmt: skip
    return (step,)


def direct(ranks: int) -> tuple[Phase, ...]:
    """Return a reduce-scatter in which each rank sends every other its piece, at once."""
    if ranks == 1:
        return ()
    source, target = np.divmod(np.arange(ranks * ranks), ranks)
    other = source != target
    return (phase(source[other], target[other], target[other], reduces=True),)


def halving(ranks: int) -> tuple[Phase, ...]:
    """Return a reduce-scatter in which pairs exchange halves, then quarters, and so on.

    Where n is no power of two, the ranks above the largest one below send theirs to a partner first, and everyone's
    piece is handed over at the end.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    active = 1 << (ranks.bit_length() - 1)
    bound = np.arange(active + 1) * ranks // active
    phases = []
    if ranks > active:
        late = np.arange(active, ranks)[:, None]
        phases.append(phase(late, late - active, np.arange(ranks)[None, :], reduces=True))
    distance = active // 2
    while distance:
        rows = [
            (rank, partner, piece)
            for rank in range(active)
            for partner in (rank ^ distance,)
            for piece in range(
                bound[partner // distance * distance], bound[partner // distance * distance + distance]
            )
        ]  # fmt: skip
        source, target, piece_ = np.array(rows, dtype=np.int64).T
        phases.append(phase(source, target, piece_, reduces=True))
        distance //= 2
    if ranks > active:
        holder = np.searchsorted(bound, np.arange(ranks), side="right") - 1
        moves = holder != np.arange(ranks)
        piece = np.arange(ranks)[moves]
        phases.append(phase(holder[moves], piece, piece, reduces=False))
    return tuple(phases)


METHODS: Mapping[str, Method] = {"ring": ring, "direct": direct, "halving": halving}
"""How the ranks of one group exchange."""
