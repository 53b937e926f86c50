"""Which part of a tensor does a rank hold, and how do part and whole turn into each other?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """A dim that is split over the tensor ranks.

    Attributes:
        dim: the dim, from 0.
        segments: logical sizes that add up to the dim's. Each is cut into contiguous parts as `torch.chunk` would cut
            it, and a rank holds its part of each, one after the other. A fused projection of queries, keys and values
            has three; most dims have one.
    """

    dim: int
    segments: tuple[int, ...]

    @property
    def size(self) -> int:
        """Logical size of the dim."""
        return sum(self.segments)

    @property
    def is_plain(self) -> bool:
        """Whether a rank's part is contiguous, as DTensor's `Shard` means it."""
        return len(self.segments) == 1

    def moved(self, dim: int) -> Split:
        """Return the same split of another dim."""
        return Split(dim, self.segments)

    def refusal(self, parts: int) -> str:
        """Say why the dim cannot be cut into `parts`; empty where it can: each rank gets something of each segment."""
        for segment in self.segments:
            if (parts - 1) * -(-segment // parts) >= segment:
                return f"{segment} cannot be cut into {parts} parts"
        return ""

    def pieces(self, *, parts: int, rank: int) -> Iterator[tuple[int, int]]:
        """Yield where each of a rank's pieces begins in the logical dim, and its size, in the order it holds them."""
        before = 0
        for segment in self.segments:
            room = -(-segment // parts)
            first, stop = min(segment, rank * room), min(segment, (rank + 1) * room)
            yield before + first, stop - first
            before += segment

    def held(self, *, parts: int, rank: int) -> int:
        """Return the size of the dim that a rank holds."""
        return sum(size for _, size in self.pieces(parts=parts, rank=rank))


def part_of(whole: Tensor, dim: int, segments: tuple[int, ...], parts: int, rank: int) -> Tensor:
    """Return a rank's part of a whole tensor, as a view where it is contiguous."""
    pieces = [whole.narrow(dim, *piece) for piece in Split(dim, tuple(segments)).pieces(parts=parts, rank=rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def join(parts: list[Tensor], split: Split) -> Tensor:
    """Return the whole tensor of all ranks' parts, in the order of ranks."""
    whole = parts[0].new_empty([*parts[0].shape[: split.dim], split.size, *parts[0].shape[split.dim + 1 :]])
    for rank, part in enumerate(parts):
        held = 0
        for first, size in split.pieces(parts=len(parts), rank=rank):
            whole.narrow(split.dim, first, size).copy_(part.narrow(split.dim, held, size))
            held += size
    return whole


def to_local(whole: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a whole tensor that every rank has, in memory of its own; nothing is sent."""
    parts, rank = dist.get_world_size(group), dist.get_rank(group)
    return part_of(whole.detach(), split.dim, split.segments, parts, rank).clone(memory_format=torch.contiguous_format)


def to_full(part: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
    """Return the whole tensor on every rank of the group; all of its ranks must call this together."""
    parts = dist.get_world_size(group)
    room = max(split.held(parts=parts, rank=rank) for rank in range(parts))
    sent = part.new_zeros([*part.shape[: split.dim], room, *part.shape[split.dim + 1 :]])
    sent.narrow(split.dim, 0, part.shape[split.dim]).copy_(part.detach())
    received = [torch.empty_like(sent) for _ in range(parts)]
    dist.all_gather(received, sent, group=group)
    return join(
        [given.narrow(split.dim, 0, split.held(parts=parts, rank=rank)) for rank, given in enumerate(received)], split
    )
