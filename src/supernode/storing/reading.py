"""How do a tensor's bytes come out of packs? Every byte that is read is held against its digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import zstandard

from supernode.errors import CheckpointError
from supernode.storing.chunks import CHUNK, ZEROS, Table, digests_of
from supernode.storing.disk import Bytes, Disk
from supernode.storing.part import Part, Piece
from supernode.storing.spread import LOST, Joined, shares_of

_CHECKED = 256
"""Chunks that are checked at once."""
_MOST = 4096
"""Chunks that are read at once: 64 MiB."""


class Packs:
    """Reads pieces from packs that lie on one or more disks; a bad or missing copy is made good by the next.

    Attributes:
        bad: (disk, file) of what was found damaged on the way.
    """

    def __init__(self, disks: Sequence[Disk]) -> None:
        self._disks = tuple(disks)
        self._sources: dict[str, list[Bytes]] = {}
        self._waiting: dict[str, Iterator[Bytes]] = {}
        self.bad: set[tuple[str, str]] = set()

    def read(self, part: Part, piece: Piece, into: memoryview) -> None:
        """Fill memory of the piece's size with its bytes.

        Raises:
            CheckpointError: no copy of a chunk is whole; the message names tensor and pack.
        """
        view = into.cast("B")
        table = part.table[piece.chunks]
        for first, beyond in _stretches(table):
            target = view[first * CHUNK : min(beyond * CHUNK, piece.nbytes)]
            self._fetch(part, table[first:beyond], target, piece)

    def read_range(self, part: Part, piece: Piece, start: int, into: memoryview) -> None:
        """Fill memory with a piece's bytes from `start` on, reading no more chunks than they lie in."""
        view = into.cast("B")
        low, high = start // CHUNK, -(-(start + len(view)) // CHUNK)
        table = part.table[piece.chunks][low:high]
        for first, beyond in _stretches(table):
            room = memoryview(bytearray(min((low + beyond) * CHUNK, piece.nbytes) - (low + first) * CHUNK))
            self._fetch(part, table[first:beyond], room, piece)
            begin = (low + first) * CHUNK - start  # Where the stretch begins in what is asked for.
            from_, to = max(0, -begin), min(len(room), len(view) - begin)
            view[begin + from_ : begin + to] = room[from_:to]

    def check(self, part: Part, piece: Piece) -> None:
        """Read a piece and let it go; raises as `read`."""
        table = part.table[piece.chunks]
        room = memoryview(bytearray(min(_CHECKED, len(table)) * CHUNK))
        for first, beyond in _stretches(table):
            for start in range(first, beyond, _CHECKED):
                end = min(start + _CHECKED, beyond)
                target = room[: min(end * CHUNK, piece.nbytes) - start * CHUNK]
                self._fetch(part, table[start:end], target, piece)

    def _fetch(self, part: Part, rows: Table, target: memoryview, piece: Piece) -> None:
        if rows["stored"][0]:
            self._fill(part.packs[int(rows["pack"][0])], rows, target, piece)
        else:
            self._zeros(target, rows, piece)

    @staticmethod
    def _zeros(target: memoryview, rows: Table, piece: Piece) -> None:
        if bool((rows["digest"] != ZEROS).any()):
            raise CheckpointError(f"`{piece.name}` has a chunk that lies nowhere", hint=LOST)
        target[:] = bytes(len(target))

    def _fill(self, pack: str, rows: Table, target: memoryview, piece: Piece) -> None:
        if pack not in self._sources:
            self._sources[pack] = []
            self._waiting[pack] = self._open(pack)
        if any(_take(source, rows, target) for source in self._sources[pack]):
            return
        for source in self._waiting[pack]:
            self._sources[pack].append(source)
            if _take(source, rows, target):
                return
        raise CheckpointError(
            f"`{piece.name}` cannot be read: what {pack} holds of it is missing or not what was written", hint=LOST
        )

    def _open(self, pack: str) -> Iterator[Bytes]:
        """Yield copies of a pack, and at last what its shares give."""
        for disk in self._disks:
            with suppress(OSError):
                yield disk.opened(pack)
        shares, bad = shares_of(self._disks, pack)
        self.bad |= bad
        if shares:
            with suppress(CheckpointError):
                yield Joined(shares, pack)


def _stretches(table: Table) -> list[tuple[int, int]]:
    """Return (first, one past the last) of the rows that can be read in one go: alike and one behind the other."""
    if not len(table):
        return []
    stored, nothing = table["stored"], table["stored"] == 0
    raw = stored == CHUNK
    follows = raw[1:] & raw[:-1] & (table["pack"][1:] == table["pack"][:-1])
    follows &= table["offset"][1:] == table["offset"][:-1] + np.uint64(CHUNK)
    follows |= nothing[1:] & nothing[:-1]
    follows[_MOST - 1 :: _MOST] = False
    breaks = (np.flatnonzero(~follows) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(table)], strict=True))


def _take(source: Bytes, rows: Table, target: memoryview) -> bool:
    """Copy a run of chunks out of a pack; tells whether they are what was written.

    What is copied is what is checked, so that a disk which reads otherwise the next time is no matter.
    """
    start, stored = int(rows["offset"][0]), int(rows["stored"][0])
    try:
        if stored == CHUNK:
            whole = len(target) // CHUNK * CHUNK
            if not source.fill(start, target[:whole]):
                return False
            if whole == len(target):
                return _is_written(target, rows)
            last = memoryview(bytearray(CHUNK))
            if not source.fill(start + whole, last):
                return False
            target[whole:] = last[: len(target) - whole]
            return _is_written(target, rows)
        packed = memoryview(bytearray(stored))
        if not source.fill(start, packed):
            return False
        chunk = zstandard.decompress(packed, max_output_size=CHUNK)
    except (OSError, zstandard.ZstdError):
        return False
    if len(chunk) != CHUNK:
        return False
    target[:] = chunk[: len(target)]
    return _is_written(target, rows)


def _is_written(target: memoryview, rows: Table) -> bool:
    """Tell whether memory has the digests of its rows; the last chunk may be a padded one."""
    whole = len(target) // CHUNK * CHUNK
    if not bool((digests_of(target[:whole]) == rows["digest"][: whole // CHUNK]).all()):
        return False
    if whole == len(target):
        return True
    last = bytes(target[whole:]).ljust(CHUNK, b"\0")
    return bool((digests_of(memoryview(last))[0] == rows["digest"][-1]).all())
