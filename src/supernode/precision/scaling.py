"""How do small gradients survive float16? The loss is multiplied by a power of two that its overflows regulate.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; the rule is torch.amp.GradScaler's: halved by
an overflow, doubled after 2,000 steps without one. That class scales and unscales in different calls and looks at its
own rank's gradients alone; here one number is both, and what it is told comes from all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

GROWTH_STEPS = 2000
START = 2.0**16
"""Of the scale of a mean's gradient, as in torch.amp.GradScaler."""
_LEAST, _GREATEST = 2.0**-24, 2.0**24


class LossScale:
    """A scale, and the steps that it cost.

    Args:
        positions: that a step's loss is a sum over, about; a mean's gradient would be as much smaller.
        most: steps in a row that may be skipped.

    Attributes:
        scale: the loss is multiplied by it, and the gradients by one over it.
        good: steps since the scale last changed.
        row: steps skipped in a row.
        skipped: steps skipped in all.
    """

    def __init__(self, *, positions: int, most: int) -> None:
        self.most = most
        self.scale = max(_LEAST, START / 2 ** math.ceil(math.log2(max(positions, 1))))
        self.good = self.row = self.skipped = 0

    def scaled(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a loss that is multiplied by the scale of the moment, in float32: a half would overflow."""
        return lambda output, target: loss(output, target).float() * self.scale

    def judge(self, *, is_finite: bool) -> bool:
        """Take note of a step's gradients, which every rank judges alike; return whether to apply them."""
        if is_finite:
            self.row, self.good = 0, self.good + 1
            if self.good >= GROWTH_STEPS:
                self.scale, self.good = min(self.scale * 2, _GREATEST), 0
            return True
        self.row, self.skipped, self.good = self.row + 1, self.skipped + 1, 0
        self.scale = max(self.scale / 2, _LEAST)
        return False

    @property
    def is_lost(self) -> bool:
        """Whether more steps in a row were skipped than may be."""
        return self.row >= self.most

    def saved(self) -> Tensor:
        """Return what a checkpoint keeps."""
        return torch.tensor([self.scale, self.good, self.row, self.skipped], dtype=torch.float64)

    def take(self, saved: Tensor) -> None:
        """Take up what `saved` gave."""
        self.scale = float(saved[0])
        self.good, self.row, self.skipped = (int(number) for number in saved[1:].tolist())
