"""What is computed again frees the memory that was forecast, and not one bit of a gradient shows it.

A fault seen elsewhere: the second run draws a new dropout mask, so that the gradient is another sample's
(https://github.com/allenai/OLMo-core/pull/828).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from one_step import MACHINE, alone, one_step, plan_of
from supernode.errors import ModelError, SpecError
from supernode.forecast.memory import memory_parts
from supernode.models.decoder import Decoder
from supernode.parallel.mesh import place_of
from supernode.parallel.recompute import recompute_block, recompute_user
from supernode.planning.memory import strategy_of, trainer
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Parallelism
from supernode.workload.shape import decoder_shape

Together = Callable[..., list[Any]]
SHAPE = DecoderShape(layers=3, width=64, heads=4, kv_heads=2, hidden=192, vocabulary=64)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_the_same_bit_for_bit(together: Together, dropout: float) -> None:
    shape = DecoderShape(layers=3, width=16, heads=4, kv_heads=2, vocabulary=13, dropout=dropout)
    plans = [plan_of(shape, {"recompute": what}) for what in ("none", "selective", "full")]

    def run(rank: int) -> list[dict[str, Tensor]]:
        return [one_step(plan, place_of(plan.layout, rank))[1] for plan in plans]

    [(kept, *others)] = together(run, ranks=1)
    for other in others:
        for name, grad in kept.items():
            assert torch.equal(grad, other[name]), name


def saved_bytes(shape: DecoderShape, what: str) -> int:
    """Return what a micro-batch of 4 samples of 64 tokens leaves in all blocks for the backward, weights aside."""
    model = Decoder(shape)
    for block in model.blocks.values():
        recompute_block(block, what)
    x_BTD = torch.randn(4, 64, shape.width, requires_grad=True)
    tables = model._rotary_for(x_BTD)
    not_ours = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *tables)}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in not_ours:
            held[place] = tensor  # Alive, so that no place is used twice.
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in model.blocks.values():
            x_BTD = block(x_BTD, *tables)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def forecast_bytes(shape: DecoderShape, what: str, *, flash: bool) -> float:
    job = JobSpec(
        model=shape, batch=4, data=DataSpec(sequence=64), parallelism=Parallelism(data=1, recompute=what),  # type: ignore[arg-type]
    )  # fmt: skip
    does = replace(trainer(precision="float32"), flash=flash)
    return float(memory_parts(decoder_shape(shape), strategy_of(make_plan(job, MACHINE)), does).activations)


def test_memory_falls_as_forecast() -> None:
    kept, less, least = (saved_bytes(SHAPE, what) for what in ("none", "selective", "full"))

    # Each block's input, 4 × 64 × 64 float32, and nothing else.
    assert least == forecast_bytes(SHAPE, "full", flash=True) == 3 * 4 * 64 * 64 * 4
    # Norms' and softmax's statistics are not forecast, nor is an add's result that the CPU keeps.
    assert kept == pytest.approx(forecast_bytes(SHAPE, "none", flash=True), rel=0.06)
    # Flash attention keeps no scores; what its second run saves is one statistic per query and head.
    assert kept - less == 3 * 4 * 64 * 4 * 4


def test_selective_recomputation_frees_the_scores() -> None:
    shape = replace(SHAPE, kv_heads=4)
    with sdpa_kernel(SDPBackend.MATH):
        kept, less = (saved_bytes(shape, what) for what in ("none", "selective"))

    freed = forecast_bytes(shape, "none", flash=False) - forecast_bytes(shape, "selective", flash=False)
    assert kept - less == freed == 3 * 4 * 4 * 64 * 64 * 4  # layers, samples, heads, scores of float32


class Layer(nn.Module):
    """A user's layer that draws from three generators and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + random.random() + float(np.random.rand())
        return x + scale * F.dropout(torch.tanh(self.norm(self.inner(x))), 0.4, self.training)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def leaves() -> nn.Module:
    parts = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4)]
    return nn.Sequential(*parts, nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 8))


@pytest.mark.parametrize("build", [Stacked, leaves, lambda: nn.Sequential(nn.Linear(8, 8), Layer(), Layer())])
def test_a_users_module_trains_as_it_would_without(build: Callable[[], nn.Module]) -> None:
    def train(what: str) -> tuple[dict[str, Tensor], int, tuple[float, float, float]]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)
        model = build()
        recompute_user(model, what)
        passed = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal passed
            passed += 1
            return tensor

        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(torch.randn(5, 8)).square().sum()
            loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
        return found | dict(model.named_buffers()), passed, drawn

    plain, kept, drawn = train("none")
    again, less, drawn_after = train("full")

    assert less < kept
    assert drawn == drawn_after
    assert plain.keys() == again.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, again[name]), name


def test_what_cannot_be_computed_again_is_refused_with_its_key() -> None:
    with pytest.raises(ModelError, match=r"parallelism\.recompute.* is full, and nothing repeats") as nothing:
        recompute_user(nn.Linear(2, 2), "full")
    job = JobSpec(
        model="net.py:build", data=DataSpec(dataset="d.py:f"), parallelism=Parallelism(data=1, recompute="selective")
    )
    with pytest.raises(SpecError, match=r"parallelism\.recompute.* is selective") as own:
        make_plan(job, MACHINE)
    with pytest.raises(SpecError, match=r"parallelism\.recompute.*zero_bubble") as late:
        plan_of(SHAPE, {"pipeline": 2, "schedule": "zero_bubble", "recompute": "full"})

    assert all("recompute" in error.value.hint or "none" in error.value.hint for error in (nothing, own, late))
    assert alone(plan_of(SHAPE, {"recompute": "full"})).layout.recompute == "none"
