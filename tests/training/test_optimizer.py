"""Rates and weights move as the formulas say, checked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from supernode.schema.job import OptimizerSpec
from supernode.training.optimizer import build_optimizer, learning_rate, set_rate


def rates(decay: Literal["cosine", "linear", "none"], *, warmup: int = 4, steps: int = 13) -> list[float]:
    spec = OptimizerSpec(learning_rate=2.0, warmup=warmup, decay=decay, final_ratio=0.1)
    return [learning_rate(spec, step, steps) for step in range(steps)]


def test_the_rate_climbs_in_equal_parts() -> None:
    assert rates("none")[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_the_linear_way_down_ends_at_the_final_ratio() -> None:
    # From 2 at step 4 to 0.2 at step 12, 1.8 / 8 a step.
    assert rates("linear")[4:] == pytest.approx([2.0 - 0.225 * step for step in range(9)])


def test_the_cosine_way_down_is_half_way_in_the_middle() -> None:
    down = rates("cosine")

    assert (down[4], down[12]) == (2.0, pytest.approx(0.2))
    assert down[8] == pytest.approx((2.0 + 0.2) / 2)
    assert down[6] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_runs_shorter_than_the_warm_up_and_of_one_step_have_rates() -> None:
    assert rates("cosine", warmup=100, steps=2) == [0.02, 0.04]
    assert rates("cosine", warmup=0, steps=1) == [2.0]
    assert rates("linear", warmup=1, steps=1) == [2.0]


def test_matrices_decay_and_vectors_do_not() -> None:
    layer = nn.Linear(3, 2)
    optimizer = build_optimizer(OptimizerSpec(weight_decay=0.3), list(layer.parameters()))

    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}

    assert decays == {id(layer.weight): 0.3, id(layer.bias): 0.0}


@pytest.mark.parametrize("parameters", [[nn.Parameter(torch.ones(2))], [nn.Parameter(torch.ones(2, 2))]])
def test_a_model_of_vectors_or_of_matrices_alone_has_one_group(parameters: list[nn.Parameter]) -> None:
    assert len(build_optimizer(OptimizerSpec(), parameters).param_groups) == 1


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_stage_with_nothing_to_train_has_an_optimizer_that_does_nothing(name: Literal["adamw", "sgd"]) -> None:
    optimizer = build_optimizer(OptimizerSpec(name=name), [])

    set_rate(optimizer, 0.1)
    optimizer.step()

    assert sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]) == 0


def test_sgd_moves_by_rate_times_momentum() -> None:
    weight = nn.Parameter(torch.tensor([[1.0]]))
    spec = OptimizerSpec(name="sgd", momentum=0.5, weight_decay=0.0)
    optimizer = build_optimizer(spec, [weight])
    set_rate(optimizer, 0.1)

    for _ in range(2):
        weight.grad = torch.tensor([[2.0]])
        optimizer.step()

    # 1 − 0.1·2 − 0.1·(0.5·2 + 2)
    assert float(weight.detach()) == pytest.approx(0.5)


def test_adamw_moves_by_the_rate_in_its_first_step() -> None:
    weight = nn.Parameter(torch.tensor([[1.0]]))
    optimizer = build_optimizer(OptimizerSpec(weight_decay=0.5, epsilon=1e-12), [weight])
    set_rate(optimizer, 0.1)

    weight.grad = torch.tensor([[7.0]])
    optimizer.step()

    # Decayed by rate × decay, then moved by the rate, whatever the gradient's size (Kingma and Ba, section 2.1).
    assert float(weight.detach()) == pytest.approx(1 - 0.1 * 0.5 - 0.1, abs=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("lay", [lambda t: t.t().contiguous().t(), lambda t: t.repeat(2, 2)[::2, ::2], torch.clone])
def test_weights_laid_out_in_strides_move_as_those_in_order_do(
    name: Literal["adamw", "sgd"], lay: Callable[[Tensor], Tensor]
) -> None:
    start = torch.linspace(-1, 1, 12).view(3, 4)
    grads = [torch.linspace(1, -2, 12).view(3, 4) * step for step in (1.0, -0.3, 2.0)]
    expected, found = nn.Parameter(start.clone()), nn.Parameter(lay(start).detach())
    with torch.no_grad():
        found.copy_(start)
    plain = torch.optim.AdamW([expected], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    if name == "sgd":
        plain = torch.optim.SGD([expected], lr=1e-2, momentum=0.9, foreach=False)  # type: ignore[assignment]
    ours = build_optimizer(OptimizerSpec(name=name, learning_rate=1e-2), [found, nn.Parameter(torch.ones(3, 4))])

    for grad in grads:
        expected.grad, found.grad = grad.clone(), grad.clone()  # As in a bucket: in order, whatever the weight is.
        plain.step()
        ours.step()

    assert torch.allclose(found, expected, rtol=0, atol=1e-7)  # One unit in the last place of 1.


def test_parts_of_a_weight_laid_out_in_strides_move_as_a_whole_one_in_order_does(
    together: Callable[..., list[Any]],
) -> None:
    start, factor = torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(2, -1, 24).view(4, 6)

    def train(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2,))
        whole, strided = nn.Parameter(start.clone()), start.t().contiguous().t()
        part = start.chunk(2)[rank].clone()
        split = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], shape=strided.shape, stride=strided.stride()))
        plain = torch.optim.AdamW([whole], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
        ours = build_optimizer(OptimizerSpec(learning_rate=1e-2), [split])
        for _ in range(3):
            plain.zero_grad()
            ours.zero_grad()
            (whole.square() * factor).sum().backward()
            (split.to_local().square() * factor.chunk(2)[rank]).sum().backward()
            plain.step()
            ours.step()
        return float((split.to_local() - whole.chunk(2)[rank]).detach().abs().max())

    assert max(together(train)) <= 1e-7  # One unit in the last place of 1.
