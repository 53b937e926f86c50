"""Which bytes stand for a block of numbers? Each codec turns (blocks, block) float32 into rows of bytes and back.

A row stands for itself: it holds its block's scale, so rows can be cut apart, sent to several ranks and decoded there.
A block that is not finite decodes to numbers that are not finite, so that every rank learns of it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Attributes:
    block: elements in one block.
    width: bytes of one encoded block.
    """

    block: int
    width: int

    def encode(self, blocks_NB: Tensor, filled_N: Tensor) -> Tensor:
        """Return (N, width) uint8. `filled_N`: elements of each block that count; the others are zeros."""
        ...

    def decode(self, rows_NW: Tensor) -> Tensor:
        """Return (N, block) float32."""
        ...


def _scaled(blocks_NB: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return blocks over their scale, of magnitude at most `largest`, and the scales (N, 1)."""
    scales_N1 = blocks_NB.abs().amax(dim=1, keepdim=True) / largest
    return blocks_NB / torch.where(scales_N1 == 0, 1, scales_N1), scales_N1


def _row(scales_N1: Tensor, payload: Tensor) -> Tensor:
    return torch.cat((scales_N1.contiguous().view(torch.uint8), payload.contiguous().view(torch.uint8)), dim=1)


def _scales(rows_NW: Tensor) -> Tensor:
    return rows_NW[:, :4].contiguous().view(torch.float32)


class Int8:
    """Whole numbers from -127 to 127 times a scale per block; a quarter of float32's bytes."""

    block = 1024
    width = 4 + 1024

    def encode(self, blocks_NB: Tensor, filled_N: Tensor) -> Tensor:
        scaled_NB, scales_N1 = _scaled(blocks_NB, 127)
        return _row(scales_N1, scaled_NB.round().to(torch.int8))

    def decode(self, rows_NW: Tensor) -> Tensor:
        return rows_NW[:, 4:].view(torch.int8).float() * _scales(rows_NW)


class Float8:
    """Floating point of 8 bits, e4m3, times a scale per block; a quarter of float32's bytes.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
    """

    block = 1024
    width = 4 + 1024

    def encode(self, blocks_NB: Tensor, filled_N: Tensor) -> Tensor:
        scaled_NB, scales_N1 = _scaled(blocks_NB, 448)  # The largest of e4m3.
        return _row(scales_N1, scaled_NB.to(torch.float8_e4m3fn))

    def decode(self, rows_NW: Tensor) -> Tensor:
        return rows_NW[:, 4:].view(torch.float8_e4m3fn).float() * _scales(rows_NW)


class TopK:
    """The largest numbers of each block as 8 bits of a scale, with their places: 2 bytes each. The rest waits.

    Choosing within blocks sends equally many from everywhere in a layer and keeps places at 8 bits.

    Args:
        density: part of a block that is sent; at least one number a block.

    Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, without its momentum correction: the optimizer
    has its moments from gradients that include the feedback.
    """

    block = 256

    def __init__(self, density: float) -> None:
        self.kept = min(self.block, max(1, round(density * self.block)))
        self.width = 4 + -(-2 * self.kept // 4) * 4  # Scales are read as float32 where rows begin.

    def encode(self, blocks_NB: Tensor, filled_N: Tensor) -> Tensor:
        places_NK = blocks_NB.abs().topk(self.kept, dim=1, sorted=False).indices
        values_NK, scales_N1 = _scaled(blocks_NB.gather(1, places_NK), 127)
        payload = torch.zeros(len(blocks_NB), self.width - 4, dtype=torch.uint8, device=blocks_NB.device)
        payload[:, : self.kept] = values_NK.round().to(torch.int8).view(torch.uint8)
        payload[:, self.kept : 2 * self.kept] = places_NK.to(torch.uint8)
        return _row(scales_N1, payload)

    def decode(self, rows_NW: Tensor) -> Tensor:
        values_NK = rows_NW[:, 4 : 4 + self.kept].view(torch.int8).float() * _scales(rows_NW)
        places_NK = rows_NW[:, 4 + self.kept : 4 + 2 * self.kept].long()
        blocks_NB = torch.zeros(len(rows_NW), self.block, device=rows_NW.device)
        # Rows that are padding name place 0 many times, always with 0.
        return blocks_NB.scatter_(1, places_NK, values_NK)


class OneBit:
    """The sign of every number times the mean magnitude of its block; a twentieth of float32's bytes.

    Blocks are small, so that a row without a gradient (a token that did not occur) gets none from its neighbours.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    arXiv:1901.09847; first by Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
    """

    block = 64
    width = 4 + 64 // 8
    _WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)

    def encode(self, blocks_NB: Tensor, filled_N: Tensor) -> Tensor:
        scales_N1 = (blocks_NB.abs().sum(dim=1) / filled_N.clamp_min(1)).unsqueeze(1)
        bits_N8 = (blocks_NB >= 0).view(len(blocks_NB), -1, 8).to(torch.uint8)
        weights_8 = torch.tensor(self._WEIGHTS, dtype=torch.uint8, device=blocks_NB.device)
        return _row(scales_N1, (bits_N8 * weights_8).sum(dim=2, dtype=torch.uint8))

    def decode(self, rows_NW: Tensor) -> Tensor:
        weights_8 = torch.tensor(self._WEIGHTS, dtype=torch.uint8, device=rows_NW.device)
        signs_NB = (rows_NW[:, 4:].unsqueeze(2) & weights_8).ne(0).view(len(rows_NW), -1).float().mul_(2).sub_(1)
        return signs_NB.mul_(_scales(rows_NW))


class Levels:
    """One of a few evenly spaced levels for every number, as many numbers in a word as their combinations allow.

    Steps go by the mean magnitude of the block, which a few large numbers move less than they move the largest. Of
    what lies beyond the outermost level, the farthest few of a block go along with their places; the rest waits.

    Args:
        levels: 5, which with 16 farthest numbers leaves 9.0% of float32's bytes, or 7, which alone leaves 9.0%.

    Source of sending the few apart from the many: Dettmers et al., "SpQR", arXiv:2306.03078, for weights.
    """

    _STEPS: ClassVar = {5: 1.0, 7: 0.75}  # Of the mean magnitude: near the least square error of normal numbers.
    # Numbers in a word and words of a block: 5**20 and 7**17 < 2**48. Small blocks pad little.
    _WORDS: ClassVar = {5: (20, 44), 7: (17, 44)}
    _BYTES = 6  # Of a word, which float64 has exactly.
    _FARTHEST: ClassVar = {5: 16, 7: 0}

    def __init__(self, levels: int) -> None:
        self.levels, self._half, self._far = levels, levels // 2, self._FARTHEST[levels]
        self._in_word, self._words = self._WORDS[levels]
        self.block = self._in_word * self._words
        self._core = 4 + self._BYTES * self._words
        self.width = self._core + 3 * self._far

    def encode(self, blocks_NB: Tensor, filled_N: Tensor) -> Tensor:
        means_N1 = (blocks_NB.abs().sum(dim=1) / filled_N.clamp_min(1)).unsqueeze(1)
        scales_N1 = means_N1 * self._STEPS[self.levels]
        whole_NB = (blocks_NB / torch.where(scales_N1 == 0, 1, scales_N1)).round_().nan_to_num_()
        nearest_NB = whole_NB.clamp(-self._half, self._half)
        digits_DNW = nearest_NB.add(self._half).view(len(blocks_NB), self._in_word, -1).transpose(0, 1)
        words_NW = digits_DNW[-1].double()
        for digit_NW in reversed(digits_DNW[:-1].unbind()):
            words_NW.mul_(self.levels).add_(digit_NW)
        bytes_NW8 = words_NW.to(torch.int64).view(torch.uint8).view(len(blocks_NB), self._words, 8)  # The lowest first.
        row = _row(scales_N1, bytes_NW8[..., : self._BYTES].reshape(len(blocks_NB), -1))
        if not self._far:
            return row
        beyond_NB = whole_NB.sub_(nearest_NB)
        places_NF = beyond_NB.abs().topk(self._far, dim=1, sorted=False).indices
        steps_NF = beyond_NB.gather(1, places_NF).clamp_(-127, 127).to(torch.int8)
        return torch.cat((row, places_NF.to(torch.int16).view(torch.uint8), steps_NF.view(torch.uint8)), dim=1)

    def decode(self, rows_NW: Tensor) -> Tensor:
        bytes_NW8 = torch.zeros(len(rows_NW), self._words, 8, dtype=torch.uint8, device=rows_NW.device)
        bytes_NW8[..., : self._BYTES] = rows_NW[:, 4 : self._core].view(len(rows_NW), self._words, self._BYTES)
        words_NW = bytes_NW8.view(torch.int64).squeeze(-1).double()
        steps_NDW = torch.empty(len(rows_NW), self._in_word, self._words, dtype=torch.float32, device=rows_NW.device)
        for place in range(self._in_word):
            # A quotient lies a multiple of 1 / levels above a whole number: what is added makes good for rounding.
            rest_NW = words_NW.mul(1 / self.levels).add_(0.25 / self.levels).floor_()
            steps_NDW[:, place] = words_NW.sub_(rest_NW, alpha=self.levels).sub_(self._half)
            words_NW = rest_NW
        steps_NB = steps_NDW.view(len(rows_NW), -1)
        if self._far:
            split = self._core + 2 * self._far
            places_NF = rows_NW[:, self._core : split].contiguous().view(torch.int16).long()
            # Rows that are padding name place 0 many times, always with 0.
            steps_NB.scatter_add_(1, places_NF, rows_NW[:, split:].contiguous().view(torch.int8).float())
        return steps_NB.mul_(_scales(rows_NW))
