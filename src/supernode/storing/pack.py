"""How do new chunks get into a pack, and a tensor's bytes out of packs? Every byte read is held against its digest."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from supernode.errors import CheckpointError
from supernode.schema.manifest import Pack
from supernode.storing.chunks import CHUNK, ZEROS, Table, digests_of, empty_table, runs
from supernode.storing.disk import Disk
from supernode.storing.part import Part, Piece
from supernode.storing.spread import LOST, Spread, mapped, rebuilt, shares_of

PACKS = "packs"
PAYS = 0.85
"""Share of its bytes that a sample must shrink to for compression to pay: reading it back takes time, too."""
_LEVEL = 1
_CHECKED = 256
"""Chunks that are checked at once."""
_PIECE = 2**22
"""Bytes written at once."""
_SAMPLES = 8
_SPARSE = 0.25
"""Share of a pack that must be live; below it, what is live moves on to the new pack and the old one can go."""


def pack_name(step: int, writer: int) -> str:
    """Return a name for a new pack; no two are alike, even of the same step."""
    return f"{PACKS}/{step:08d}-{writer:04d}-{secrets.token_hex(4)}.pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What a writer's save before left to build on.

    Attributes:
        part: of that save.
        packs: all packs that it names, which are still there.
    """

    part: Part
    packs: Mapping[str, Pack]


