"""Where do the parameters lie in a part of a flat bucket, and which of them are worth compressing?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from supernode.errors import ModelError

Named = Sequence[tuple[str, Sequence[int]]]
"""Parameters of a bucket in its order: name and shape. A shape of one dim (a norm, a bias) is never compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one parameter that lies in a shard.

    Attributes:
        begin: its first element's place in the shard.
        length: elements of it in the shard.
        first: number of its first element in the parameter, row-major.
        rows: rows of the parameter as a matrix (its first dim); 1 for a vector.
        columns: elements of a row.
    """

    name: str
    begin: int
    length: int
    first: int
    rows: int
    columns: int


def pieces(parameters: Named, *, start: int, length: int) -> Iterator[Piece]:
    """Yield what lies in the elements `start` to `start + length` of a bucket; what lies behind the last is padding."""
    offset = 0
    for name, shape in parameters:
        size = math.prod(shape)
        first, last = max(offset, start), min(offset + size, start + length)
        if first < last:
            rows = shape[0] if len(shape) > 1 else 1
            yield Piece(
                name=name, begin=first - start, length=last - first, first=first - offset, rows=rows,
                columns=size // rows,
            )  # fmt: skip
        offset += size


class Lay:
    """Which slices of a shard travel compressed, which as they are, and which are padding and do not travel.

    Args:
        coded: (begin, length) of the slices to compress, in order.
        exact: those of the slices to send as they are, in order.
        block: compressed slices are laid out one after another, each from the start of a block of so many elements.
    """

    def __init__(
        self, length: int, *, coded: Sequence[tuple[int, int]], exact: Sequence[tuple[int, int]], block: int = 1
    ) -> None:
        self.length = length
        self._sizes: list[int] = []
        self._coded: list[int] = []
        self._exact: list[int] = []
        at = 0
        for begin, size, slices in sorted([(*c, self._coded) for c in coded] + [(*e, self._exact) for e in exact]):
            self._sizes.append(begin - at)  # Padding, or nothing.
            slices.append(len(self._sizes))
            self._sizes.append(size)
            at = begin + size
        self._sizes.append(length - at)
        self._blocked: list[int] = []
        for _, size in coded:
            self._blocked += [size, -size % block]
        self.blocks = sum(self._blocked) // block
        self.block = block
        self.exact = sum(size for _, size in exact)
        filled = [min(block, size - first) for _, size in coded for first in range(0, size, block)]
        self.filled = torch.tensor(filled, dtype=torch.float32)
        """Elements in each block that are not padding; (blocks,)."""

    def take(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return the compressed slices as (blocks, block) float32, zeros behind each, and the others as a vector."""
        if shard.numel() != self.length:
            raise ModelError(
                f"a bucket part of {shard.numel()} numbers came where {self.length} were announced",
                hint="announce a bucket anew with `prepare` when what travels in it changes.",
            )
        parts = shard.split(self._sizes)
        blocks = torch.zeros(self.blocks * self.block, dtype=torch.float32, device=shard.device)
        if self._coded:
            into = list(blocks.split(self._blocked)[::2])
            torch._foreach_copy_(into, [parts[i] for i in self._coded])
        exact = torch.cat([parts[i] for i in self._exact]) if self._exact else shard.new_empty(0)
        return blocks.view(self.blocks, self.block), exact

    def put(self, shard: Tensor, blocks: Tensor, exact: Tensor) -> None:
        """Write back what `take` took."""
        parts = shard.split(self._sizes)
        if self._coded:
            torch._foreach_copy_([parts[i] for i in self._coded], list(blocks.reshape(-1).split(self._blocked)[::2]))
        if self._exact:
            torch._foreach_copy_(
                [parts[i] for i in self._exact], list(exact.split([self._sizes[i] for i in self._exact]))
            )
