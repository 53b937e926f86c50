"""How does a rank's state lie in memory that outlives it? Two slots, one whole while the other is written.

A slot is an anonymous file in memory (memfd) that holds a stream as `storing.part` lays it out. Rank and keeper map the
same memory; the kernel frees it when both are gone, however they went.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field

import xxhash

from supernode.errors import CheckpointError
from supernode.storing.chunks import CHUNK, padded
from supernode.storing.part import Piece, stream_bytes

COUNT = 2
NOTHING = -1
"""Stands for the step of a slot that holds none."""


def make(pieces: tuple[Piece, ...]) -> list[int]:
    """Return the descriptors of new slots; the kernel gives them memory as it is used.

    Raises:
        CheckpointError: there is no room for so much.
    """
    made: list[int] = []
    try:
        for _ in range(COUNT):
            made.append(os.memfd_create("supernode-slot", os.MFD_CLOEXEC))
            os.ftruncate(made[-1], max(stream_bytes(pieces), CHUNK))
    except OSError as error:
        for descriptor in made:
            os.close(descriptor)
        raise CheckpointError(
            f"no memory to keep {stream_bytes(pieces)} bytes of state in: {error.strerror}",
            hint="give the node more memory, or spread the model over more nodes.",
        ) from error
    return made


@dataclass(slots=True)
class Slots:
    """The slots of one writer.

    Attributes:
        pieces: what a stream is made of.
        descriptors: of the memory.
        views: the memory itself.
        steps: whose state each slot holds whole; `NOTHING` while it is written.
        digests: of each piece, by slot.
        writers: how many the state of each slot is spread over.
    """

    pieces: tuple[Piece, ...]
    descriptors: list[int]
    views: list[memoryview] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [NOTHING] * COUNT)
    digests: list[list[str]] = field(default_factory=lambda: [[] for _ in range(COUNT)])
    writers: list[int] = field(default_factory=lambda: [0] * COUNT)

    def __post_init__(self) -> None:
        self.views = [
            memoryview(mmap.mmap(descriptor, max(stream_bytes(self.pieces), CHUNK))) for descriptor in self.descriptors
        ]

    def stream(self, slot: int) -> memoryview:
        """Return the bytes of a slot's stream."""
        return self.views[slot][: stream_bytes(self.pieces)]

    def clean(self, slot: int) -> None:
        """Have nothing but zeros between the pieces, where no digest of a piece looks and those of chunks do."""
        view = self.views[slot]
        for piece in self.pieces:
            end = piece.start + piece.nbytes
            view[end : piece.start + padded(piece.nbytes)] = bytes(padded(piece.nbytes) - piece.nbytes)

    def slot_of(self, step: int) -> int | None:
        """Return the slot that holds a step whole."""
        return self.steps.index(step) if step != NOTHING and step in self.steps else None

    def is_whole(self, slot: int, digests: list[str] | None = None) -> bool:
        """Tell whether every piece is what its writer put there; at another time, where `digests` are of that."""
        found = [digest_of(self.views[slot], piece) for piece in self.pieces]
        return found == (self.digests[slot] if digests is None else digests)

    def close(self) -> None:
        """Let go of the memory."""
        self.views.clear()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def digest_of(view: memoryview, piece: Piece) -> str:
    """Return the XXH3-128 of a piece's bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(view[piece.start : piece.start + piece.nbytes])
