"""How do a tensor's bytes come out of packs? Every byte that is read is held against its digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import zstandard
from numpy.typing import NDArray

from supernode.errors import CheckpointError
from supernode.storing.chunks import CHUNK, Table, digests_of
from supernode.storing.disk import Bytes, Disk
from supernode.storing.part import Part, Piece
from supernode.storing.spread import LOST, Joined, shares_of

_MOST = 512
"""Chunks that are read and checked at once: 8 MiB, so that what was read is still in the cache when it is checked."""


class Packs:
    """Reads pieces from packs that lie on one or more disks; a bad or missing copy is made good by the next.

    One thread's alone.
    """

    def __init__(self, disks: Sequence[Disk]) -> None:
        self._disks = tuple(disks)
        self._sources: dict[str, list[Bytes]] = {}
        self._waiting: dict[str, Iterator[Bytes]] = {}
        self._decompressor = zstandard.ZstdDecompressor()

    def read(self, part: Part, piece: Piece, into: memoryview) -> None:
        """Fill memory of the piece's size with its bytes.

        Raises:
            CheckpointError: no copy of a chunk is whole; the message names tensor and pack.
        """
        self._fill(part, piece, 0, into.cast("B"))

    def read_range(self, part: Part, piece: Piece, start: int, into: memoryview) -> None:
        """Fill memory with a piece's bytes from `start` on, reading no more chunks than they lie in."""
        view = into.cast("B")
        low, high = start // CHUNK, -(-(start + len(view)) // CHUNK)
        room = memoryview(bytearray(min(high * CHUNK, piece.nbytes) - low * CHUNK))
        self._fill(part, piece, low, room)
        view[:] = room[start - low * CHUNK :][: len(view)]

    def check(self, part: Part, piece: Piece) -> None:
        """Read a piece and let it go; raises as `read`."""
        count = len(part.table[piece.chunks])
        room = memoryview(bytearray(min(_MOST * CHUNK, piece.nbytes)))
        for low in range(0, count, _MOST):
            self._fill(part, piece, low, room[: piece.nbytes - low * CHUNK])

    def _fill(self, part: Part, piece: Piece, low: int, target: memoryview) -> None:
        """Fill memory with chunks of a piece, from number `low` on."""
        rows = part.table[piece.chunks][low : low - (-len(target) // CHUNK)]
        for start in range(0, len(rows), _MOST):
            some, room = rows[start : start + _MOST], target[start * CHUNK : (start + _MOST) * CHUNK]
            # Python's own numbers: numpy takes longer to give one of its own than a chunk takes to read.
            packs, offsets, sizes = some["pack"].tolist(), some["offset"].tolist(), some["stored"].tolist()
            bad = np.zeros(len(some), dtype=bool)
            for first, beyond in _stretches(some):
                into = room[first * CHUNK : beyond * CHUNK]
                if not sizes[first]:
                    into[:] = bytes(len(into))
                    continue
                source = self._first(part.packs[packs[first]])
                if source is None or not self._take(source, offsets[first], sizes[first:beyond], into):
                    bad[first:beyond] = True
            for row in np.flatnonzero(bad | ~_as_written(room, some)).tolist():
                self._mend(part, some[row], room[row * CHUNK : (row + 1) * CHUNK], piece)

    def _mend(self, part: Part, row: np.void, target: memoryview, piece: Piece) -> None:
        """Fill one chunk from whichever copy is good."""
        if not row["stored"]:
            raise CheckpointError(f"`{piece.name}` has a chunk that lies nowhere", hint=LOST)
        pack, rows = part.packs[int(row["pack"])], row.reshape(1)
        for source in self._of(pack):
            taken = self._take(source, int(row["offset"]), [int(row["stored"])], target)
            if taken and bool(_as_written(target, rows)[0]):
                return
        raise CheckpointError(
            f"`{piece.name}` cannot be read: what {pack} holds of it is missing or not what was written", hint=LOST
        )

    def _first(self, pack: str) -> Bytes | None:
        """Return the first copy of a pack."""
        known = self._sources.get(pack)
        return known[0] if known else next(self._of(pack), None)

    def _of(self, pack: str) -> Iterator[Bytes]:
        """Yield all copies of a pack; each is opened once, when it is needed."""
        if pack not in self._sources:
            self._sources[pack], self._waiting[pack] = [], self._open(pack)
        yield from list(self._sources[pack])
        for source in self._waiting[pack]:
            self._sources[pack].append(source)
            yield source

    def _open(self, pack: str) -> Iterator[Bytes]:
        """Yield copies of a pack, and at last what its shares give."""
        for disk in self._disks:
            with suppress(OSError):
                yield disk.opened(pack)
        if shares := shares_of(self._disks, pack)[0]:
            with suppress(CheckpointError):
                yield Joined(shares, pack)

    def _take(self, source: Bytes, start: int, sizes: list[int], target: memoryview) -> bool:
        """Copy chunks that lie one behind the other, of so many bytes each; tells whether they could be had.

        What is copied is what is checked afterwards, so a disk that reads otherwise the next time is no matter.
        """
        try:
            if len(target) == CHUNK * len(sizes) and min(sizes) == CHUNK:
                return source.fill(start, target)
            room = memoryview(bytearray(sum(sizes)))
            if not source.fill(start, room):
                return False
            for number, size in enumerate(sizes):
                into = target[number * CHUNK : (number + 1) * CHUNK]
                data = room[:size]
                chunk = data if size == CHUNK else self._decompressor.decompress(data, max_output_size=CHUNK)
                if len(chunk) != CHUNK:
                    return False
                into[:] = chunk[: len(into)]
                room = room[size:]
        except (OSError, zstandard.ZstdError):
            return False
        return True


def _stretches(table: Table) -> list[tuple[int, int]]:
    """Return (first, one past the last) of the rows that can be read in one go: one behind the other, or zeros."""
    if not len(table):
        return []
    stored, nothing = table["stored"].astype(np.uint64), table["stored"] == 0
    follows = ~nothing[1:] & ~nothing[:-1] & (table["pack"][1:] == table["pack"][:-1])
    follows &= table["offset"][1:] == table["offset"][:-1] + stored[:-1]
    follows |= nothing[1:] & nothing[:-1]
    breaks = (np.flatnonzero(~follows) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(table)], strict=True))


def _as_written(target: memoryview, rows: Table) -> NDArray[np.bool_]:
    """Tell of each chunk in memory whether it has the digest of its row; the last one may lack its zeros."""
    whole = len(target) // CHUNK * CHUNK
    found = digests_of(target[:whole])
    if whole < len(target):
        found = np.concatenate((found, digests_of(memoryview(bytes(target[whole:]).ljust(CHUNK, b"\0")))))
    good: NDArray[np.bool_] = (found == rows["digest"]).all(axis=1)
    return good
