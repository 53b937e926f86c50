"""Which chunks of a stream are new, and how do they get into a pack?"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from supernode.schema.manifest import Pack
from supernode.storing.chunks import CHUNK, ZEROS, Table, digests_of, empty_table, runs
from supernode.storing.part import Part, Piece
from supernode.storing.spread import Spread

PACKS = "packs"
PAYS = 0.85
"""Share of its bytes that a sample must shrink to for compression to pay: reading it back takes time, too."""
_LEVEL = 1
_PIECE = 2**22
"""Bytes written at once."""
_SAMPLES = 8
_ROOM = 2.0
"""Times what a save needs that its packs may take; beyond, what lives in the deadest of them moves to the new one."""


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
        _adopt(table, packs, pieces, before, spread)
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
        for batch in _batches(new):
            for data in batch:
                hasher.update(data)
            sink.add(batch)
            nbytes += (size := sum(map(len, batch)))
            pace(size)
        sink.finish()
    finally:
        sink.drop()
    return Pack(
        nbytes=nbytes, digest=hasher.hexdigest(), home=home, copies=spread.copies, parity=spread.parity,
        disks=len(spread.disks),
    )  # fmt: skip


def _batches(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield pieces of a few MiB in all, large ones cut and small ones together."""
    batch: list[memoryview] = []
    room = _PIECE
    for piece in pieces:
        data = piece
        while len(data):
            batch.append(data[:room])
            room -= len(batch[-1])
            data = data[len(batch[-1]) :]
            if not room:
                yield batch
                batch, room = [], _PIECE
    if batch:
        yield batch


class _New:
    """The chunks of a stream that are to be written, in turn; its table is told where each lies."""

    def __init__(
        self, stream: memoryview, pieces: tuple[Piece, ...], table: Table, fresh: NDArray[np.bool_], compress: bool
    ) -> None:
        self._stream, self._pieces, self._table, self._fresh, self._compress = stream, pieces, table, fresh, compress

    def __iter__(self) -> Iterator[memoryview]:
        table, stream, offset = self._table, self._stream, 0
        compressor = zstandard.ZstdCompressor(_LEVEL)
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
                    data = memoryview(compressor.compress(chunk))
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


def _adopt(table: Table, packs: list[str], pieces: tuple[Piece, ...], before: Before, spread: Spread) -> None:
    """Take over the rows of chunks that are as they were, unless their pack has become too dead to keep.

    Nor are those taken over whose pack is gone from a disk, or lies otherwise than new ones do: what a save promises
    holds for all of it.
    """
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
    gone = np.zeros(max(len(whole), 1), dtype=bool)
    for number, name in enumerate(old.packs):
        gone[number] = live[number] > 0 and not spread.holds(name, before.packs[name])
    fresh = CHUNK * float(((table["digest"] != ZEROS).any(axis=1) & ~same).sum())
    for number in np.argsort(live[: len(whole)] / np.maximum(whole, 1)).tolist():
        staying = (live[: len(whole)] > 0) & ~gone[: len(whole)]
        fresh_now = fresh + float(live[: len(whole)][gone[: len(whole)]].sum())
        if whole[staying].sum() + fresh_now <= _ROOM * (live.sum() + fresh):
            break
        gone[number] = True
    moved = same & gone[table["pack"]]
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
