"""What does the tensor axis send inside a step: sums, spreads, gathers, and a loss over a split vocabulary?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

IGNORED = -100
"""Target of a position that does not count."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_size(size: int, *, parts: int) -> int:
    """Return the size of every part but the last ones, the dim being cut as `torch.chunk` would cut it."""
    return -(-size // parts)


def first_of(size: int, group: dist.ProcessGroup) -> int:
    """Return where this rank's part of a dim begins, the dim being cut as `torch.chunk` would cut it."""
    return min(size, dist.get_rank(group) * part_size(size, parts=dist.get_world_size(group)))


# The four below are operations of a rewritten graph, which names its group; a graph holds no live object.


def spread(x: Tensor, group: str) -> Tensor:
    """Return the same tensor for each rank's own use; its gradient is the sum of all ranks' gradients."""
    given: Tensor = Spread.apply(x, _named(group))
    return given


def total(x: Tensor, group: str) -> Tensor:
    """Return the sum of all ranks' tensors; every rank's gradient is that of the sum."""
    summed: Tensor = Sum.apply(x, _named(group))
    return summed


def gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """Return the whole of a tensor whose dim of logical `size` is cut as `torch.chunk` would cut it."""
    whole: Tensor = Gather.apply(x, dim, size, _named(group))
    return whole


def look_up(weight_VD: Tensor, index: Tensor, padding: int, first: int, group: str) -> Tensor:
    """Return the rows of an embedding whose vocabulary is split: each rank its own, then all are summed.

    Args:
        index: token numbers in the whole vocabulary, of any shape.
        padding: token whose row takes no gradient; -1 for none.
        first: the token of this rank's first row.
    """
    return total(own_rows(weight_VD, index, padding, first), group)


def own_rows(weight_VD: Tensor, index: Tensor, padding: int, first: int) -> Tensor:
    """Return the rows of the tokens that this rank holds, and zeros for the others'; arguments as of `look_up`."""
    here = (index >= first) & (index < first + weight_VD.shape[0])
    inside = padding - first if first <= padding < first + weight_VD.shape[0] else None
    if not weight_VD.shape[0]:
        return weight_VD.new_zeros(*index.shape, weight_VD.shape[1])
    return F.embedding(torch.where(here, index - first, 0), weight_VD, inside) * here.unsqueeze(-1)


def draw_apart(operation: Callable[..., Any], rank: int, *given: Any, **named: Any) -> Any:
    """Run an operation that draws random numbers for a part that other ranks do not have.

    Ranks draw different numbers, and leave their generators alike, as whatever they compute alike must find them.
    """
    first = next(value for value in given if isinstance(value, Tensor))
    if isinstance(first, FakeTensor) or first.is_meta:
        return operation(*given, **named)
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([first.device] if first.device.type != "cpu" else [], device_type=first.device.type):
        torch.manual_seed(seed + rank)
        return operation(*given, **named)


def _named(group: str) -> dist.ProcessGroup:
    found: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]
    return found


class Spread(torch.autograd.Function):
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


class Sum(torch.autograd.Function):
    """The sum of all ranks' outputs forward, every rank's own gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = x.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Gather(torch.autograd.Function):
    """All ranks' parts of a dim side by side forward, this rank's part of the gradient backward.

    What follows is computed by every rank alike, so each has the whole gradient already.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.held, ctx.first = dim, x.shape[dim], first_of(size, group)
        ranks = dist.get_world_size(group)
        # Parts may differ by their sizes, which not every backend gathers: all are sent in the largest one's.
        room = part_size(size, parts=ranks)
        moved = x.movedim(dim, 0)
        sent = moved.new_zeros(room, *moved.shape[1:])
        sent[: moved.shape[0]] = moved
        parts = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(parts, sent, group=group)
        return torch.cat(parts)[:size].movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].narrow(ctx.dim, ctx.first, ctx.held).contiguous(), None, None, None


class SplitLoss(torch.autograd.Function):
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
