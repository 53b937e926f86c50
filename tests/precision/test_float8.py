"""Products in float8 are near float32's, as three bits allow, forward and backward, and all but exactly torchao's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from supernode.errors import CapacityError, ModelError
from supernode.precision.float8 import check_device, layers_of, multiply_in_float8


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach().float() - other.detach().float()).norm() / other.detach().float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(4, 8), (3, 7)])
def test_a_layer_and_its_gradients_are_near_float32s(dtype: torch.dtype, rows: tuple[int, int]) -> None:
    torch.manual_seed(0)
    low = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32, bias=False)).to(dtype)
    full = copy.deepcopy(low).float()
    assert multiply_in_float8(low) == ["0", "2"]
    x, grad = torch.randn(*rows, 64, dtype=dtype), torch.randn(*rows, 32, dtype=dtype)
    inputs = [x.clone().requires_grad_(), x.float().requires_grad_()]

    outputs = [model(given) for model, given in zip((low, full), inputs, strict=True)]
    outputs[0].backward(grad)
    outputs[1].backward(grad.float())

    assert outputs[0].dtype == dtype
    # e4m3 rounds by 2.6% on average, e5m2 by 5.2%; of two products the errors add up in squares.
    assert apart(outputs[0], outputs[1]) < 0.07
    assert apart(inputs[0].grad, inputs[1].grad) < 0.12
    for ours, theirs in zip(low.parameters(), full.parameters(), strict=True):
        assert ours.grad.dtype == dtype
        assert apart(ours.grad, theirs.grad) < 0.12


def test_a_layer_is_what_torchao_makes_of_it() -> None:
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16()
    theirs = float8.convert_to_float8_training(copy.deepcopy(ours))
    multiply_in_float8(ours)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    given = [x.clone().requires_grad_(), x.clone().requires_grad_()]

    outputs = [model(part) for model, part in zip((ours, theirs), given, strict=True)]
    for output in outputs:
        output.backward(torch.ones_like(output) * torch.linspace(-1, 1, 96))

    # Scales are computed in another order: a number on the edge between two of float8's may fall to either side.
    assert apart(outputs[0], outputs[1]) < 0.005
    assert apart(given[0].grad, given[1].grad) < 0.005
    assert apart(ours[0].weight.grad, theirs[0].weight.grad) < 0.005


def test_heads_and_odd_sizes_stay_as_they_are() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 48), "odd": nn.Linear(32, 40), "head": nn.Linear(32, 32)})

    assert multiply_in_float8(model) == ["a"]
    assert layers_of(model) == (1, 3)


def test_the_last_layer_is_the_head_whatever_its_name() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))

    assert multiply_in_float8(model, has_head=True) == ["0"]


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="of 2 linear layers none") as caught:
        multiply_in_float8(nn.Sequential(nn.Linear(30, 48), nn.Linear(48, 32)), has_head=True)

    assert "`arithmetic`" in caught.value.hint


def test_a_device_without_float8_is_refused_with_the_reason() -> None:
    check_device(torch.device("cpu"))

    with pytest.raises(CapacityError, match="float8 products on mps are unknown"):
        check_device(torch.device("mps"))
