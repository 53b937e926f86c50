"""What do tensor ranks send when each holds a part of the tokens between split matrices?

Dims: B batch, T tokens, t tokens of one rank (T over the ranks), D width, O outputs of this rank. Where a tensor axis
sums outputs over ranks that then all hold the same stream, this one scatters the sum over the tokens, and gathers them
again before the next split matrices: as many bytes on the way, and of norms, sums and dropout a rank keeps its part.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from supernode.axes.tensor import local


def scatter_sum(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of the sum over all ranks; (B, t, D). T is a multiple of the ranks."""
    part: Tensor = _Scatter.apply(x_BTD, group)
    return part


def gather_tokens(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all ranks, in order; (B, T, D). Each rank's own use of them adds to the gradient.

    `split_linear` keeps its part of them for the backward, and gathers anew.
    """
    whole_BTD: Tensor = _Gather.apply(x_BtD, group)
    vars(whole_BTD)["gathered"] = (x_BtD.detach(), _Again(group))
    return whole_BTD


def split_linear(x_BTD: Tensor, weight_OD: Tensor) -> Tensor:
    """Return x wᵀ; (B, T, O). Of what `gather_tokens` returned, this rank's own part alone is kept for the backward."""
    part_BtD, again = getattr(x_BTD, "gathered", (None, None))
    if part_BtD is None or not torch.is_grad_enabled():
        return F.linear(x_BTD, weight_OD)
    given: Tensor = _GatheredLinear.apply(x_BTD, weight_OD, part_BtD, again)
    return given


class _Again:
    """Gathers the tokens once more for the backwards of all products that used them.

    It keeps no part: autograd does, or throws it away to compute it anew.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.uses = 0
        self._left = 0
        self._whole: Tensor | None = None

    def __call__(self, part_BtD: Tensor) -> Tensor:
        """Return all tokens; the last of as many calls as there were uses forgets them."""
        if self._whole is None:
            self._whole, self._left = _gather(part_BtD, self.group), self.uses
        whole_BTD = self._whole
        self._left -= 1
        if self._left <= 0:
            self._whole = None
        return whole_BTD


class TokenSync:
    """Sums the gradients of what all tensor ranks hold and each used on its own tokens alone, such as norms."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self.group = [p for p in parameters if p.requires_grad and not is_split(p)], group

    def __call__(self) -> list[nn.Parameter]:
        """Sum them; returns the parameters."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if not grads:
            return []
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=self.group)
        for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))
        return self.parameters


def is_split(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter is cut over the tensor axis."""
    return isinstance(parameter, DTensor) and "tensor" in (parameter.device_mesh.mesh_dim_names or ())


def _gather(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts_NBtD = x_BtD.new_empty(dist.get_world_size(group), *x_BtD.shape)
    dist.all_gather_single(parts_NBtD, x_BtD.contiguous().unsqueeze(0), group=group)
    return parts_NBtD.transpose(0, 1).flatten(1, 2)


def _scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts_NBtD = x_BTD.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    mine_BtD = torch.empty_like(parts_NBtD[0])
    dist.reduce_scatter_single(mine_BtD, parts_NBtD.flatten(0, 1), group=group)
    return mine_BtD


class _Gather(torch.autograd.Function):
    """All tokens forward; backward the sum of all ranks' gradients, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x_BtD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    """This rank's tokens of the sum forward; backward the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None


class _GatheredLinear(torch.autograd.Function):
    """A product of gathered tokens that keeps this rank's part of them only."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_OD: Tensor, part_BtD: Tensor, again: _Again) -> Tensor:
        ctx.save_for_backward(weight_OD, part_BtD)
        ctx.again = again
        again.uses += 1
        return F.linear(x_BTD, weight_OD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight_OD, part_BtD = ctx.saved_tensors
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        dx_BTD = grads[0] @ weight_OD if wants_x else None
        if not wants_weight:
            return dx_BTD, None, None, None
        whole_BTD = ctx.again(part_BtD)
        return dx_BTD, grads[0].flatten(0, -2).T @ whole_BTD.flatten(0, -2), None, None
