"""A block of numbers becomes few bytes and comes back as near as its codec promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from supernode.compressing.codecs import Codec, Float8, Int8, Levels, OneBit, TopK

CODECS: list[Codec] = [Int8(), Float8(), TopK(0.05), Levels(5), Levels(7), OneBit()]


def blocks(codec: Codec, count: int = 3) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(count, codec.block, generator=torch.Generator().manual_seed(1)) * 1e-5
    return numbers, torch.full((count,), float(codec.block))


def there_and_back(codec: Codec, numbers: Tensor) -> Tensor:
    return codec.decode(codec.encode(numbers, torch.full((len(numbers),), float(codec.block))))


@pytest.mark.parametrize(
    ("codec", "width"),
    [
        (Int8(), 4 + 1024),  # a float32 scale, and one byte a number
        (Float8(), 4 + 1024),
        (Levels(5), 4 + 44 * 6 + 16 * 3),  # 20 numbers in 48 bits: 5**20 < 2**48; 16 places and steps
        (Levels(7), 4 + 44 * 6),  # 17 numbers in 48 bits: 7**17 < 2**48
        (OneBit(), 4 + 8),  # eight numbers a byte
        (TopK(0.05), 4 + 28),  # 13 of 256 numbers with a byte each for value and place, filled up to whole float32
        (TopK(1e-6), 4 + 4),  # at least one number
    ],
)
def test_a_block_takes_the_bytes_that_are_told(codec: Codec, width: int) -> None:
    numbers, filled = blocks(codec)

    rows = codec.encode(numbers, filled)

    assert rows.dtype == torch.uint8
    assert rows.shape == (3, width) == (3, codec.width)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    numbers, _ = blocks(Int8())
    steps = numbers.abs().amax(dim=1, keepdim=True) / 127

    assert bool(((there_and_back(Int8(), numbers) - numbers).abs() <= steps * 0.501).all())


def test_float8_is_off_by_a_sixteenth_at_most() -> None:
    numbers, _ = blocks(Float8())
    largest = numbers.abs().amax(dim=1, keepdim=True)
    error = (there_and_back(Float8(), numbers) - numbers).abs()

    # Three bits of mantissa; below 2^-6 of 448 the steps stay 2^-9.
    assert bool((error <= torch.maximum(numbers.abs() / 16, largest / 448 * 2**-10) * 1.001).all())


def test_top_k_sends_the_largest_and_nothing_else() -> None:
    numbers, _ = blocks(TopK(0.05))
    back = there_and_back(TopK(0.05), numbers)
    kept = numbers.abs().argsort(dim=1, descending=True)[:, :13]

    wanted = torch.zeros_like(numbers).scatter(1, kept, numbers.gather(1, kept))
    assert torch.equal(back != 0, wanted != 0)
    torch.testing.assert_close(back, wanted, rtol=0, atol=float(numbers.abs().max()) / 254 * 1.01)


def test_one_bit_keeps_signs_and_the_mean_magnitude() -> None:
    numbers, _ = blocks(OneBit())

    wanted = torch.where(numbers >= 0, 1.0, -1.0) * numbers.abs().mean(dim=1, keepdim=True)
    torch.testing.assert_close(there_and_back(OneBit(), numbers), wanted)


def test_one_bit_takes_the_mean_of_what_fills_a_block() -> None:
    numbers = torch.zeros(1, 64)
    numbers[0, :4] = torch.tensor([1.0, -2.0, 3.0, -2.0])

    back = OneBit().decode(OneBit().encode(numbers, torch.tensor([4.0])))

    assert back[0, :4].tolist() == [2.0, -2.0, 2.0, -2.0]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert torch.equal(there_and_back(codec, torch.zeros(2, codec.block)), torch.zeros(2, codec.block))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_what_is_not_finite_is_not_finite_on_the_other_side(codec: Codec, bad: float) -> None:
    numbers, _ = blocks(codec)
    numbers[1, 7] = bad

    finite = there_and_back(codec, numbers).isfinite()

    assert not bool(finite[1].all())
    assert bool(finite[0].all())


@pytest.mark.parametrize("levels", [5, 7])
def test_every_level_comes_back_from_every_place_of_a_word(levels: int) -> None:
    codec, half = Levels(levels), levels // 2
    wanted = torch.arange(3 * codec.block).view(3, -1).mul(7).remainder(levels).sub(half).float()
    step = wanted.abs().mean(dim=1, keepdim=True) * Levels._STEPS[levels]
    filled = torch.full((3,), float(codec.block))

    for numbers in (wanted, wanted[:1]):
        back = codec.decode(codec.encode(numbers, filled[: len(numbers)]))
        assert torch.allclose(back, (numbers / step[: len(numbers)]).round().clamp(-half, half) * step[: len(numbers)])
    assert set((codec.decode(codec.encode(wanted * 1e3, filled)) / step / 1e3).round().unique().tolist()) <= set(
        range(-half, half + 1)
    )


def test_five_levels_send_the_sixteen_farthest_beyond_them_whole() -> None:
    codec = Levels(5)
    numbers, filled = blocks(codec)
    far = torch.arange(3, codec.block, 43)[:20]
    # Twenty of a block lie far out, one farther than the next; the last of them farther than a byte of steps reaches.
    numbers[:, far] = torch.linspace(20, 100, 20) * 1e-5
    numbers[:, far[-1]] = 5e-3
    step = numbers.abs().mean(dim=1, keepdim=True)

    back = codec.decode(codec.encode(numbers, filled))

    rest = torch.ones(codec.block, dtype=torch.bool)
    rest[far[-16:]] = False
    assert bool((back[:, far[-16:-1]] - numbers[:, far[-16:-1]]).abs().le(0.5001 * step).all())
    torch.testing.assert_close(back[:, far[-1:]], (127 + 2) * step)
    torch.testing.assert_close(back[:, rest], (numbers / step).round().clamp(-2, 2)[:, rest] * step)
