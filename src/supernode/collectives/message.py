"""What is a collective made of? Phases of messages between ranks, as arrays that one can cost or execute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """Messages that leave together; the next phase begins when all have arrived. M rows, one piece each.

    Rows of one source and one target are one message. A phase may stand for several alike: in repeat `t` a row moves
    the piece that lies `t * stride` further on, round and round within its aligned window of `wrap` pieces.

    Attributes:
        source: (M,) rank that sends.
        target: (M,) rank that receives.
        piece: (M,) which piece, in the first repeat.
        reduces: (M,) whether the piece is added to what the target holds, or takes its place.
        stride: (M,) pieces from one repeat to the next.
        wrap: pieces of a window.
        repeats: how often.
    """

    source: Ints
    target: Ints
    piece: Ints
    reduces: Bools
    stride: Ints
    wrap: int = 1
    repeats: int = 1

    def pieces(self, repeat: int) -> Ints:
        """Return (M,), the piece of each row in this repeat."""
        window = self.piece - self.piece % self.wrap
        return np.asarray(window + (self.piece - window + repeat * self.stride) % self.wrap, dtype=np.int64)

    def messages(self, ranks: int) -> tuple[Ints, Ints, Ints]:
        """Return source, target and number of pieces of each message; `ranks` counts every vertex, helpers too."""
        pair, pieces = np.unique(self.source * ranks + self.target, return_counts=True)
        return pair // ranks, pair % ranks, pieces.astype(np.int64)


def phase(
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    piece: npt.ArrayLike,
    *,
    reduces: npt.ArrayLike,
    stride: npt.ArrayLike = 0,
    wrap: int = 1,
    repeats: int = 1,
) -> Phase:
    """Return a phase of rows that are broadcast against each other."""
    rows = np.broadcast_arrays(
        np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64), np.asarray(piece, dtype=np.int64)
    )
    flat = [row.ravel() for row in rows]
    return Phase(
        source=flat[0],
        target=flat[1],
        piece=flat[2],
        reduces=np.broadcast_to(np.asarray(reduces, dtype=np.bool_), rows[0].shape).ravel(),
        stride=np.broadcast_to(np.asarray(stride, dtype=np.int64), rows[0].shape).ravel(),
        wrap=wrap,
        repeats=repeats,
    )


def mirrored(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Return the way back: an all-gather from a reduce-scatter, copies in place of sums."""
    return tuple(
        Phase(
            source=one.target,
            target=one.source,
            piece=one.pieces(one.repeats - 1),
            reduces=np.zeros_like(one.reduces),
            stride=-one.stride,
            wrap=one.wrap,
            repeats=one.repeats,
        )
        for one in reversed(phases)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A collective, ready to be costed or executed.

    Attributes:
        kind: one of `KINDS`.
        algorithm: its name in the table.
        ranks: how many take part.
        pieces: slots of every rank's buffer. Of an all-to-all, slot `s * ranks + d` is what `s` has for `d`.
        share: part of the collective's bytes in one piece. The bytes are those of one rank's whole buffer: the vector
            of an all-reduce, the input of a reduce-scatter or all-to-all, the result of an all-gather.
        lanes: sequences of phases on pieces of their own, under way at once.
        owner: (pieces,) rank that ends (reduce-scatter) or begins (all-gather) with the piece; empty elsewhere.
        helpers: vertices that take part without being ranks, numbered after them: switches that add.
        root: of a broadcast.
    """

    kind: str
    algorithm: str
    ranks: int
    pieces: int
    share: float
    lanes: tuple[tuple[Phase, ...], ...]
    owner: Ints
    helpers: int = 0
    root: int = 0

    @property
    def vertices(self) -> int:
        """Ranks and helpers."""
        return self.ranks + self.helpers

    def steps(self) -> Iterator[tuple[Phase, int]]:
        """Yield each phase and repeat, lane after lane."""
        for lane in self.lanes:
            for one in lane:
                for repeat in range(one.repeats):
                    yield one, repeat

    def sent(self) -> npt.NDArray[np.float64]:
        """Return (vertices,), how much each sends in all, in parts of the collective's bytes."""
        total = np.zeros(self.vertices)
        for lane in self.lanes:
            for one in lane:
                total += np.bincount(one.source, minlength=self.vertices) * (one.repeats * self.share)
        return total
