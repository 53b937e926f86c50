"""How do ranks sum what a codec has encoded? Each sends its own once, or, among three and more, in two phases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.compressing.codecs import Codec
from supernode.compressing.compressor import Compressor, Entry
from supernode.compressing.lay import Lay, Named, pieces


@dataclass(slots=True, kw_only=True)
class CodedEntry(Entry):
    """A bucket's part in blocks.

    Attributes:
        share: blocks that one rank sums, where there are two phases.
    """

    lay: Lay
    share: int


class Coded(Compressor[CodedEntry]):
    """Encodes each block of a matrix with what earlier steps left of it; vectors travel as they are.

    Two ranks exchange their rows. More sum in two phases, so that what a rank sends does not grow with their number:
    each sums its share of the blocks, encodes the sums with a feedback of its own, and all gather them.
    Blocks start where a parameter does, so what is sent of it does not depend on the bucket that it travels in.

    Args:
        name: of the codec; part of the state's signature.

    Source of the two phases: Tang et al., "DoubleSqueeze", arXiv:1905.05957; for the largest numbers, with shares
    instead of a whole gather, Li and Hoefler, "Near-Optimal Sparse Allreduce", arXiv:2201.07598.
    """

    def __init__(self, name: str, codec: Codec, *, warmup: int = 0) -> None:
        super().__init__(warmup=warmup)
        self.name, self.codec = name, codec

    def describe(self) -> str:
        return f"{self.name} {self.codec.block} {self.codec.width}"

    def _entry(
        self, parameters: Named, group: dist.ProcessGroup, *, start: int, length: int, device: str
    ) -> CodedEntry:
        block = self.codec.block
        coded: list[tuple[int, int]] = []
        exact: list[tuple[int, int]] = []
        for piece in pieces(parameters, start=start, length=length):
            # Less than a block would be padded to one.
            worth = piece.rows > 1 and piece.length >= block
            (coded if worth else exact).append((piece.begin, piece.length))
        lay = Lay(length, coded=coded, exact=exact, block=block)
        ranks = dist.get_world_size(group)
        share = -(-lay.blocks // ranks)
        kept = {"feedback": torch.zeros(lay.blocks, block, device=device)}
        if ranks > 2:
            kept["feedback_of_sums"] = torch.zeros(share, block, device=device)
        return CodedEntry(kept=kept, lay=lay, share=share)

    def _sum(self, entry: CodedEntry, shard: Tensor, group: dist.ProcessGroup) -> None:
        blocks, exact = entry.lay.take(shard)
        if exact.numel():
            dist.all_reduce(exact, group=group)
        if entry.lay.blocks:
            blocks = self._meet(entry, blocks.add_(entry.kept["feedback"]), group)
        entry.lay.put(shard, blocks, exact)

    def _meet(self, entry: CodedEntry, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ranks = dist.get_world_size(group)
        filled = entry.lay.filled.to(blocks.device)
        rows = self.codec.encode(blocks, filled)
        left = {"feedback": _clear(blocks.sub_(self.codec.decode(rows)), filled)}
        if ranks <= 2:
            everyone = rows.new_empty(ranks * len(rows), self.codec.width)
            dist.all_gather_single(everyone, rows, group=group)
            total = self._add(everyone, ranks)
        else:
            first = dist.get_rank(group) * entry.share
            filled = torch.nn.functional.pad(filled, (0, ranks * entry.share - len(filled)))
            filled = filled[first : first + entry.share]
            mine = _clear(self._scatter(rows, entry.share, group), filled)
            mine.add_(entry.kept["feedback_of_sums"])
            summed = self.codec.encode(mine, filled)
            left["feedback_of_sums"] = _clear(mine.sub_(self.codec.decode(summed)), filled)
            everyone = summed.new_empty(ranks * entry.share, self.codec.width)
            dist.all_gather_single(everyone, summed, group=group)
            total = self.codec.decode(everyone[: entry.lay.blocks])
        if bool(total.isfinite().all()):
            for name, tensor in left.items():
                entry.kept[name].copy_(tensor)
        return total

    def _scatter(self, rows: Tensor, share: int, group: dist.ProcessGroup) -> Tensor:
        """Return the sums of this rank's share of the blocks; (share, block)."""
        ranks = dist.get_world_size(group)
        sent = torch.zeros(ranks * share, self.codec.width, dtype=torch.uint8, device=rows.device)
        sent[: len(rows)] = rows
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return self._add(got, ranks)

    def _add(self, rows: Tensor, ranks: int) -> Tensor:
        """Return the sum of what the ranks encoded, in their order, so that it is the same bits everywhere."""
        first, *others = (self.codec.decode(part) for part in rows.chunk(ranks))
        for other in others:
            first.add_(other)
        return first


def _clear(blocks: Tensor, filled: Tensor) -> Tensor:
    """Return the blocks with zeros in what is padding: a codec without a zero has put something there."""
    partial = (filled < blocks.shape[1]).nonzero().squeeze(1)
    if partial.numel():
        beyond = torch.arange(blocks.shape[1], device=blocks.device) >= filled[partial].unsqueeze(1)
        blocks[partial] = blocks[partial].masked_fill(beyond, 0)
    return blocks
