"""Weights of two bytes compute as their float32 casts do, and no cast outlives its layer."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from supernode.precision.casting import cast_weights, compute_in_float32


class Model(nn.Module):
    """Layers that casts differ for: tied, a parameter of its own, attention, convolution, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)
        self.scale = nn.Parameter(torch.full((32,), 1.3))
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * self.scale
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(self.mix(x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_those_of_the_casts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low = Model()
    cast_weights(low, dtype)
    full = copy.deepcopy(low).float()
    compute_in_float32(low)
    tokens = torch.randint(0, 16, (4, 8))

    out, wanted = low(tokens), full(tokens)
    out.square().sum().backward()
    wanted.square().sum().backward()

    assert out.dtype == torch.float32
    assert torch.equal(out, wanted)
    for (name, parameter), reference in zip(low.named_parameters(), full.parameters(), strict=True):
        assert parameter.dtype == parameter.grad.dtype == dtype, name
        if parameter is low.table.weight:  # Its two uses are rounded before they are added.
            assert float((parameter.grad - reference.grad).norm() / reference.grad.norm()) < 0.01, name
        else:
            assert torch.equal(parameter.grad, reference.grad.to(dtype)), name
    assert low.norm.running_mean.dtype == torch.float32
    assert torch.equal(low.norm.running_var, full.norm.running_var)
    assert low.state_dict().keys() == full.state_dict().keys()


def test_no_cast_is_kept_for_backward_also_where_layers_are_computed_again() -> None:
    layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    cast_weights(layers, torch.bfloat16)
    compute_in_float32(layers)
    casts: list[weakref.ref[Tensor]] = []
    for layer in layers:
        run = layer.forward.forward
        layer.forward.forward = lambda x, layer=layer, run=run: (casts.append(weakref.ref(layer.weight)), run(x))[1]

    for again in (False, True):
        x = torch.randn(2, 256, requires_grad=True)
        out = checkpoint(layers, x, use_reentrant=False) if again else layers(x)
        gc.collect()
        assert len(casts) == 4
        assert not any(cast() is not None for cast in casts), "a cast lives on between forward and backward"
        out.sum().backward()
        assert all(layer.weight.dtype == torch.bfloat16 and layer.weight.grad is not None for layer in layers)
        casts.clear()


def test_an_error_inside_leaves_the_weights_where_they_were() -> None:
    layer = nn.Linear(8, 8)
    cast_weights(layer, torch.bfloat16)
    compute_in_float32(layer)

    with pytest.raises(RuntimeError):
        layer(torch.ones(3, 7))

    assert layer.weight.dtype == torch.bfloat16
    assert isinstance(layer.weight, nn.Parameter)
