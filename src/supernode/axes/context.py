"""How do ranks that hold parts of one sequence attend to all of it? Keys and values go round a ring, block by block.

Dims: B batch, H query heads, G key heads, T tokens of one rank, K head width. Rank r of c holds the chunks r and
2c - 1 - r of the 2c that a sequence is cut into. A causal mask then leaves every rank the same work in each turn of
the ring: all that it has in the first, half the queries or half the keys in each later one. No rank ever holds more
than its own part of the sequence and two other ranks' keys and values.

Sources: Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889; two chunks a rank as in Llama 3,
arXiv:2407.21783, section 3.3.2; the blocks' sums as in Milakov and Gimelshein, arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

_KEYS, _GRADIENTS = 0, 1  # tags: what travels


def places_of(sequence: int, *, rank: int, ranks: int) -> Tensor:
    """Return where in a sequence the tokens of one rank stand, ascending; (T,).

    Args:
        sequence: tokens of the whole sequence, a multiple of 2 × `ranks`; any number where there is one rank.
    """
    if ranks == 1:
        return torch.arange(sequence)
    chunk, rest = divmod(sequence, 2 * ranks)
    assert not rest, "planning lets no such sequence through"
    return torch.cat([torch.arange(n * chunk, (n + 1) * chunk) for n in (rank, 2 * ranks - 1 - rank)])


def attention_over(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return causal attention over a sequence whose tokens lie on the ranks of a group as `places_of` says."""

    def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        return ring_attention(q_BHTK, k_BGTK, v_BGTK, group)

    return attend


def ring_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what this rank's queries find in the whole sequence, causal; (B, H, T, K).

    All ranks of the group call it at the same time, and later its backward; tokens lie as `places_of` says. H is a
    multiple of G. Sums over blocks, and gradients on their way, are float32 or wider whatever the inputs are.
    """
    if dist.get_world_size(group) == 1:
        grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped)
    mixed: Tensor = _RingAttention.apply(q_BHTK, torch.stack((k_BGTK, v_BGTK)), group)
    return mixed


class _RingAttention(torch.autograd.Function):
    """Attention over a ring; its backward sends keys and values round again, and their gradients after them."""

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, kv_2BGTK: Tensor, group: dist.ProcessGroup) -> Tensor:
        ring = _Ring(group)
        sums: _Sums | None = None
        for turn, keys in ring.visitors(kv_2BGTK):
            rows, columns = ring.seen(turn, q_BHTK.shape[2])
            found, weight = _attend(q_BHTK[:, :, rows], keys[:, :, :, columns], is_causal=turn == 0)
            if sums is None:
                sums = _Sums(found, weight)
            else:
                sums.add(found, weight, rows)
        assert sums is not None
        mixed_BHTK = sums.mixed_BHTK.to(q_BHTK.dtype)
        ctx.save_for_backward(q_BHTK, kv_2BGTK, mixed_BHTK, sums.weight_BHT)
        ctx.group = group
        return mixed_BHTK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        q_BHTK, kv_2BGTK, mixed_BHTK, weight_BHT = ctx.saved_tensors
        ring, wide = _Ring(ctx.group), _wide(q_BHTK.dtype)
        dq_BHTK = torch.zeros_like(q_BHTK, dtype=wide)
        dkv_2BGTK = torch.zeros_like(kv_2BGTK, dtype=wide)
        following: _Passing | None = None
        for turn, keys in ring.visitors(kv_2BGTK):
            rows, columns = ring.seen(turn, q_BHTK.shape[2])
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grads[0][:, :, rows], q_BHTK[:, :, rows], *keys[:, :, :, columns],
                mixed_BHTK[:, :, rows], weight_BHT[:, :, rows], 0.0, turn == 0,
            )  # fmt: skip
            dq_BHTK[:, :, rows] += dq
            if following is not None:
                dkv_2BGTK = following.arrived()  # What those who saw these keys before owe them.
            dkv_2BGTK[0, :, :, columns] += dk
            dkv_2BGTK[1, :, :, columns] += dv
            following = ring.pass_on(dkv_2BGTK, _GRADIENTS)
        assert following is not None
        return dq_BHTK.to(q_BHTK.dtype), following.arrived().to(kv_2BGTK.dtype), None


def _attend(q_BHTK: Tensor, keys: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return one block's attention and, for each query, the logarithm of its sum of exponents."""
    mixed_BHTK, weight_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHTK, keys[0], keys[1], 0.0, is_causal
    )
    return mixed_BHTK, weight_BHT


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Sums:
    """The attention over the blocks seen so far, and each query's logarithm of its sum of exponents."""

    def __init__(self, mixed_BHTK: Tensor, weight_BHT: Tensor) -> None:
        self.mixed_BHTK, self.weight_BHT = mixed_BHTK.to(_wide(mixed_BHTK.dtype)), weight_BHT

    def add(self, found_BHTK: Tensor, weight_BHT: Tensor, rows: slice) -> None:
        """Add what some rows of queries found in another block."""
        mixed, weight = self.mixed_BHTK[:, :, rows], self.weight_BHT[:, :, rows]
        share = torch.sigmoid(weight_BHT - weight)
        mixed += share.unsqueeze(-1) * (found_BHTK - mixed)
        weight.copy_(torch.logaddexp(weight, weight_BHT))


class _Passing:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, outgoing: Tensor, incoming: Tensor, works: list[dist.Work | None]) -> None:
        self._outgoing, self._incoming, self._works = outgoing, incoming, works  # Both must live until all is sent.

    def arrived(self) -> Tensor:
        """Wait for both; returns what came."""
        for work in self._works:
            assert work is not None
            work.wait()
        return self._incoming


class _Ring:
    """The ranks of a group in a ring, seen from one of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def visitors(self, own: Tensor):  # type: ignore[no-untyped-def]
        """Yield (turn, tensor): this rank's own in turn 0, then those of the ranks before it, nearest first.

        The next one travels while the caller works on this one.
        """
        here = own
        for turn in range(self.ranks - 1):
            passing = self.pass_on(here, _KEYS)
            yield turn, here
            here = passing.arrived()
        yield self.ranks - 1, here

    def pass_on(self, outgoing: Tensor, tag: int) -> _Passing:
        """Send a contiguous tensor to the next rank and await one like it from the previous; does not wait."""
        incoming = torch.empty_like(outgoing)
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        works = [
            dist.irecv(incoming, group=self.group, tag=tag, group_src=before),
            dist.isend(outgoing, group=self.group, tag=tag, group_dst=after),
        ]
        return _Passing(outgoing, incoming, works)

    def seen(self, turn: int, tokens: int) -> tuple[slice, slice]:
        """Return which queries of this rank see which of a visitor's keys: all, or a half, never in part."""
        everything, half = slice(None), tokens // 2
        if turn == 0:
            return everything, everything
        if turn <= self.rank:  # The visitor is of a lower rank: its early chunk lies before both of ours.
            return everything, slice(half)
        return slice(half, None), everything  # Of a higher one: both its chunks lie before our late chunk.
