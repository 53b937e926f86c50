"""How do the pieces of a tensor, which many ranks wrote, become the whole one again?"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supernode.errors import CheckpointError
from supernode.storing.part import DTYPES, Part, Piece
from supernode.storing.saves import Saves
from supernode.storing.spread import LOST

Numbers = NDArray[Any]
"""A tensor's numbers, each as the bytes that it takes: numpy has no name for some kinds, and none is needed."""


class Wholes:
    """All tensors of a checkpoint, whole, one at a time.

    Args:
        name: of the checkpoint.

    Attributes:
        where: for people.
        pieces: by name of the tensor: who wrote what of it.
    """

    def __init__(self, saves: Saves, name: str) -> None:
        self.manifest = saves.manifest(name)
        self.where = f"{saves.disks[0].where}/{name}"
        self.parts: Mapping[int, Part] = {
            writer: saves.part(name, self.manifest, writer) for writer in saves.writers(self.manifest)
        }
        self._packs = saves.packs()
        self.pieces: dict[str, list[tuple[int, Piece]]] = {}
        for writer, part in self.parts.items():
            for piece in part.pieces:
                self.pieces.setdefault(piece.name, []).append((writer, piece))

    def kind(self, name: str) -> str:
        """Return the kind of a tensor's numbers, as torch calls it; `bytes` for what is no tensor."""
        return self.pieces[name][0][1].kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole."""
        return self.pieces[name][0][1].whole

    def nbytes(self, name: str) -> int:
        """Return the bytes of the whole."""
        return DTYPES.get(self.kind(name), 1) * prod(self.shape(name))

    def read(self, name: str) -> Numbers:
        """Return a tensor, held against its digests.

        Raises:
            CheckpointError: some of it is not what was written, or nobody wrote it.
        """
        numbers, covered = prod(self.shape(name)), sum(prod(piece.shape) for _, piece in self.pieces[name])
        alike = {(piece.kind, piece.whole) for _, piece in self.pieces[name]}
        if covered != numbers or len(alike) != 1:  # Before any room is made for what a damaged part may claim.
            raise CheckpointError(f"{self.where} holds {covered} of {numbers} numbers of `{name}`", hint=LOST)
        kind = np.dtype(f"V{DTYPES.get(self.kind(name), 1)}")
        whole: Numbers = np.zeros(self.shape(name), dtype=kind)
        for writer, piece in self.pieces[name]:
            room = bytearray(piece.nbytes)
            self._packs.read(self.parts[writer], piece, memoryview(room))
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.shape, strict=True))
            whole[box] = np.frombuffer(room, dtype=kind).reshape(piece.shape)
        return whole
