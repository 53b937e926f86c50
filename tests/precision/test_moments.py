"""Moments of 8 bits keep their mean, never vanish beside a gradient, and survive being written down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from supernode.precision.moments import BLOCK, Moment, Plain, Positive, Signed
from supernode.precision.rounding import draw

COUNT = 40 * BLOCK + 100  # The last block is short.


def wide(seed: int) -> Tensor:
    """Return numbers over six octaves, with some zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(COUNT, generator=generator) * torch.exp2(3 * torch.randn(COUNT, generator=generator))
    return values.mul_(torch.rand(COUNT, generator=generator) > 0.05) * 1e-4


def written(kind: type[Signed] | type[Positive], values: Tensor, *, key: int | None = None) -> Moment:
    moment = kind(values)
    bits = None if key is None else draw(key, torch.arange(COUNT, dtype=torch.int32))
    moment.write(0, COUNT, values, bits)
    return moment


def test_a_moment_takes_a_byte_and_a_block_one_more() -> None:
    for moment in (Signed(torch.empty(COUNT)), Positive(torch.empty(COUNT))):
        assert sum(part.numel() * part.element_size() for part in vars(moment).values()) == COUNT + 41


def test_nearest_is_within_half_a_step() -> None:
    values = wide(0)
    signed, positive = written(Signed, values).read(0, COUNT), written(Positive, values**2).read(0, COUNT)

    # float8_e4m3fn has 3 bits behind the first: half a step is at most 1/16; below its 2⁻⁶, half of 2⁻⁹ of a block's
    # scale, which is at most the block's greatest over 224.
    padded = torch.nn.functional.pad(values.abs(), (0, -COUNT % BLOCK)).view(-1, BLOCK).amax(1)
    greatest = padded.repeat_interleave(BLOCK)[:COUNT]
    assert ((signed - values).abs() <= values.abs() / 16 + greatest / 224 * 2**-10 + 1e-12).all()
    # Eleven steps an octave: half a step is 2^(1/22) − 1 = 3.2%. Values 23 octaves below the greatest are rounded up.
    held = values**2 > greatest**2 * 2.0**-22
    assert ((positive / values**2 - 1).abs()[held] <= 2 ** (1 / 22) - 1 + 1e-4).all()


def test_chance_keeps_the_mean() -> None:
    values = wide(1)
    times = 400
    signed = sum(written(Signed, values, key=k << 20 | 77).read(0, COUNT).double() for k in range(times)) / times
    positive = sum(written(Positive, values**2, key=k << 20 | 77).read(0, COUNT).double() for k in range(times)) / times

    # A rounding errs by at most a step, an eighth and 6.5%, with half of that as deviation; over 400 times a twentieth.
    normal = values.abs() > values.abs().max() * 2.0**-5
    assert float(((signed - values) / values)[normal].abs().max()) < 5 * 0.0625 / 20
    held = values**2 > (values**2).max() * 2.0**-10
    assert float((positive / values**2 - 1)[held].abs().max()) < 5 * 0.0325 / 20


def test_a_second_moment_never_vanishes_and_a_zero_stays_one() -> None:
    values = torch.tensor([1.0, 1e-12, 1e-30, 0.0])

    for bits in (None, draw(5, torch.arange(4, dtype=torch.int32))):
        moment = Positive(values)
        moment.write(0, 4, values, bits)
        one, low, lower, zero = moment.read(0, 4).tolist()
        assert one == pytest.approx(1, rel=0.07)
        # 254 steps of an eleventh octave below the scale, which is the greatest, a power of two.
        assert low == lower == pytest.approx(2 ** (-254 / 11), rel=1e-6)
        assert zero == 0


def test_zeros_are_held_and_blocks_do_not_disturb_each_other() -> None:
    values = torch.zeros(3 * BLOCK)
    values[BLOCK : 2 * BLOCK] = 1e30
    values[-1] = 1e-30

    for kind in (Signed, Positive):
        moment = kind(values)
        assert not moment.read(0, 3 * BLOCK).any()
        moment.write(0, 3 * BLOCK, values, None)
        assert moment.read(0, 3 * BLOCK) == pytest.approx(values, rel=0.07)
        # A later part can be written alone.
        moment.write(BLOCK, 2 * BLOCK, torch.full((BLOCK,), 2.0), None)
        assert moment.read(0, 3 * BLOCK)[-1] == pytest.approx(1e-30, rel=0.07)
        assert moment.read(BLOCK, 2 * BLOCK) == pytest.approx(torch.full((BLOCK,), 2.0), rel=0.07)


@pytest.mark.parametrize("kind", [Signed, Positive])
def test_what_a_checkpoint_holds_is_the_same_moment_again(kind: type[Signed] | type[Positive]) -> None:
    for key in range(5):
        values = wide(key) if kind is Signed else wide(key) ** 2
        moment = written(kind, values, key=key)

        saved = moment.read(0, COUNT).to(moment.saved_as)
        again = written(kind, saved.float())

        assert torch.equal(again.read(0, COUNT), moment.read(0, COUNT))


def test_moments_in_full_are_what_was_written() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        moment = Plain(torch.empty(COUNT), dtype)
        moment.write(0, COUNT, wide(2), None)

        assert moment.saved_as is dtype
        assert torch.equal(moment.read(0, COUNT), wide(2).to(dtype).float())


def test_a_second_moment_forgets_as_it_should() -> None:
    # Of what is kept at a beta of 0.97, less than half a code goes each step: rounded to the nearest, none would.
    beta = 0.97
    values = torch.ones(BLOCK * 8)
    moment = Positive(values)
    moment.write(0, len(values), values, None)
    for step in range(60):
        bits = draw(step * 9_999_999_991, torch.arange(len(values), dtype=torch.int32))
        moment.write(0, len(values), moment.read(0, len(values)) * beta, bits)

    # 60 roundings of a deviation of 3.25%: 25% each, over √2048 elements.
    assert float(moment.read(0, len(values)).mean()) == pytest.approx(beta**60, rel=5 * 0.25 / 2048**0.5)
