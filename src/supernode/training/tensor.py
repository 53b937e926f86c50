"""How one block is split over the tensor axis: columns then rows, and the loss over a split vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

IGNORED = -100
"""Target of a position that does not count."""


def split_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Split a decoder block: heads and the MLP's inner size over the axis, one all-reduce after each half.

    Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053.
    """
    roles: dict[str, ParallelStyle] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    # Every rank initialises the whole block alike, so each cuts its own part and nothing is sent.
    parallelize_module(block, mesh, roles, src_data_rank=None)


def split_embedding(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Split the vocabulary of an embedding over the axis."""
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(embedding, mesh, style, src_data_rank=None)


def split_head(head: nn.Module, mesh: DeviceMesh) -> None:
    """Split the vocabulary of the head over the axis; the logits stay split for `split_cross_entropy`."""
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Shard(-1)), src_data_rank=None)


class _SplitCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies with the vocabulary split over a group; sends three numbers a position."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        highest_N = logits_NV.amax(dim=-1) if logits_NV.shape[1] else logits_NV.new_full((len(target_N),), -torch.inf)
        dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=group)
        exponents_NV = (logits_NV - highest_N.unsqueeze(-1)).exp()
        here_N = (target_N >= first) & (target_N < first + logits_NV.shape[1])
        local_N = torch.where(here_N, target_N - first, 0)
        chosen_N = torch.zeros_like(highest_N)
        if logits_NV.shape[1]:
            chosen_N = torch.where(here_N, logits_NV.gather(-1, local_N.unsqueeze(-1)).squeeze(-1), chosen_N)
        sums_2N = torch.stack((exponents_NV.sum(dim=-1), chosen_N))
        dist.all_reduce(sums_2N, group=group)
        counts_N = target_N != IGNORED
        ctx.save_for_backward(exponents_NV.div_(sums_2N[0].unsqueeze(-1)), here_N, local_N, counts_N)
        return ((sums_2N[0].log() + highest_N - sums_2N[1]) * counts_N).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0]
        gradient_NV, here_N, local_N, counts_N = ctx.saved_tensors
        if gradient_NV.shape[1]:
            gradient_NV.scatter_add_(-1, local_N.unsqueeze(-1), -here_N.to(gradient_NV.dtype).unsqueeze(-1))
        return gradient_NV * (counts_N.to(gradient_NV.dtype) * grad).unsqueeze(-1), None, None, None


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the *sum* of the cross-entropies in float32 over all positions that count.

    Args:
        output: logits (…, V); over images and the like (B, V).
        target: class numbers (…), `IGNORED` where a position does not count.
    """
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten(), ignore_index=IGNORED, reduction="sum")


class SplitCrossEntropy:
    """`cross_entropy` over logits whose vocabulary is split over a group as `torch.chunk` would split it."""

    def __init__(self, group: dist.ProcessGroup, vocabulary: int) -> None:
        self.group = group
        self.first = min(vocabulary, dist.get_rank(group) * -(-vocabulary // dist.get_world_size(group)))

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = _SplitCrossEntropy.apply(output.flatten(0, -2).float(), target.flatten(), self.first, self.group)
        return loss
