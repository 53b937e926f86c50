"""What takes an MLP's place where each token visits a few of many: a router, experts, and how tokens find them.

Dims: B batch, T tokens, D width, E experts, F inner size of one, K experts that a token visits, M visits (B × T × K).
Every visit takes place, however many tokens want one expert: none is dropped, so a token's output does not depend on
the tokens beside it.

Sources: Shazeer et al., "Outrageously Large Neural Networks", arXiv:1701.06538; softmax over the chosen scores as in
Jiang et al., "Mixtral of Experts", arXiv:2401.04088, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from supernode.schema.model import DecoderShape


class Mixture(nn.Module):
    """Experts behind a router; (B, T, D) to (B, T, D)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.visits = shape.experts_per_token
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.experts(x_BTD, *self.route(x_BTD))

    def route(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's weights (float32) and numbers of the experts that it visits; (B, T, K) each."""
        scores_BTE = F.linear(x_BTD.float(), self.router.weight.float())
        chosen_BTK, expert_BTK = scores_BTE.topk(self.visits, dim=-1)
        return chosen_BTK.softmax(dim=-1), expert_BTK


class Experts(nn.Module):
    """Gated MLPs side by side: each matrix is one parameter over all experts."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.count = shape.experts
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.inner, shape.width))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.inner, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.inner))

    def forward(self, x_BTD: Tensor, weight_BTK: Tensor, expert_BTK: Tensor) -> Tensor:
        """Return each token's weighted sum of what its experts make of it."""
        expert_M = expert_BTK.flatten()
        order_M = expert_M.argsort(stable=True)
        # Only permutations are gathered, whose backwards add nothing up and so know no order of their own.
        visit_MD = x_BTD.unsqueeze(-2).expand(*expert_BTK.shape, -1).reshape(len(expert_M), -1)
        made_MD = self.visit(visit_MD[order_M], expert_M.bincount(minlength=self.count))
        made_BTKD = made_MD[order_M.argsort()].view(*expert_BTK.shape, -1)
        return (made_BTKD * weight_BTK.unsqueeze(-1)).sum(dim=-2).to(x_BTD.dtype)

    def visit(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Return what experts make of visits that are sorted by expert, so many to each; (M, D)."""
        return run_experts(x_MD, counts_E.tolist(), self.gate, self.up, self.down)


def run_experts(x_MD: Tensor, counts: Sequence[int], gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """Return down(silu(gate x) · up x) by the expert of each visit; (M, D)."""
    made = [
        F.linear(F.silu(F.linear(x, gate_FD)) * F.linear(x, up_FD), down_DF)
        for x, gate_FD, up_FD, down_DF in zip(
            x_MD.split(list(counts)), gate_EFD.unbind(), up_EFD.unbind(), down_EDF.unbind(), strict=True
        )
    ]
    return torch.cat(made)
