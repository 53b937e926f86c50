"""How is a float32 number put into fewer bits without a bias? Rounded up or down by chance, the same on every copy.

Rounded to the nearest, an update below half a unit in the last place is lost, every time, and the weight stands still;
rounded by chance, it is kept on average. Chance is a hash of a key and of the element's place in the whole tensor, not
a generator's state: copies draw alike, a resumed run draws as an undisturbed one, and shards draw as the whole does.

Sources: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551, section 3; Zamirai et al.,
"Revisiting BFloat16 Training", arXiv:2010.06192.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The 32-bit mixer of Wellons, "Prospecting for Hash Functions", https://nullprogram.com/blog/2018/07/31/ (lowbias32).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
_SCRAMBLE = 0x9E3779B1 - 2**32  # 2³² over the golden ratio, odd: Knuth, "The Art of Computer Programming", 6.4.


def _signed(number: int) -> int:
    """Return the low 32 bits of a number as int32 has them."""
    number &= 0xFFFFFFFF
    return number - 2**32 if number >= 2**31 else number


def _fold(bits: Tensor, shift: int) -> Tensor:
    """Exclusive-or int32 bits with themselves shifted right, in place; torch's shift brings the sign along."""
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def draw(key: int, places: Tensor) -> Tensor:
    """Return 32 bits of chance for each place, as int32.

    Args:
        key: 63 bits; another one for each step and tensor.
        places: int32; where the elements lie in the whole tensor. Places 2³² apart draw alike.
    """
    bits = places + _signed(key)
    _fold(bits, 16).mul_(_FIRST)
    _fold(bits, 15).bitwise_xor_(_signed(key >> 32)).mul_(_SECOND)
    return _fold(bits, 16)


def redraw(bits: Tensor) -> Tensor:
    """Return other bits, drawn from those of `draw`, of which the high 16 are good for one more rounding."""
    return bits * _SCRAMBLE


class Places:
    """Where the elements of one part of a tensor lie in the whole, row by row.

    Args:
        whole: sizes of the whole tensor.
        part: sizes of the part.
        offset: where the part begins, in each dim.
    """

    def __init__(self, whole: Sequence[int], part: Sequence[int], offset: Sequence[int]) -> None:
        strides: list[int] = []
        stride = 1
        for size in reversed(whole):
            strides.insert(0, stride)
            stride *= size
        self._dims = list(zip(part, offset, strides, strict=True))
        # A part that is whole in all dims but the first is one run.
        self._is_run = all(p == w for p, w in zip(part[1:], whole[1:], strict=True))
        self._first = sum(start * stride for _, start, stride in self._dims)

    def __call__(self, first: int, last: int, device: torch.device) -> Tensor:
        """Return the places of the part's elements from `first` to before `last`, as `draw` wants them."""
        if self._is_run:
            start = _signed(self._first + first)
            return torch.arange(last - first, dtype=torch.int32, device=device).add_(start)
        rest = torch.arange(first, last, dtype=torch.int64, device=device)
        places = torch.zeros_like(rest)
        for size, start, stride in reversed(self._dims):
            places += (rest % size + start) * stride
            rest = rest // size
        return places.to(torch.int32)


def round_to(values: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Return float32 values in 16 bits or float8_e4m3fn, each rounded up or down so that its mean is the value.

    Args:
        values: finite; of float8 at most 448 in size. Beyond float16's greatest number they become infinite.
        bits: of `draw`; the low 16 are used for 16 bits, the high 16 for float8.
    """
    if dtype is torch.bfloat16:
        return _cut(values, bits & 0xFFFF, dropped=16).to(dtype)
    if dtype is torch.float16:
        normal = _cut(values, bits & 0x1FFF, dropped=13)
        low = _units(values, 2.0**-24, bits & 0xFFFF)
        return torch.where(values.abs() < 2.0**-14, low, normal).to(dtype)
    assert dtype is torch.float8_e4m3fn, dtype
    chance = (bits >> 16) & 0xFFFF
    normal = _cut(values, chance << 4, dropped=20)
    low = _units(values, 2.0**-9, chance)
    return torch.where(values.abs() < 2.0**-6, low, normal).to(dtype)


def _cut(values: Tensor, chance: Tensor, *, dropped: int) -> Tensor:
    """Add chance below the last bit that is kept and cut there, so that the carry is the rounding."""
    return (values.view(torch.int32) + chance).bitwise_and_(-(1 << dropped)).view(torch.float32)


def _units(values: Tensor, unit: float, chance: Tensor) -> Tensor:
    """Round to whole units, as numbers too small for the format's exponent are spaced."""
    return (values / unit + chance * 2.0**-16).floor_() * unit
