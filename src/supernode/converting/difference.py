"""Which tensors differ between two checkpoints, and in how many numbers?"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from supernode.converting.wholes import Wholes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a tensor of two checkpoints differs.

    Attributes:
        what: `changed`, `added` and `removed`, seen from the first; `reshaped` where shape or kind are others.
        differing: numbers that are not the same to the bit.
        numbers: in all.
    """

    name: str
    what: str
    differing: int
    numbers: int


def differences(first: Wholes, second: Wholes) -> list[Difference]:
    """Return the tensors that differ, in the order of their names; those written alike are not read at all.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    found = []
    for name in sorted(first.pieces.keys() | second.pieces.keys()):
        if name not in second.pieces or name not in first.pieces:
            what, of = ("removed", first) if name in first.pieces else ("added", second)
            count = prod(of.shape(name))
            found.append(Difference(name=name, what=what, differing=count, numbers=count))
        elif (first.kind(name), first.shape(name)) != (second.kind(name), second.shape(name)):
            count = prod(second.shape(name))
            found.append(Difference(name=name, what="reshaped", differing=count, numbers=count))
        elif not _alike(first, second, name) and (differing := _differing(first, second, name)):
            count = prod(second.shape(name))
            found.append(Difference(name=name, what="changed", differing=differing, numbers=count))
    return found


def _alike(first: Wholes, second: Wholes, name: str) -> bool:
    """Tell whether both were cut alike and all chunks have the same digests."""
    ours = {piece.box: (writer, piece) for writer, piece in first.pieces[name]}
    theirs = {piece.box: (writer, piece) for writer, piece in second.pieces[name]}
    return ours.keys() == theirs.keys() and all(
        np.array_equal(
            first.parts[writer].table["digest"][piece.chunks],
            second.parts[theirs[box][0]].table["digest"][theirs[box][1].chunks],
        )
        for box, (writer, piece) in ours.items()
    )


def _differing(first: Wholes, second: Wholes, name: str) -> int:
    ours, theirs = first.read(name), second.read(name)
    size = ours.dtype.itemsize
    flat = [np.ascontiguousarray(one).reshape(-1).view(np.uint8).reshape(-1, size) for one in (ours, theirs)]
    return int((flat[0] != flat[1]).any(axis=1).sum())
