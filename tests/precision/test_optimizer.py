"""Weights of few bits move as torch's optimizers move them, and chance keeps what rounding to the nearest takes."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from supernode.precision.moments import Positive, Signed
from supernode.precision.optimizer import LowPrecision

State = Literal["same", "float32", "float8"]


def optimizer_of(
    weight: nn.Parameter, *, state: State = "same", stochastic: bool = False, kind: Literal["adamw", "sgd"] = "adamw",
    rate: float = 1e-2, seed: int = 0, **settings: Any,
) -> LowPrecision:  # fmt: skip
    groups = [{"params": [weight], "lr": rate, "weight_decay": 0.1}]
    return LowPrecision(
        {"w": weight}, groups, kind=kind, state=state, rounding="stochastic" if stochastic else "nearest",
        keys=lambda updates, name: (seed << 40) + updates * 1_000_003 + len(name), **settings,
    )  # fmt: skip


def gradients(steps: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    size = torch.exp2(2 * torch.randn(*shape, generator=generator)) * 1e-3  # Each weight has its own size of gradient.
    return [size * (0.5 + torch.randn(*shape, generator=generator)) for _ in range(steps)]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_in_float32_it_is_torchs_optimizer(kind: Literal["adamw", "sgd"]) -> None:
    ours, theirs = nn.Parameter(torch.ones(300, 257)), nn.Parameter(torch.ones(300, 257))
    optimizer = optimizer_of(ours, kind=kind, betas=(0.9, 0.95), momentum=0.8)
    optimizer.factor = 0.25
    groups = [{"params": [theirs], "lr": 1e-2, "weight_decay": 0.1}]
    other = torch.optim.AdamW(groups, betas=(0.9, 0.95)) if kind == "adamw" else torch.optim.SGD(groups, momentum=0.8)

    for grad in gradients(12, 300, 257):
        ours.grad, theirs.grad = grad * 4, grad.clone()
        optimizer.step()
        other.step()

    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours.grad, gradients(12, 300, 257)[-1] * 4)  # It is read, not changed.


def test_eight_bits_of_moments_move_weights_as_far_as_32_do() -> None:
    full, low = nn.Parameter(torch.zeros(64, 512)), nn.Parameter(torch.zeros(64, 512))
    optimizers = [
        optimizer_of(full, state="float32", betas=(0.9, 0.95)),
        optimizer_of(low, state="float8", betas=(0.9, 0.95)),
    ]

    for grad in gradients(100, 64, 512):
        for weight, optimizer in zip((full, low), optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()

    moved, apart = full.detach(), (low - full).detach()
    # Noise of a few percent a step in either moment averages out along the way; a bias would not.
    assert float(apart.norm() / moved.norm()) < 0.05
    assert float((apart * moved.sign()).mean().abs() / moved.abs().mean()) < 0.01
    assert isinstance(optimizers[1].state[low]["exp_avg"], Signed)
    assert isinstance(optimizers[1].state[low]["exp_avg_sq"], Positive)


def test_a_gradient_much_smaller_than_its_blocks_moves_its_weight_as_adam_would() -> None:
    # Where second moments are float8_e4m3fn, those of 1/1000 of the greatest gradient are zero; torchao.optim's
    # AdamWFp8 moves such a weight by 0.053 in 20 steps in the place of 0.02.
    weight = nn.Parameter(torch.ones(4096))
    optimizer = optimizer_of(weight, state="float8", rate=1e-3, betas=(0.9, 0.95))
    optimizer.param_groups[0]["weight_decay"] = 0.0

    for _ in range(20):
        weight.grad = torch.full((4096,), 1e-5)
        weight.grad[::256] = 2e-2
        optimizer.step()

    assert (1 - weight).detach() == pytest.approx(torch.full((4096,), 0.02), rel=0.15)


def test_updates_below_half_a_unit_are_lost_to_the_nearest_and_kept_by_chance() -> None:
    # Weights near 1 are 2⁻⁷ apart in bfloat16; each update is a rate of 2⁻¹², a 32nd of that, for 64 steps: 2⁻⁶.
    weights = [nn.Parameter(torch.full((64, 256), 1.25, dtype=torch.bfloat16)) for _ in range(3)]
    optimizers = [
        optimizer_of(weight, state="float32", stochastic=chance, rate=2.0**-12, seed=seed)
        for weight, chance, seed in zip(weights, (False, True, True), (0, 0, 1), strict=True)
    ]
    for weight, optimizer in zip(weights, optimizers, strict=True):
        optimizer.param_groups[0]["weight_decay"] = 0.0
        for _ in range(64):
            weight.grad = torch.ones_like(weight)
            optimizer.step()

    nearest, chance, other = (weight.detach().double() for weight in weights)
    assert (nearest == 1.25).all()
    # Of 64 roundings, each with a variance of 1/32 · 31/32 units², a mean over 16,384 weights.
    deviation = 2.0**-7 * (64 * 31 / 1024) ** 0.5 / 16_384**0.5
    assert chance.mean().item() == pytest.approx(1.25 - 2.0**-6, abs=5 * deviation)
    assert not torch.equal(chance, other)


def test_a_skipped_update_a_copy_and_a_resumed_run_draw_alike() -> None:
    def after(steps: int, *, saved_at: int | None = None) -> tuple[Tensor, LowPrecision]:
        weight = nn.Parameter(torch.ones(40, 200, dtype=torch.bfloat16))
        optimizer = optimizer_of(weight, state="float8", stochastic=True)
        for step, grad in enumerate(gradients(steps, 40, 200)):
            if step == saved_at:
                saved = {key: value.clone() for key, value in optimizer.saved()[weight].items()}
                weight = nn.Parameter(weight.detach().clone())
                optimizer = optimizer_of(weight, state="float8", stochastic=True)
                optimizer.take({weight: saved}, None, step=step)
            weight.grad = grad.bfloat16()
            optimizer.step()
        return weight.detach(), optimizer

    whole, optimizer = after(6)
    assert torch.equal(whole, after(6)[0])
    assert torch.equal(whole, after(6, saved_at=3)[0])
    saved = next(iter(optimizer.saved().values()))
    assert {key: (value.dtype, value.shape) for key, value in saved.items()} == {
        "exp_avg": (torch.bfloat16, (40, 200)), "exp_avg_sq": (torch.bfloat16, (40, 200)),
    }  # fmt: skip


def test_small_tensors_keep_their_moments_in_full_and_strides_are_minded() -> None:
    small = nn.Parameter(torch.ones(64))
    assert optimizer_of(small, state="float8").saved()[small]["exp_avg"].dtype == torch.float32

    straight, turned = nn.Parameter(torch.ones(96, 64)), nn.Parameter(torch.ones(64, 96).t())
    for weight in (straight, turned):
        optimizer = optimizer_of(weight, state="float8")
        for grad in gradients(3, 96, 64):
            weight.grad = grad.clone()
            optimizer.step()
    assert torch.equal(straight, turned)
