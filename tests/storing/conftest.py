"""What the tests of disks share: streams of random pieces, and saves of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from supernode.schema.manifest import Manifest
from supernode.storing.part import Piece, lay_out, stream_bytes
from supernode.storing.saves import Saves, name_of
from supernode.storing.spread import Spread, disk_of


def manifest(step: int) -> Manifest:
    """Return a manifest that names nothing yet."""
    return Manifest(step=step, samples=8 * step, seed=1, model="m", data="d", layout="l", optimizer="adamw")


def saves(folder: Path, *, disks: int = 1, copies: int = 1, parity: int = 0) -> Saves:
    """Return saves on so many disks under a folder."""
    places = tuple(disk_of(folder / f"disk{number}") for number in range(disks))
    return Saves(Spread(disks=places, copies=copies, parity=parity))


class Writer:
    """One writer's tensors, which change as a training would change them.

    Attributes:
        values: by name.
    """

    def __init__(self, number: int, sizes: dict[str, int], seed: int = 0) -> None:
        self.number = number
        self.draw = np.random.default_rng((seed, number))
        self.values = {f"{number}.{name}": self.draw.bytes(size) for name, size in sizes.items()}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return lay_out([(name, "uint8", (len(v),), (0,), (len(v),)) for name, v in self.values.items()])

    @property
    def stream(self) -> memoryview:
        pieces = self.pieces
        stream = bytearray(stream_bytes(pieces))
        for piece in pieces:
            stream[piece.start : piece.start + piece.nbytes] = self.values[piece.name]
        return memoryview(bytes(stream))

    def change(self, name: str, start: int, count: int) -> None:
        """Change some bytes of a tensor."""
        full = f"{self.number}.{name}"
        value = bytearray(self.values[full])
        value[start : start + count] = self.draw.bytes(len(value[start : start + count]))
        self.values[full] = bytes(value)


def save(where: Saves, step: int, writers: list[Writer], *, build: bool = True) -> int:
    """Save all writers' tensors, on top of the newest save; returns the bytes written anew."""
    newest = where.all()[-1][1] if build and where.all() else ""
    known = where.manifest(newest) if newest else None
    stored = []
    for writer in writers:
        before = where.before(newest, known, writer.number) if known else None
        home = writer.number % len(where.disks)
        stored.append(where.store(step, writer.number, writer.stream, writer.pieces, home=home, before=before)[0])
    where.commit(manifest(step), stored)
    return sum(one.nbytes for one in stored)


def read(where: Saves, step: int) -> dict[str, bytes]:
    """Return all tensors of a save."""
    known = where.manifest(name_of(step))
    packs, found = where.packs(), {}
    for writer in where.writers(known):
        part = where.part(name_of(step), known, writer)
        for piece in part.pieces:
            room = bytearray(piece.nbytes)
            packs.read(part, piece, memoryview(room))
            found[piece.name] = bytes(room)
    return found
