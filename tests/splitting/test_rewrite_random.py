"""Modules put together at random, split over tensor ranks, have the gradients of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Law = Callable[..., dict[str, Any]]
WIDTHS = (6, 8, 12, 24)
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "softmax over positions": lambda x: x.softmax(-2),
    "centre": lambda x: x - x.mean(-2, keepdim=True),
    "turn": lambda x: x.transpose(1, 2),
    "gate": lambda x: torch.mul(*x.unflatten(-1, (2, -1)).unbind(-2)),
    "halves": lambda x: torch.sin(x[..., : x.shape[-1] // 2]) + x[..., x.shape[-1] // 2 :],
    "heads": lambda x: _attention(x, 2),
    "thirds": lambda x: _attention(torch.cat(x.chunk(3, -1), -1), 3),
    "twice": lambda x: torch.cat([x, torch.relu(x)], -1),
}


def _attention(x: Tensor, heads: int) -> Tensor:
    parts = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(parts, parts.sin(), parts).transpose(1, 2).flatten(2)


class Drawn(nn.Module):
    """A few live values of three dims, each made of earlier ones; parameters are sometimes used twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps: list[tuple[str, int, int]] = []
        self.held = nn.ParameterList()
        sizes = [(4, 12)]
        while len(self.steps) < 10 + seed % 8:
            at = draw.randrange(max(0, len(sizes) - 3), len(sizes))
            length, width = sizes[at]
            kind = draw.choice(["linear"] * 6 + ["again", "norm", "bias", "add", "times", *PLAIN])
            other = draw.choice([n for n, size in enumerate(sizes) if size == sizes[at]])
            if kind == "linear":
                other = self._new(draw.choice(WIDTHS), width)
                sizes.append((length, len(self.held[other])))
            elif kind == "again":
                fitting = [n for n, p in enumerate(self.held) if p.ndim == 2 and p.shape[1] == width]
                if not fitting:
                    continue
                other = draw.choice(fitting)
                sizes.append((length, len(self.held[other])))
            elif kind in ("norm", "bias"):
                other = self._new(width)
                sizes.append(sizes[at])
            elif kind in ("add", "times"):
                sizes.append(sizes[at])
            elif width % 6 == 0:
                sizes.append(tuple(PLAIN[kind](torch.zeros(2, length, width)).shape[1:]))
            else:
                continue
            self.steps.append((kind, at, other))

    def _new(self, *sizes: int) -> int:
        self.held.append(torch.randn(sizes) / sizes[-1] ** 0.5)
        return len(self.held) - 1

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, at, other in self.steps:
            value = values[at]
            if kind in ("linear", "again"):
                values.append(F.linear(value, self.held[other]))
            elif kind == "norm":
                values.append(F.layer_norm(value, value.shape[-1:], self.held[other]))
            elif kind == "bias":
                values.append(value + self.held[other])
            elif kind == "add":
                values.append(value + values[other])
            elif kind == "times":
                values.append(value * values[other].sigmoid())
            else:
                values.append(PLAIN[kind](value))
        return torch.cat([value.flatten(1) for value in values[-3:]], 1)


def drawn(seed: int) -> Callable[[], tuple[nn.Module, Tensor]]:
    def build() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(seed)
        # In double precision a wrong sum and a rounding are far apart.
        return Drawn(seed).double(), torch.randn(2, 4, 12, dtype=torch.float64)

    return build


def test_modules_drawn_at_random_are_those_of_one_process(law: Law) -> None:
    found = law({str(seed): drawn(seed) for seed in range(24)}, ranks=2)

    for outcome in found.values():
        outcome.assert_same(1e-9)
    assert sum(outcome.report.share > 0 for outcome in found.values()) >= 8
