"""How is a described collective carried out for real? The messages that `fabric` costs, sent between processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from supernode.collectives.message import Ints, Phase, Schedule
from supernode.errors import SpecError

WINDOW = 3
"""Chunks under way at once: while one waits for its neighbours, the links carry the others."""
CHUNK = 2**20
"""Bytes of a chunk; a message is this over the pieces, and below some 64 KiB its own cost begins to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank sends another, or has from it, in one step: pieces, and which of them are added."""

    other: int
    pieces: tuple[int, ...]
    reduces: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rank's part of a phase: what leaves is what it held before anything arrived."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    @property
    def crossing(self) -> frozenset[int]:
        """Pieces that leave and arrive in the same step."""
        leaving = {piece for message in self.sends for piece in message.pieces}
        return frozenset(piece for message in self.receives for piece in message.pieces if piece in leaving)


def steps_of(schedule: Schedule, rank: int) -> tuple[tuple[Step, ...], ...]:
    """Return a rank's steps, lane by lane; those in which it does nothing are left out."""
    return tuple(
        tuple(
            step
            for one in lane
            for repeat in range(one.repeats)
            for step in (_step(one, one.pieces(repeat), rank),)
            if step.sends or step.receives
        )
        for lane in schedule.lanes
    )


def _step(one: Phase, piece: Ints, rank: int) -> Step:
    return Step(
        sends=_messages(one.source == rank, one.target, piece, one),
        receives=_messages(one.target == rank, one.source, piece, one),
    )


def _messages(mine: np.ndarray, other: Ints, piece: Ints, one: Phase) -> tuple[Message, ...]:
    rows = np.flatnonzero(mine & (one.source != one.target))
    rows = rows[np.lexsort((piece[rows], other[rows]))]
    return tuple(
        Message(
            other=int(number),
            pieces=tuple(piece[chosen].tolist()),
            reduces=tuple(one.reduces[chosen].tolist()),
        )
        for number in np.unique(other[rows])
        for chosen in (rows[other[rows] == number],)
    )


class Executor:
    """Carries a schedule out over a group whose ranks are numbered as the schedule's are.

    Every rank makes it, and runs the same collectives in the same order.

    Args:
        chunk: bytes; a longer all-reduce or broadcast is cut, and `window` of its chunks are under way at once.

    Raises:
        SpecError: another number of ranks, or helpers take part, which no process stands for.
    """

    def __init__(
        self, schedule: Schedule, group: dist.ProcessGroup, *, chunk: int = CHUNK, window: int = WINDOW
    ) -> None:
        if schedule.helpers or schedule.ranks != group.size():
            raise SpecError(
                f"{schedule.algorithm} is of {schedule.ranks} ranks and {schedule.helpers} switches, the group of "
                f"{group.size()} ranks",
                hint="give a schedule of as many ranks as the group has, without switches that add.",
            )
        self.schedule, self.group, self.rank = schedule, group, group.rank()
        self._chunk, self._window = chunk, window
        self._lanes = steps_of(schedule, self.rank)
        self._held = _touched(schedule, self._lanes, self.rank)
        self._places: dict[int, dict[int, tuple[int, int]]] = {}
        workers = max(1, window * len(self._lanes))
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="supernode-execute")

    def run(self, vector: Tensor, *, elements: int | None = None) -> Tensor:
        """Carry it out; returns this rank's result.

        Args:
            vector: contiguous, one dim. Of an all-reduce or broadcast the result takes its place; of a reduce-scatter
                it is used up; of an all-gather it holds this rank's pieces, one after the other; of an all-to-all a
                part for each rank.
            elements: of an all-gather, the length of the result, where the pieces may differ by an element. By default
                all ranks have given as much.
        """
        kind, piece_count = self.schedule.kind, self.schedule.pieces
        if kind in ("all_reduce", "broadcast"):
            step = max(1, self._chunk // (vector.element_size() * piece_count)) * piece_count
            self._carry([vector[first : first + step] for first in range(0, vector.numel(), step)])
            return vector
        if kind == "all_gather" and elements is None:
            elements = vector.numel() * self.schedule.ranks
        whole = elements if elements is not None else vector.numel()
        place = self._place(whole)
        own = self._own_before()
        if kind == "reduce_scatter":
            state = vector
        else:
            state = vector.new_empty(sum(length for _, length in place.values()))
            _scatter(state, [place[piece] for piece in own], vector)
        self._carry([state], whole)
        after = self._own_after()
        if kind == "all_gather":
            return state
        return torch.cat([state[first : first + length] for first, length in (place[piece] for piece in after)])

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True)

    def _own_before(self) -> Sequence[int]:
        ranks = self.schedule.ranks
        if self.schedule.kind == "all_to_all":
            return range(self.rank * ranks, (self.rank + 1) * ranks)
        return np.flatnonzero(self.schedule.owner == self.rank).tolist()

    def _own_after(self) -> Sequence[int]:
        if self.schedule.kind == "all_to_all":
            return range(self.rank, self.schedule.pieces, self.schedule.ranks)
        return np.flatnonzero(self.schedule.owner == self.rank).tolist()

    def _place(self, elements: int) -> dict[int, tuple[int, int]]:
        """Return first element and length of each piece within this rank's buffer, for a collective of this length."""
        if elements not in self._places:
            if len(self._places) > 64:
                self._places.clear()
            self._places[elements] = dict(_laid_out(self.schedule, self._held, elements))
        return self._places[elements]

    def _carry(self, chunks: list[Tensor], elements: int | None = None) -> None:
        """Carry out chunks, each on every lane; all of them at once, as far as there are threads."""
        lanes = len(self._lanes)
        # The oldest chunk that is not done everywhere is under way everywhere, as threads take chunks in order.
        under_way = [
            self._pool.submit(self._walk, chunk, self._place(elements or chunk.numel()), lane, number * lanes + lane)
            for number, chunk in enumerate(chunks)
            for lane in range(lanes)
        ]
        for one in under_way:
            one.result()

    @torch.no_grad()
    def _walk(self, state: Tensor, place: dict[int, tuple[int, int]], lane: int, tag: int) -> None:
        for step in self._lanes[lane]:
            leaving = []
            for message in step.sends:
                packed = _packed(state, [place[piece] for piece in message.pieces])
                if packed.numel():
                    leaving.append(dist.isend(_bytes(packed), group=self.group, group_dst=message.other, tag=tag))
            crossing = step.crossing
            arriving = []
            for message in step.receives:
                where = [place[piece] for piece in message.pieces]
                direct = len(_merged(where)) == 1 and not any(message.reduces) and crossing.isdisjoint(message.pieces)
                length = sum(length for _, length in where)
                if not length:
                    continue
                room = _packed(state, where) if direct else state.new_empty(length)
                work = dist.irecv(_bytes(room), group=self.group, group_src=message.other, tag=tag)
                arriving.append((work, message, None if direct else room))
            for sent in leaving:
                assert sent is not None
                sent.wait()
            for work, message, waiting in arriving:
                assert work is not None
                work.wait()
                if waiting is not None:
                    _unpack(state, waiting, [place[piece] for piece in message.pieces], message.reduces)


