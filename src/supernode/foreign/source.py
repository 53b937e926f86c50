"""How do the bytes of another trainer's tensors get into a rank's memory, under our names and in our order of rows?"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from supernode.checkpoint.source import as_bytes, on_disk, whole
from supernode.errors import CheckpointError, MachineError
from supernode.foreign.look import Found, Item
from supernode.foreign.match import Match
from supernode.foreign.naming import halves_from_pairs
from supernode.storing.part import Piece

Pieces = Mapping[str, list[tuple[int, Piece]]]


class Foreign:
    """A `checkpoint.source.Source` of what was found at a path, under the names that stand there.

    Neither safetensors nor PyTorch's checkpoints hold digests: what was damaged on the way is not seen.
    """

    def __init__(self, found: Found) -> None:
        self.where = str(found.path)
        self._found = found
        self.pieces: Pieces = {
            name: [(number, item.piece) for number, item in enumerate(items)] for name, items in found.tensors.items()
        }

    def read(self, writer: int, piece: Piece, into: memoryview) -> None:
        """Read a box."""
        item = self._found.tensors[piece.name][writer]
        if self._found.kind == "dcp":
            box = _unpacked(item)
            into[:] = as_bytes(box.contiguous())
        else:
            _read(item, into)


class Renamed:
    """A `checkpoint.source.Source` under our names.

    Attributes:
        base: where the bytes come from.
    """

    def __init__(self, match: Match) -> None:
        self.base = on_disk(match.found.path) if match.found.kind == "ours" else Foreign(match.found)
        self.where = str(match.found.path)
        self._taken = match.taken
        self.pieces: Pieces = {
            ours: [
                (writer, replace(piece, name=ours)) for writer, piece in self.base.pieces[taken.name]
            ] if not taken.heads else [(0, self._of_whole(ours, self.base.pieces[taken.name][0][1]))]
            for ours, taken in match.taken.items()
        }  # fmt: skip

    @staticmethod
    def _of_whole(ours: str, piece: Piece) -> Piece:
        return replace(piece, name=ours, offsets=(0,) * len(piece.whole), shape=piece.whole, start=0)

    def read(self, writer: int, piece: Piece, into: memoryview) -> None:
        """Read a box; where rows lie in pairs, the whole tensor, and put them in our order."""
        taken = self._taken[piece.name]
        if not taken.heads:
            theirs = next(one for number, one in self.base.pieces[taken.name]
                          if number == writer and one.offsets == piece.offsets)  # fmt: skip
            self.base.read(writer, theirs, into)
            return
        order = torch.tensor(halves_from_pairs(piece.shape[0], taken.heads))
        into[:] = as_bytes(whole(taken.name, self.base)[order])

    def check_ties(self) -> None:
        """Check that tensors of the file that are one in the model hold the same.

        Raises:
            CheckpointError: they do not; the message names them.
        """
        for ours, taken in self._taken.items():
            for other in taken.alike:
                if not torch.equal(whole(taken.name, self.base), whole(other, self.base)):
                    raise CheckpointError(
                        f"`{taken.name}` and `{other}` of {self.where} differ, and are one in this model (`{ours}`)",
                        hint="set `model.tied` to false, or let your module keep them apart.",
                    )


def _read(item: Item, into: memoryview) -> None:
    at, done = item.start, 0
    try:
        with item.file.open("rb", buffering=0) as file:
            while done < len(into):
                got = os.preadv(file.fileno(), [into[done:]], at + done)
                if not got:
                    raise CheckpointError(
                        f"{item.file} ends within `{item.piece.name}`", hint="download or write it again."
                    )
                done += got
    except OSError as error:
        raise MachineError(
            f"{item.file} cannot be read: {error.strerror}", hint="see to its permissions and its disk."
        ) from error


def _unpacked(item: Item) -> Tensor:
    """Return the one tensor of an archive within a file; `weights_only` lets nothing else out of it."""
    buffer = bytearray(item.nbytes)
    _read(item, memoryview(buffer))
    piece = item.piece
    try:
        found = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(
            f"`{piece.name}` in {item.file} is not read: {said}", hint="download or write it again."
        ) from error
    kind = str(getattr(found, "dtype", type(found).__name__)).removeprefix("torch.")
    shape = tuple(getattr(found, "shape", ()))
    if not isinstance(found, Tensor) or kind != piece.kind or shape != piece.shape:
        raise CheckpointError(
            f"`{piece.name}` in {item.file} is {kind} {list(shape)}, and its table says {piece.kind} "
            f"{list(piece.shape)}",
            hint="download or write it again.",
        )
    return found.detach()
