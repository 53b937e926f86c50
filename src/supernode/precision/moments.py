"""How does an optimizer keep its moments? In full, or in 8 bits with a power of two per block of 256.

First moments are float8_e4m3fn. Second moments span the square of the gradients' range, and one that is rounded to zero
beside a first moment that is not moves its weight by the first moment over epsilon; float8 does that once gradients of
a block differ 480 times. So they have no zero but zero itself and are spaced evenly in the logarithm, 6.5% apart over
2²³, and what lies below is rounded up, which only slows its weight down. Both are rounded by chance: of what a second
moment forgets in a step (5% at the second beta of 0.95), rounding to the nearest would keep all.

The scales are powers of two, so that values decoded and encoded again are the same values: a checkpoint holds them
decoded. Its bfloat16 holds a first moment exactly and a second one well enough to be told from its neighbours.

torchao.optim (0.18) has such optimizers and was tried first. Its AdamWFp8 keeps second moments in float8_e4m3fn, which
vanish as said above (a weight whose gradient is 1/2000 of its block's moves 2.6 times too far in 20 steps). It runs
only under torch.compile, parameter by parameter. It rounds with the global generator, so copies on a data axis part.
And its states can be cut for another layout only along whole blocks.

Sources: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861 (blocks); Li, Chen and Zhu,
"Memory Efficient Optimizers with 4-bit States", arXiv:2309.01507 (second moments without a zero); Fishman et al.,
"Scaling FP8 training to trillion-token LLMs", arXiv:2409.12517 (both moments in float8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from supernode.precision.rounding import redraw, round_to

BLOCK = 256
"""Elements with one scale; as torchao and bitsandbytes have it."""
LEAST = 4096
"""Elements of a tensor below which its moments stay in float32, as in bitsandbytes and torchao."""
_LARGEST = 8.8074  # log2 of float8_e4m3fn's greatest number, 448, is 8.80735
_SLACK = 1e-4  # A block's greatest, read back, must not fall to the next exponent by an error of the logarithm.
_STEPS = 11  # Codes per octave: a whole number, so that a scale twice as large shifts codes and changes no value.


class Plain:
    """Moments as they are.

    Args:
        like: this rank's part of the parameter.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.values = torch.zeros(like.numel(), dtype=dtype, device=like.device)

    @property
    def saved_as(self) -> torch.dtype:
        """What a checkpoint keeps them in."""
        return self.values.dtype

    def read(self, first: int, last: int) -> Tensor:
        """Return the elements in float32."""
        return self.values[first:last].float()

    def write(self, first: int, last: int, values: Tensor, bits: Tensor | None) -> None:
        """Keep float32 values, rounded to the nearest."""
        self.values[first:last] = values


class _Blocks:
    """One byte for each element, and one for each block of them."""

    saved_as = torch.bfloat16

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.codes = torch.zeros(like.numel(), dtype=dtype, device=like.device)
        self.exponents = torch.full((-(-like.numel() // BLOCK),), -127, dtype=torch.int8, device=like.device)

    def _of_blocks(self, first: int, last: int) -> Tensor:
        assert first % BLOCK == 0
        return self.exponents[first // BLOCK : -(-last // BLOCK)].float()

    @staticmethod
    def _spread(blocks: Tensor, count: int) -> Tensor:
        """Return a number of each block for each of its elements."""
        return blocks.unsqueeze(1).expand(-1, BLOCK).reshape(-1)[:count]

    def _fit(self, first: int, last: int, sizes: Tensor, *, room: float) -> Tensor:
        """Set the blocks' exponents to the least that leaves `room` octaves for the greatest; return them."""
        missing = -(last - first) % BLOCK
        padded = torch.nn.functional.pad(sizes, (0, missing)) if missing else sizes
        exponents = (padded.view(-1, BLOCK).amax(dim=1).log2_() - room).ceil_().clamp_(-127, 127)
        self.exponents[first // BLOCK : -(-last // BLOCK)] = exponents.to(torch.int8)
        return exponents


class Signed(_Blocks):
    """First moments in float8_e4m3fn times a power of two: 1 + 1/256 bytes each."""

    def __init__(self, like: Tensor) -> None:
        super().__init__(like, torch.float8_e4m3fn)

    def read(self, first: int, last: int) -> Tensor:
        """Return the elements in float32."""
        return self.codes[first:last].float().mul_(self._spread(self._of_blocks(first, last).exp2_(), last - first))

    def write(self, first: int, last: int, values: Tensor, bits: Tensor | None) -> None:
        """Keep float32 values, rounded by chance, or to the nearest without `bits`."""
        scales = self._fit(first, last, values.abs(), room=_LARGEST).neg_().exp2_()
        scaled = (values * self._spread(scales, last - first)).clamp_(-448, 448)
        codes = scaled.to(torch.float8_e4m3fn) if bits is None else round_to(scaled, torch.float8_e4m3fn, bits)
        self.codes[first:last] = codes


class Positive(_Blocks):
    """Second moments as 8 bits of their logarithm below a power of two: 1 + 1/256 bytes each."""

    def __init__(self, like: Tensor) -> None:
        super().__init__(like, torch.uint8)

    def read(self, first: int, last: int) -> Tensor:
        """Return the elements in float32."""
        codes = self.codes[first:last]
        # The whole logarithm first, so that one value has one sum whichever exponent it is told from.
        steps = self._of_blocks(first, last).mul_(_STEPS).sub_(255)
        values = (self._spread(steps, last - first) + codes).div_(_STEPS).exp2_()
        return values.mul_(codes > 0)

    def write(self, first: int, last: int, values: Tensor, bits: Tensor | None) -> None:
        """Keep float32 values from 0 on, rounded by chance so that the mean is kept, or to the nearest."""
        exponents = self._fit(first, last, values, room=_SLACK)
        place = values.log2().sub_(self._spread(exponents, last - first)).mul_(_STEPS).add_(255)
        if bits is None:
            codes = place.round_()
        else:
            codes = place.floor()
            # Between two codes the mean is kept in the value, not in its logarithm.
            above = ((place - codes) / _STEPS).exp2_().sub_(1) / (2 ** (1 / _STEPS) - 1)
            chance = ((redraw(bits) >> 16) & 0xFFFF) * 2.0**-16
            codes += above > chance
        self.codes[first:last] = torch.where(values > 0, codes.clamp_(1, 255), 0.0).to(torch.uint8)


Moment = Plain | Signed | Positive