def write_pack(
    spread: Spread, name: str, stream: memoryview, pieces: tuple[Piece, ...], *, home: int = 0,
    before: Before | None = None, compress: bool = True, pace: Callable[[int], None] = lambda nbytes: None,
) -> tuple[Part, dict[str, Pack]]:  # fmt: skip
    """Write those chunks of a stream that the save before does not have; returns its part, and the packs that it names.

    Args:
        name: of the new pack, made by `pack_name`.
        stream: whole chunks, as `part.lay_out` lays pieces out, zeros between them.
        home: number of the writer's own disk.
        pace: told the bytes of each piece of work, to rest where training needs the machine.

    Raises:
        MachineError: a disk is full; nothing is left of the pack.
        CheckpointError: it cannot be written for another reason.
    """
    table = empty_table(len(stream) // CHUNK)
    _digest(stream, table, pace)
    packs: list[str] = []
    known: dict[str, Pack] = {}
    if before is not None:
        known = dict(before.packs)
        _adopt(table, packs, pieces, before)
    fresh = (table["stored"] == 0) & (table["digest"] != ZEROS).any(axis=1)
    if fresh.any():
        table["pack"][fresh] = len(packs)
        packs.append(name)
        known[name] = _put(spread, name, home, _New(stream, pieces, table, fresh, compress), pace)
    part = _trimmed(pieces, packs, table)
    return part, {pack: known[pack] for pack in part.packs}


def _put(spread: Spread, name: str, home: int, new: _New, pace: Callable[[int], None]) -> Pack:
    hasher, nbytes = xxhash.xxh3_128(), 0
    sink = spread.open(name, home=home)
    try:
        for data in new:
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                hasher.update(piece)
                sink.add([piece])
                pace(len(piece))
            nbytes += len(data)
        sink.finish()
    finally:
        sink.drop()
    return Pack(
        nbytes=nbytes, digest=hasher.hexdigest(), home=home, copies=spread.copies, parity=spread.parity,
        disks=len(spread.disks),
    )  # fmt: skip


class _New:
    """The chunks of a stream that are to be written, in turn; its table is told where each lies."""

    def __init__(
        self, stream: memoryview, pieces: tuple[Piece, ...], table: Table, fresh: NDArray[np.bool_], compress: bool
    ) -> None:
        self._stream, self._pieces, self._table, self._fresh, self._compress = stream, pieces, table, fresh, compress

    def __iter__(self) -> Iterator[memoryview]:
        table, stream, offset = self._table, self._stream, 0
        for piece in self._pieces:
            rows = piece.chunks
            mask = self._fresh[rows]
            if not mask.any():
                continue
            pays = self._compress and _pays(stream, rows, mask)
            for low, high in runs(mask):
                first, beyond = low + rows.start, high + rows.start
                if not pays:
                    table["offset"][first:beyond] = offset + CHUNK * np.arange(beyond - first, dtype=np.uint64)
                    table["stored"][first:beyond] = CHUNK
                    yield stream[first * CHUNK : beyond * CHUNK]
                    offset += CHUNK * (beyond - first)
                    continue
                for row in range(first, beyond):
                    chunk = stream[row * CHUNK : (row + 1) * CHUNK]
                    data = memoryview(zstandard.compress(chunk, _LEVEL))
                    data = data if len(data) < CHUNK else chunk
                    table["offset"][row], table["stored"][row] = offset, len(data)
                    yield data
                    offset += len(data)


def _digest(stream: memoryview, table: Table, pace: Callable[[int], None]) -> None:
    step = 256 * CHUNK
    for start in range(0, len(stream), step):
        part = stream[start : start + step]
        table["digest"][start // CHUNK : start // CHUNK + len(part) // CHUNK] = digests_of(part)
        pace(len(part))


def _adopt(table: Table, packs: list[str], pieces: tuple[Piece, ...], before: Before) -> None:
    """Take over the rows of chunks that are as they were, unless they lie in a pack that is mostly dead."""
    old = before.part
    known = {piece.box: piece for piece in old.pieces}
    same = np.zeros(len(table), dtype=bool)
    for piece in pieces:
        if (theirs := known.get(piece.box)) is not None:
            rows, others = table[piece.chunks], old.table[theirs.chunks]
            alike = (rows["digest"] == others["digest"]).all(axis=1) & (others["stored"] > 0)
            same[piece.chunks] = alike
            rows[alike] = others[alike]
    live = np.bincount(table["pack"][same], weights=table["stored"][same], minlength=len(old.packs))
    whole = np.array([before.packs[name].nbytes for name in old.packs], dtype=np.float64)
    sparse = np.zeros(max(len(whole), 1), dtype=bool)
    sparse[: len(whole)] = live[: len(whole)] < _SPARSE * whole
    moved = same & sparse[table["pack"]]
    for column in ("offset", "pack", "stored"):
        table[column][moved] = 0
    packs.extend(old.packs)


def _trimmed(pieces: tuple[Piece, ...], packs: list[str], table: Table) -> Part:
    """Return the part without packs that no row names."""
    used = np.unique(table["pack"][table["stored"] > 0])
    renumbered = np.zeros(max(len(packs), 1), dtype=np.uint32)
    renumbered[used] = np.arange(len(used), dtype=np.uint32)
    table["pack"] = np.where(table["stored"] > 0, renumbered[table["pack"]], 0)
    return Part(pieces=pieces, packs=tuple(packs[number] for number in used), table=table)


def _pays(stream: memoryview, rows: slice, mask: NDArray[np.bool_]) -> bool:
    fresh = np.flatnonzero(mask)
    chosen = fresh[np.linspace(0, len(fresh) - 1, min(_SAMPLES, len(fresh))).astype(int)] + rows.start
    sample = b"".join(stream[row * CHUNK : (row + 1) * CHUNK] for row in chosen)
    return len(zstandard.compress(sample, _LEVEL)) < PAYS * len(sample)


class Packs:
    """Reads pieces from packs that lie on one or more disks; a bad or missing copy is made good by the next.

    Attributes:
        bad: (disk, file) of what was found damaged on the way.
    """

    def __init__(self, disks: Sequence[Disk]) -> None:
        self._disks = tuple(disks)
        self._sources: dict[str, list[memoryview]] = {}
        self._waiting: dict[str, Iterator[memoryview]] = {}
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

    def _open(self, pack: str) -> Iterator[memoryview]:
        """Yield copies of a pack, and at last what its shares give."""
        for disk in self._disks:
            with suppress(OSError, ValueError):
                yield mapped(disk, pack)
        shares, bad = shares_of(self._disks, pack)
        self.bad |= bad
        if shares:
            with suppress(CheckpointError):
                yield memoryview(rebuilt(shares, pack))


def _stretches(table: Table) -> list[tuple[int, int]]:
    """Return (first, one past the last) of the rows that can be read in one go: alike and one behind the other."""
    if not len(table):
        return []
    stored, nothing = table["stored"], table["stored"] == 0
    raw = stored == CHUNK
    follows = raw[1:] & raw[:-1] & (table["pack"][1:] == table["pack"][:-1])
    follows &= table["offset"][1:] == table["offset"][:-1] + np.uint64(CHUNK)
    follows |= nothing[1:] & nothing[:-1]
    breaks = (np.flatnonzero(~follows) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(table)], strict=True))


def _take(source: memoryview, rows: Table, target: memoryview) -> bool:
    """Copy a run of chunks out of a pack; tells whether they are what was written.

    What is copied is what is checked, so that a page that turns bad between two reads is no matter.
    """
    start = int(rows["offset"][0])
    if rows["stored"][0] == CHUNK:
        data = source[start : start + CHUNK * len(rows)]
        if len(data) < CHUNK * len(rows):
            return False
        target[:] = data[: len(target)]
        return _is_written(target, rows)
    try:
        chunk = zstandard.decompress(source[start : start + int(rows["stored"][0])], max_output_size=CHUNK)
    except zstandard.ZstdError:
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
