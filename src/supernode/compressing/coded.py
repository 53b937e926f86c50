"""How do ranks sum what a codec has encoded? Each sends its own once, or, among three and more, in two phases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.compressing.codecs import Codec
from supernode.compressing.compressor import Compressor, Entry
from supernode.compressing.lay import Lay, Named, pieces

MEMORY = 0.95
"""Of the mean squares, from step to step."""
FLOOR = 0.05
"""Of a slice's usual magnitude, that every number is taken to have at least."""


@dataclass(slots=True, kw_only=True)
class CodedEntry(Entry):
    """A bucket's part in blocks.

    Attributes:
        share: blocks that one rank sums, where there are two phases.
        owner: (blocks,) which slice each block is of.
    """

    lay: Lay
    share: int
    owner: Tensor


class Coded(Compressor[CodedEntry]):
    """Encodes each block of a matrix with what earlier steps left of it; vectors travel as they are.

    Two ranks exchange their rows. More sum in two phases, so that what a rank sends does not grow with their number:
    each sums its share of the blocks, encodes the sums with a feedback of its own, and all gather them.
    Blocks start where a parameter does, so what is sent of it does not depend on the bucket that it travels in.

    Args:
        name: of the codec; part of the state's signature.
        evens: numbers are encoded over the root of their mean square so far, which all ranks know from the sums. A
            codec of few levels then rounds alike what an optimizer such as Adam weighs alike; else it would starve
            what is small beside its neighbours, and the spikes in which that arrives would lower its rate.

    Ranks decode and add for themselves, so their sums are alike to the bit where their processors round these few
    operations alike, as IEEE 754 has them do. With `evens` the mean magnitudes are sums over many numbers, in an order
    that libraries choose by processor: hosts should then be of one make, or copies may drift by roundings.

    Source of the two phases: Tang et al., "DoubleSqueeze", arXiv:1905.05957; for the largest numbers, with shares
    instead of a whole gather, Li and Hoefler, "Near-Optimal Sparse Allreduce", arXiv:2201.07598.
    """

    def __init__(self, name: str, codec: Codec, *, evens: bool = False, warmup: int = 0) -> None:
        super().__init__(warmup=warmup)
        self.name, self.codec, self.evens = name, codec, evens

    def describe(self) -> str:
        return f"{self.name} {self.codec.block} {self.codec.width}" + " evened" * self.evens

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
        if self.evens:
            kept["squares"] = torch.zeros(lay.blocks, block, device=device)
            kept["weight_of_squares"] = torch.zeros((), device=device)
        owner = [slice_ for slice_, (_, size) in enumerate(coded) for _ in range(-(-size // block))]
        return CodedEntry(kept=kept, lay=lay, share=share, owner=torch.tensor(owner, dtype=torch.int64, device=device))

    def _warm(self, entry: CodedEntry, shard: Tensor) -> None:
        if self.evens and entry.lay.blocks:
            blocks, _ = entry.lay.take(shard)
            if bool(blocks.isfinite().all()):
                _note(entry, blocks)

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
        usual = _usual(entry, filled) if self.evens else torch.ones((), device=blocks.device)
        rows = self.codec.encode(blocks / usual, filled)
        left = {"feedback": _clear(blocks.sub_(self.codec.decode(rows).mul_(usual)), filled)}
        if ranks <= 2:
            everyone = rows.new_empty(ranks * len(rows), self.codec.width)
            dist.all_gather_single(everyone, rows, group=group)
            total = self._add(everyone, ranks).mul_(usual)
        else:
            first = dist.get_rank(group) * entry.share
            beyond = ranks * entry.share - len(filled)
            filled = torch.nn.functional.pad(filled, (0, beyond))[first : first + entry.share]
            here = usual
            if self.evens and usual.ndim:
                here = torch.nn.functional.pad(usual, (0, 0, 0, beyond), value=1.0)[first : first + entry.share]
            mine = _clear(self._scatter(rows, entry.share, group).mul_(here), filled)
            mine.add_(entry.kept["feedback_of_sums"])
            summed = self.codec.encode(mine / here, filled)
            left["feedback_of_sums"] = _clear(mine.sub_(self.codec.decode(summed).mul_(here)), filled)
            everyone = summed.new_empty(ranks * entry.share, self.codec.width)
            dist.all_gather_single(everyone, summed, group=group)
            total = self.codec.decode(everyone[: entry.lay.blocks]).mul_(usual)
        if bool(total.isfinite().all()):
            for name, tensor in left.items():
                entry.kept[name].copy_(tensor)
            if self.evens:
                _note(entry, total)
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


def _note(entry: CodedEntry, total: Tensor) -> None:
    """Take a sum into the mean squares."""
    entry.kept["squares"].mul_(MEMORY).addcmul_(total, total, value=1 - MEMORY)
    entry.kept["weight_of_squares"].mul_(MEMORY).add_(1 - MEMORY)


def _usual(entry: CodedEntry, filled: Tensor) -> Tensor:
    """Return what a number usually is, or 1 where nothing is known; (blocks, block).

    A part of the slice's mean is added, so that what was always near zero does not weigh as much as anything else.
    """
    weight, squares = entry.kept["weight_of_squares"], entry.kept["squares"]
    if not bool(weight):
        return torch.ones((), device=squares.device)
    usual = (squares / weight).sqrt_()
    slices = int(entry.owner[-1]) + 1
    sums = torch.zeros(slices, device=usual.device).index_add_(0, entry.owner, usual.sum(dim=1))
    sizes = torch.zeros(slices, device=usual.device).index_add_(0, entry.owner, filled)
    means = (sums / sizes)[entry.owner].unsqueeze(1)
    return usual.add_(torch.where(means > 0, FLOOR * means, 1))


def _clear(blocks: Tensor, filled: Tensor) -> Tensor:
    """Return the blocks with zeros in what is padding: a codec without a zero has put something there."""
    partial = (filled < blocks.shape[1]).nonzero().squeeze(1)
    if partial.numel():
        beyond = torch.arange(blocks.shape[1], device=blocks.device) >= filled[partial].unsqueeze(1)
        blocks[partial] = blocks[partial].masked_fill(beyond, 0)
    return blocks
