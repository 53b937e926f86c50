"""Chance keeps the mean, is the same for every copy and shard, and never leaves the two neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from supernode.precision.rounding import Places, draw, redraw, round_to

COUNT = 1 << 18
BITS = draw(0x1234_5678_9ABC_DEF0, torch.arange(COUNT, dtype=torch.int32))


def uniform(bits: torch.Tensor) -> torch.Tensor:
    return (bits.long() & 0xFFFFFFFF).double() / 2**32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [0.1, -1.234, 3e-3, 7.7e-6, -446.7, 440.3])
def test_rounded_numbers_are_the_neighbours_and_their_mean_is_the_number(dtype: torch.dtype, value: float) -> None:
    rounded = round_to(torch.full((COUNT,), value), dtype, BITS).double()

    kinds = rounded.unique()
    assert len(kinds) == 2
    low, high = kinds.tolist()
    assert low < value < high
    # Neighbours: what lies half way between them is rounded to one of them.
    assert torch.tensor((low + high) / 2).to(dtype).double().item() in (low, high)
    # Each is one of two numbers, so the mean's deviation is at most half their distance over √n; five of these.
    assert rounded.mean().item() == pytest.approx(value, abs=5 * (high - low) / 2 / COUNT**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_can_be_held_is_held(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    held = every[every.isfinite()]  # All of float8's numbers, which the others have, too.

    for bits in (torch.zeros(len(held), dtype=torch.int32), torch.full((len(held),), -1, dtype=torch.int32)):
        assert torch.equal(round_to(held, dtype, bits).float(), held)


def test_draws_are_even_and_independent_of_place_key_and_second_use() -> None:
    other = draw(0x0FED_CBA9_8765_4321, torch.arange(COUNT, dtype=torch.int32))
    for bits in (BITS, redraw(BITS)):
        for shift in (16, 24):  # Of a second use the high 16 bits are good.
            counts = torch.bincount((bits >> shift) & 0xFF, minlength=256).double()
            # χ² of 255 degrees: mean 255, deviation 22.6; six of these.
            assert ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum() < 255 + 6 * 22.6

    pairs = [(BITS[1:], BITS[:-1]), (BITS, other), (BITS, redraw(BITS)), (BITS << 16, redraw(BITS))]
    for one, two in pairs:
        correlation = torch.corrcoef(torch.stack((uniform(one), uniform(two))))[0, 1]
        assert abs(float(correlation)) < 5 / COUNT**0.5


@pytest.mark.parametrize(
    ("whole", "part", "offset"),
    [((6, 8), (6, 8), (0, 0)), ((6, 8), (2, 8), (3, 0)), ((6, 8), (6, 3), (0, 5)), ((4, 6, 5), (2, 3, 5), (2, 3, 0)),
     ((7,), (3,), (4,)), ((), (), ())],
)  # fmt: skip
def test_a_part_draws_what_the_whole_draws_there(
    whole: Sequence[int], part: Sequence[int], offset: Sequence[int]
) -> None:
    size = torch.Size(whole).numel()
    numbers = torch.arange(size, dtype=torch.int32).view(whole)
    wanted = numbers[tuple(slice(o, o + p) for o, p in zip(offset, part, strict=True))].reshape(-1)

    places = Places(whole, part, offset)

    assert torch.equal(places(0, wanted.numel(), torch.device("cpu")), wanted)
    assert torch.equal(places(1, wanted.numel(), torch.device("cpu")), wanted[1:])
