"""The loss scale halves after an overflow, grows after 2,000 steps without, and is one number for both ways."""

from __future__ import annotations

import torch
from torch import Tensor

from supernode.precision.scaling import LossScale


def test_the_scale_is_that_of_a_mean() -> None:
    assert LossScale(positions=1, most=25).scale == 65_536
    assert LossScale(positions=2048, most=25).scale == 32
    assert LossScale(positions=1025, most=25).scale == 32


def test_what_is_scaled_is_unscaled_by_the_same_number() -> None:
    scaling = LossScale(positions=512, most=25)
    loss = scaling.scaled(lambda output, target: (output - target).square().sum())
    x = torch.tensor([3.0], requires_grad=True)

    loss(x, torch.tensor([1.0])).backward()
    assert isinstance(x.grad, Tensor)
    assert float(x.grad) / scaling.scale == 4.0

    scaling.judge(is_finite=False)
    assert float(loss(x.detach(), torch.tensor([1.0]))) / scaling.scale == 4.0


def test_a_loss_in_halves_is_scaled_beyond_what_halves_hold() -> None:
    loss = LossScale(positions=1, most=25).scaled(lambda output, target: (output - target).sum())

    scaled = loss(torch.tensor([3.0], dtype=torch.float16), torch.tensor([1.0], dtype=torch.float16))

    assert float(scaled) == 2 * 65_536


def test_overflows_halve_it_and_2000_good_steps_double_it() -> None:
    scaling = LossScale(positions=1, most=3)

    assert not scaling.judge(is_finite=False)
    assert not scaling.judge(is_finite=False)
    assert (scaling.scale, scaling.row, scaling.skipped, scaling.is_lost) == (16_384, 2, 2, False)
    assert all(scaling.judge(is_finite=True) for _ in range(2000))
    assert (scaling.scale, scaling.row, scaling.skipped, scaling.good) == (32_768, 0, 2, 0)
    for _ in range(3):
        scaling.judge(is_finite=False)
    assert scaling.is_lost


def test_its_state_comes_back() -> None:
    scaling = LossScale(positions=1, most=25)
    for is_finite in (False, True, True, False, True):
        scaling.judge(is_finite=is_finite)
    other = LossScale(positions=1, most=25)

    other.take(scaling.saved())

    assert vars(other) == vars(scaling)
