"""How do tokens travel to experts that lie on several ranks, and back?

Dims: D width, M visits of this rank's tokens, V visits that this rank's experts get, R ranks, e experts of one rank.
Rank r of R holds the experts r·e to (r + 1)·e. The counts of visits travel first, so that every visit finds room: none
is dropped.

Source: Lepikhin et al., "GShard", arXiv:2006.16668, section 3.1, without its capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Visit = Callable[[Tensor, Tensor], Tensor]
"""(visits sorted by expert, how many each expert gets) to what the experts make of them."""


def visit_over(group: dist.ProcessGroup, own: Callable[[Tensor, Sequence[int]], Tensor]) -> Visit:
    """Return what sends visits to the ranks of their experts, and brings back what these made of them.

    All ranks of the group call it at the same time, and later its backward.

    Args:
        own: what this rank's experts make of (visits sorted by expert, how many each gets).
    """
    ranks = dist.get_world_size(group)

    def visit(x_MD: Tensor, counts_E: Tensor) -> Tensor:
        sent_Re = counts_E.view(ranks, -1)
        come_Re = torch.empty_like(sent_Re)
        dist.all_to_all_single(come_Re, sent_Re.contiguous(), group=group)
        sent, come = sent_Re.sum(dim=1).tolist(), come_Re.sum(dim=1).tolist()
        arrived_VD = exchange(x_MD, sent, come, group)
        # They come sorted by rank, and by expert within a rank; experts want all of theirs together.
        expert_V = torch.arange(come_Re.shape[1], device=x_MD.device).repeat(ranks).repeat_interleave(come_Re.flatten())
        order_V = expert_V.argsort(stable=True)
        made_VD = own(arrived_VD[order_V], come_Re.sum(dim=0).tolist())
        return exchange(made_VD[order_V.argsort()], come, sent, group)

    return visit


def exchange(x_MD: Tensor, sent: Sequence[int], come: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that all ranks have for this one, by rank.

    Args:
        x_MD: rows for each rank, in the order of ranks.
        sent: rows for each rank.
        come: rows from each rank.
    """
    rows: Tensor = _Exchange.apply(x_MD, list(sent), list(come), group)
    return rows


class _Exchange(torch.autograd.Function):
    """Rows travel forward, their gradients the same ways back."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, sent: list[int], come: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.come, ctx.group = sent, come, group
        return _all_to_all(x_MD, sent, come, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.come, ctx.sent, ctx.group), None, None, None


def _all_to_all(x_MD: Tensor, sent: list[int], come: list[int], group: dist.ProcessGroup) -> Tensor:
    rows = x_MD.new_empty(sum(come), *x_MD.shape[1:])
    dist.all_to_all_single(rows, x_MD.contiguous(), output_split_sizes=come, input_split_sizes=sent, group=group)
    return rows
