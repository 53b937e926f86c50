"""Where do the tensors of a checkpoint come from, and how does any box of one get into a rank's memory?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from supernode.checkpoint.boxes import KINDS, Box, box_of, local_of
from supernode.errors import CheckpointError
from supernode.schema.manifest import Manifest
from supernode.storing.part import Part, Piece
from supernode.storing.saves import Saves
from supernode.storing.spread import Spread, disk_of

_KEPT_BYTES = 256 * 2**20
"""How much of pieces that are needed in part only is kept for the next who needs a part of it."""


class Source(Protocol):
    """Pieces of tensors, by name.

    Attributes:
        where: for people.
        pieces: by name of the tensor: all pieces of it, with who wrote each.
    """

    where: str
    pieces: Mapping[str, list[tuple[int, Piece]]]

    def read(self, writer: int, piece: Piece, into: memoryview) -> None:
        """Fill memory with a piece, its bytes held against their digests.

        Raises:
            CheckpointError: they are not what was written.
        """


class OnDisk:
    """A checkpoint on a run's disks.

    Args:
        name: of its folder.
    """

    def __init__(self, saves: Saves, name: str) -> None:
        self.manifest: Manifest = saves.manifest(name)
        self.where = f"{saves.disks[0].where}/{name}"
        self._parts: dict[int, Part] = {
            writer: saves.part(name, self.manifest, writer) for writer in saves.writers(self.manifest)
        }
        self._packs = saves.packs()
        self.pieces: Mapping[str, list[tuple[int, Piece]]] = by_name(
            {writer: part.pieces for writer, part in self._parts.items()}
        )

    def read(self, writer: int, piece: Piece, into: memoryview) -> None:
        """Read from the packs of whichever disk has them whole."""
        self._packs.read(self._parts[writer], piece, into)


def on_disk(folder: Path) -> OnDisk:
    """Return the checkpoint in a folder, whose packs lie beside it."""
    return OnDisk(Saves(Spread(disks=(disk_of(folder.parent),))), folder.name)


def by_name(tables: Mapping[int, tuple[Piece, ...]]) -> dict[str, list[tuple[int, Piece]]]:
    """Return the pieces of all writers by the tensor that they are of."""
    found: dict[str, list[tuple[int, Piece]]] = {}
    for writer, pieces in sorted(tables.items()):
        for piece in pieces:
            found.setdefault(piece.name, []).append((writer, piece))
    return found


def fill(state: Mapping[str, Tensor], source: Source) -> None:
    """Fill this rank's tensors from a checkpoint, whatever layout wrote it.

    Raises:
        CheckpointError: it is of another model (the message names the first tensor that differs) or damaged.
    """
    boxes = {name: box_of(name, tensor) for name, tensor in state.items()}
    for name, (_, kind, whole, _, _) in boxes.items():
        found = source.pieces.get(name)
        if not found:
            raise CheckpointError(
                f"{source.where} holds no `{name}`; it is of another model", hint="resume the run that wrote it."
            )
        first = found[0][1]
        if first.whole != whole:
            raise CheckpointError(
                f"`{name}` is {list(first.whole)} in {source.where} and {list(whole)} in this model",
                hint="resume the run that wrote it, or correct `model`.",
            )
        if first.kind not in KINDS or (first.kind != kind and not KINDS[first.kind].is_floating_point):
            raise CheckpointError(
                f"`{name}` is of {first.kind} in {source.where} and of {kind} in this model",
                hint="resume the run that wrote it.",
            )
    reader = _Reader(source)
    with torch.no_grad():
        for name, tensor in state.items():
            reader.fill(boxes[name], local_of(tensor))


def whole(name: str, source: Source) -> Tensor:
    """Return a tensor of a checkpoint, all of it."""
    piece = source.pieces[name][0][1]
    found = torch.zeros(piece.whole, dtype=KINDS[piece.kind])
    fill({name: found}, source)
    return found


class _Reader:
    """Reads pieces, and keeps some of what it read in vain for the next box."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._kept: dict[tuple[int, str, tuple[int, ...]], Tensor] = {}

    def fill(self, box: Box, target: Tensor) -> None:
        name, _, _, offsets, shape = box
        if 0 in shape:
            return
        covered = 0
        for writer, piece in self._source.pieces[name]:
            if piece.offsets == offsets and piece.shape == shape and _is_plain(target, piece):
                self._source.read(writer, piece, as_bytes(target))
                return
            if (overlap := _overlap(offsets, shape, piece)) is None:
                continue
            theirs, ours = overlap
            part = self._piece(writer, piece)[theirs]
            target[ours].copy_(part)
            covered += part.numel()
        if covered != target.numel():
            raise CheckpointError(
                f"{self._source.where} holds {covered} of {target.numel()} numbers of `{name}`",
                hint="resume from an older one with `--checkpoint`.",
            )

    def _piece(self, writer: int, piece: Piece) -> Tensor:
        key = writer, piece.name, piece.offsets
        if key not in self._kept:
            room = torch.empty(piece.shape, dtype=KINDS[piece.kind])
            self._source.read(writer, piece, as_bytes(room))
            while self._kept and sum(kept.nbytes for kept in self._kept.values()) + room.nbytes > _KEPT_BYTES:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = room
        return self._kept[key]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    flat = tensor.detach().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _is_plain(target: Tensor, piece: Piece) -> bool:
    return target.is_contiguous() and target.device.type == "cpu" and target.dtype == KINDS[piece.kind]


def _overlap(
    offsets: tuple[int, ...], shape: tuple[int, ...], piece: Piece
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where a box and a piece meet, counted in the piece and in the box; None where they do not."""
    theirs, ours = [], []
    for own, size, other, there in zip(offsets, shape, piece.offsets, piece.shape, strict=True):
        first, beyond = max(own, other), min(own + size, other + there)
        if first >= beyond:
            return None
        theirs.append(slice(first - other, beyond - other))
        ours.append(slice(first - own, beyond - own))
    return tuple(theirs), tuple(ours)


def tensors_of(source: Source) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a checkpoint, whole, in the order of their names."""
    for name in sorted(source.pieces):
        if source.pieces[name][0][1].kind in KINDS:
            yield name, whole(name, source)
