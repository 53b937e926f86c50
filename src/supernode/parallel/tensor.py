"""How one block is split over the tensor axis: columns then rows, and the loss over a split vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

IGNORED = -100
"""Target of a position that does not count."""


def split_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Split a decoder block: heads and the MLP's inner size over the axis, one all-reduce after each half.

    Parameters become DTensors, so that checkpoints and sharding know their logical shapes; the arithmetic runs on the
    local parts, since DTensor's own dispatch costs about a millisecond an operation on small shards.

    Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053.
    """
    group = mesh.get_group()
    for half, columns, row in (("attention", ("query", "key", "value"), "out"), ("mlp", ("gate", "up"), "down")):
        module = block.get_submodule(half)
        module.register_forward_pre_hook(lambda _, given: (_Spread.apply(given[0], group), *given[1:]))
        for name in columns:
            _split_linear(module.get_submodule(name), mesh, dim=0)
        _split_linear(module.get_submodule(row), mesh, dim=1)
        module.get_submodule(row).register_forward_hook(lambda _, __, output: _Sum.apply(output, group))


def split_embedding(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Split the vocabulary of an embedding over the axis; each rank looks up its own tokens, then all are summed."""
    assert isinstance(embedding, nn.Embedding)
    group, first = mesh.get_group(), first_of(embedding.num_embeddings, mesh.get_group())
    _distribute(embedding, mesh, dim=0)

    def forward(tokens_BT: Tensor) -> Tensor:
        weight = local(embedding.weight)
        here_BT = (tokens_BT >= first) & (tokens_BT < first + weight.shape[0])
        if weight.shape[0]:
            rows_BTD = F.embedding(torch.where(here_BT, tokens_BT - first, 0), weight) * here_BT.unsqueeze(-1)
        else:
            rows_BTD = weight.new_zeros(*tokens_BT.shape, weight.shape[1])
        summed: Tensor = _Sum.apply(rows_BTD, group)
        return summed

    _run_instead(embedding, forward)


def split_head(head: nn.Module, mesh: DeviceMesh) -> None:
    """Split the vocabulary of the head over the axis; the logits stay split for `SplitCrossEntropy`."""
    group = mesh.get_group()
    head.register_forward_pre_hook(lambda _, given: (_Spread.apply(given[0], group),))
    _split_linear(head, mesh, dim=0)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_of(size: int, group: dist.ProcessGroup) -> int:
    """Return where this rank's part of a dim begins, the dim being cut as `torch.chunk` would cut it."""
    return min(size, dist.get_rank(group) * -(-size // dist.get_world_size(group)))


def _distribute(module: nn.Module, mesh: DeviceMesh, *, dim: int) -> None:
    weight = module.get_parameter("weight")
    # Every rank initialises the whole block alike, so each cuts its own part and nothing is sent.
    part = weight if isinstance(weight, DTensor) else distribute_tensor(weight, mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(part, requires_grad=weight.requires_grad))


def _split_linear(linear: nn.Module, mesh: DeviceMesh, *, dim: int) -> None:
    _distribute(linear, mesh, dim=dim)
    _run_instead(linear, lambda x: F.linear(x, local(linear.get_parameter("weight"))))


def _run_instead(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Give one module another forward; its hooks and its place in the model stay."""
    vars(module)["forward"] = forward


class _Spread(torch.autograd.Function):
    """The same input on every rank of a group: nothing to do forward, the gradients' sum backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Sum(torch.autograd.Function):
    """The sum of all ranks' outputs forward, every rank's own gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = x.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


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
        self.first = first_of(vocabulary, group)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = _SplitCrossEntropy.apply(output.flatten(0, -2).float(), target.flatten(), self.first, self.group)
        return loss
