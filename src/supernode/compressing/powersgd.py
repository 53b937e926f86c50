"""How do ranks sum gradients as products of two thin matrices? PowerSGD: one power iteration a step, kept warm."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.compressing.compressor import Compressor, Entry
from supernode.compressing.lay import Lay, Named, Piece, pieces

WORTH = 2
"""How many times fewer numbers the two factors must have than the matrix."""


@dataclass(slots=True, kw_only=True)
class LowRankEntry(Entry):
    """A bucket's part as matrices.

    Attributes:
        shapes: (rows, columns) of each matrix, in the order in which `lay` takes them.
    """

    lay: Lay
    shapes: list[tuple[int, int]]


class PowerSgd(Compressor[LowRankEntry]):
    """Sends P (rows, rank) and Q (columns, rank) of every matrix M with feedback: sums of M·Q, then of Mᵀ·P.

    Of a matrix cut by the end of a shard, the whole rows are a matrix; the cut row travels as it is, and so do vectors
    and what the factors would not make at least `WORTH` times smaller.

    Args:
        rank: columns of the factors; never more than a matrix has rows or columns.
        seed: the first Q follows from it and the parameter's name, alike on all ranks.

    Source: Vogels et al., "PowerSGD", arXiv:1905.13727. What a rank keeps is what its own factors left out, M − P·Qᵀ
    with its own Q: their sum over ranks is that of the paper, and a rank's own does not drift by how it differs from
    the others.
    """

    def __init__(self, rank: int, *, seed: int = 0, warmup: int = 0) -> None:
        super().__init__(warmup=warmup)
        self.rank, self.seed = rank, seed

    def describe(self) -> str:
        return f"powersgd {self.rank}"

    def _entry(
        self, parameters: Named, group: dist.ProcessGroup, *, start: int, length: int, device: str
    ) -> LowRankEntry:
        coded: list[tuple[int, int]] = []
        exact: list[tuple[int, int]] = []
        shapes: list[tuple[int, int]] = []
        kept: dict[str, Tensor] = {}
        for piece in pieces(parameters, start=start, length=length):
            begin, rows = _whole_rows(piece)
            if rows and WORTH * self.rank * (rows + piece.columns) <= rows * piece.columns:
                end = begin + rows * piece.columns
                coded.append((begin, end - begin))
                exact += [(piece.begin, begin - piece.begin), (end, piece.begin + piece.length - end)]
                kept[f"basis.{len(shapes)}"] = self._first_basis(piece.name, piece.columns).to(device)
                shapes.append((rows, piece.columns))
            else:
                exact.append((piece.begin, piece.length))
        lay = Lay(length, coded=coded, exact=[part for part in exact if part[1]])
        return LowRankEntry(kept={"feedback": torch.zeros(lay.blocks, device=device)} | kept, lay=lay, shapes=shapes)

    def _first_basis(self, name: str, columns: int) -> Tensor:
        text = f"powersgd/{self.seed}/{name}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        return torch.randn(columns, self.rank, generator=torch.Generator().manual_seed(seed))

    def _sum(self, entry: LowRankEntry, shard: Tensor, group: dist.ProcessGroup) -> None:
        blocks, exact = entry.lay.take(shard)
        flat = blocks.view(-1).add_(entry.kept["feedback"])
        sizes = [rows * columns for rows, columns in entry.shapes]
        matrices = [part.view(shape) for part, shape in zip(flat.split(sizes), entry.shapes, strict=True)]
        bases = [entry.kept[f"basis.{number}"] for number in range(len(matrices))]
        # What travels as it is goes along with the first factors.
        lefts, exact = _all_reduce([m @ q for m, q in zip(matrices, bases, strict=True)], exact, group)
        # Computers of different make round differently, and copies whose bases differ would drift apart.
        lefts = _as_the_first_has_them([torch.linalg.qr(p).Q for p in lefts], group)
        own = [m.T @ p for m, p in zip(matrices, lefts, strict=True)]
        rights, _ = _all_reduce(own, exact[:0], group)
        totals = [p @ q.T for p, q in zip(lefts, rights, strict=True)]
        total = torch.cat([matrix.reshape(-1) for matrix in totals]) if totals else flat
        if totals and bool(total.isfinite().all()):
            for matrix, p, q in zip(matrices, lefts, own, strict=True):
                matrix.addmm_(p, q.T, alpha=-1)
            entry.kept["feedback"].copy_(flat)
            for basis, q in zip(bases, rights, strict=True):
                # Its length does not matter to the next step, except that squares of small gradients would vanish.
                basis.copy_(q / q.norm().clamp_min(torch.finfo(torch.float32).tiny))
        entry.lay.put(shard, total, exact)


def _whole_rows(piece: Piece) -> tuple[int, int]:
    """Return where the first whole row of a piece begins in the shard, and how many there are."""
    if piece.rows == 1:
        return piece.begin, 0
    skipped = -piece.first % piece.columns
    return piece.begin + skipped, max(0, piece.length - skipped) // piece.columns


def _as_the_first_has_them(factors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the factors of the group's first rank."""
    if not factors:
        return factors
    flat = torch.cat([factor.reshape(-1) for factor in factors])
    dist.broadcast(flat, group_src=0, group=group)
    parts = flat.split([factor.numel() for factor in factors])
    return [part.view(factor.shape) for part, factor in zip(parts, factors, strict=True)]


def _all_reduce(factors: list[Tensor], exact: Tensor, group: dist.ProcessGroup) -> tuple[list[Tensor], Tensor]:
    """Return the sums of all of these over the group, made in one exchange."""
    flat = torch.cat([factor.reshape(-1) for factor in factors] + [exact.float()])
    if flat.numel():
        dist.all_reduce(flat, group=group)
    *parts, rest = flat.split([factor.numel() for factor in factors] + [exact.numel()])
    return [part.view(factor.shape) for part, factor in zip(parts, factors, strict=True)], rest.to(exact.dtype)