def _touched(schedule: Schedule, lanes: tuple[tuple[Step, ...], ...], rank: int) -> tuple[int, ...]:
    """Return the pieces for which a rank needs room: all, but of an all-to-all only those that pass by."""
    if schedule.kind != "all_to_all":
        return tuple(range(schedule.pieces))
    ranks = schedule.ranks
    own = {*range(rank * ranks, (rank + 1) * ranks), *range(rank, schedule.pieces, ranks)}
    passing = {
        piece for lane in lanes for step in lane for message in (*step.sends, *step.receives)
        for piece in message.pieces
    }  # fmt: skip
    return tuple(sorted(own | passing))


def _laid_out(schedule: Schedule, held: Sequence[int], elements: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each piece with its first element and length; lengths differ by one at most."""
    parts = schedule.ranks if schedule.kind == "all_to_all" else schedule.pieces
    first = 0
    for piece in held:
        number = piece % parts
        length = elements * (number + 1) // parts - elements * number // parts
        yield piece, (first, length)
        first += length


def _merged(where: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same elements in as few ranges as can be."""
    ranges: list[tuple[int, int]] = []
    for first, length in where:
        if ranges and ranges[-1][0] + ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
        else:
            ranges.append((first, length))
    return ranges


def _packed(state: Tensor, where: Sequence[tuple[int, int]]) -> Tensor:
    """Return ranges as one tensor: a view where they are one range, else a copy."""
    parts = [state[first : first + length] for first, length in _merged(where)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpack(state: Tensor, packed: Tensor, where: Sequence[tuple[int, int]], reduces: Sequence[bool]) -> None:
    offset = 0
    for (first, length), adds in zip(where, reduces, strict=True):
        part, arrived = state[first : first + length], packed[offset : offset + length]
        part.add_(arrived) if adds else part.copy_(arrived)
        offset += length


def _scatter(state: Tensor, where: Sequence[tuple[int, int]], vector: Tensor) -> None:
    _unpack(state, vector, where, [False] * len(where))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the same memory as bytes: gloo carries those whatever the numbers are."""
    return tensor.view(torch.uint8)
