"""What was one writer's stream at one save, and where does each chunk of it lie? A part says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import numpy as np

from supernode.errors import CheckpointError
from supernode.schema import plain
from supernode.storing.chunks import CHUNK, ROW, Table, chunk_count, padded

DTYPES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8,
    "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex64": 8,
    "complex128": 16,
}  # fmt: skip
"""Bytes of one number, by torch's name for its kind."""
_MOST_HEADER = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of one writer: the whole of it or a box cut from it.

    Attributes:
        name: in the whole model.
        kind: of its numbers, as torch calls it, or `bytes` for what is no tensor.
        whole: shape of the whole tensor.
        offsets: where the box begins in it.
        shape: of the box.
        start: its first byte in the stream, a multiple of the chunk.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    name: str
    kind: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        if self.kind == "bytes":
            return self.shape[0]
        count = DTYPES[self.kind]
        for size in self.shape:
            count *= size
        return count

    @property
    def chunks(self) -> slice:
        """Its rows of the table."""
        first = self.start // CHUNK
        return slice(first, first + chunk_count(self.nbytes))

    @property
    def box(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What must be alike for chunks to be compared with those of another save."""
        return self.name, self.kind, self.whole, self.offsets, self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    pieces: tuple[Piece, ...]
    packs: tuple[str, ...]
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One writer's stream.

    Attributes:
        packs: names of the packs that its rows count by number.
        table: (chunks,) of `chunks.ROW`.
    """

    pieces: tuple[Piece, ...]
    packs: tuple[str, ...] = ()
    table: Table = field(default_factory=lambda: np.zeros(0, dtype=ROW))

    def to_bytes(self) -> bytes:
        """Return one JSON line and the table after it."""
        header = {"pieces": [asdict(piece) for piece in self.pieces], "packs": self.packs, "chunks": len(self.table)}
        return json.dumps(header, separators=(",", ":")).encode() + b"\n" + self.table.tobytes()


def lay_out(boxes: list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]) -> tuple[Piece, ...]:
    """Return the pieces of a stream, one after another; each box is (name, kind, whole, offsets, shape)."""
    pieces, start = [], 0
    for name, kind, whole, offsets, shape in boxes:
        piece = Piece(name=name, kind=kind, whole=whole, offsets=offsets, shape=shape, start=start)
        pieces.append(piece)
        start += padded(piece.nbytes)
    return tuple(pieces)


def stream_bytes(pieces: tuple[Piece, ...]) -> int:
    """Return the bytes of a stream of these pieces."""
    return max((piece.start + padded(piece.nbytes) for piece in pieces), default=0)


def read_part(data: bytes, where: str) -> Part:
    """Return the part that bytes hold, every number of it checked.

    Raises:
        CheckpointError: they hold none.
    """
    try:
        end = data.index(b"\n", 0, _MOST_HEADER)
        header = plain.read(_Header, data[:end])
        table = np.frombuffer(data, dtype=ROW, offset=end + 1)
        _check(header, table)
    except (ValueError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{where} is no part of a checkpoint: {error}", hint="resume from an older one with `--checkpoint`."
        ) from error
    return Part(pieces=header.pieces, packs=header.packs, table=table)


def _check(header: _Header, table: Table) -> None:
    if len(table) != header.chunks or header.chunks != stream_bytes(header.pieces) // CHUNK:
        raise ValueError(f"it has {len(table)} chunks")
    beyond = 0
    for piece in header.pieces:
        dimensions = {len(piece.whole), len(piece.offsets), len(piece.shape)}
        if len(dimensions) != 1:
            raise ValueError(f"`{piece.name}` has a shape of two lengths")
        sane = all(
            o >= 0 and s >= 0 and o + s <= w for w, o, s in zip(piece.whole, piece.offsets, piece.shape, strict=True)
        )
        known = piece.kind in DTYPES or (piece.kind == "bytes" and len(piece.shape) == 1)
        if not sane or not known or piece.start != beyond:
            raise ValueError(f"`{piece.name}` is not laid out as a tensor can be")
        beyond += padded(piece.nbytes)
    if len(table) and bool(((table["stored"] > 0) & (table["pack"] >= len(header.packs))).any()):
        raise ValueError("it names a pack that it does not list")
    if len(table) and int(table["stored"].max()) > CHUNK:
        raise ValueError("a chunk takes more than it has")
