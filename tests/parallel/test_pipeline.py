"""Weights' gradients that a schedule puts off are those of a whole backward, and hooks see each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from one_step import feed_of, plan_of, sharpen
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import place_of
from supernode.parallel.tensor import cross_entropy
from supernode.passes.pipeline import _backward_weights
from supernode.schema.model import DecoderShape
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Stepper

Together = Callable[..., list[Any]]


class Twice(nn.Module):
    """Uses one matrix at two depths, and another one between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(torch.tanh(self.between(torch.tanh(self.shared(x))))))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("kind", [Twice, Unused])
def test_the_two_parts_of_a_backward_are_the_whole(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4, requires_grad=True)
    model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()} | {"input": x.grad}
    model.zero_grad()
    fired = dict.fromkeys(model.parameters(), 0)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.update({p: fired[p] + 1}))
    again = x.detach().requires_grad_()

    _, groups = stage_backward_input([model(again).square().sum()], None, [again], model.parameters())
    before = [p.grad for p in model.parameters()]
    for group in sorted(groups, key=lambda group: -len(group["intermediates"])):
        _backward_weights(group)

    assert before == [None] * len(before)
    found = {name: p.grad for name, p in model.named_parameters()} | {"input": again.grad}
    for name, grad in expected.items():
        assert (found[name] is None) == (grad is None)
        assert grad is None or torch.allclose(found[name], grad, atol=1e-6), name  # type: ignore[arg-type]
    assert all(count == (p.grad is not None) for p, count in fired.items())


def test_every_hook_fires_once_a_micro_batch_under_zero_bubble(together: Together) -> None:
    plan = plan_of(
        DecoderShape(layers=3, width=16, heads=2, vocabulary=11),
        {"pipeline": 3, "schedule": "zero_bubble"}, batch=8, micro_batches=4,
    )  # fmt: skip

    def count(rank: int) -> dict[str, int]:
        place = place_of(plan.layout, rank)
        parts = assemble(plan, place)
        sharpen(parts)
        fired = dict.fromkeys((name for name, _ in parts.parameters()), 0)
        for name, parameter in parts.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired[name] + 1}))
        optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
        Stepper(plan, place, parts, feed_of(plan, place, short=0), optimizer, cross_entropy).train(0)
        return fired

    for fired in together(count, ranks=3):
        assert set(fired.values()) == {4}, fired


def test_sums_over_copies_leave_from_inside_the_weights_passes(together: Together) -> None:
    plan = plan_of(
        DecoderShape(layers=2, width=16, heads=2, vocabulary=11),
        {"pipeline": 2, "data": 2, "schedule": "zero_bubble"}, batch=8, micro_batches=2,
    )  # fmt: skip

    def count(rank: int) -> tuple[int, int]:
        place = place_of(plan.layout, rank)
        parts = assemble(plan, place)
        optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
        stepper = Stepper(plan, place, parts, feed_of(plan, place, short=0), optimizer, cross_entropy)
        stepper.train(0)  # Learns in which order gradients come.
        assert stepper.replicas is not None
        finish, gone = stepper.replicas.finish, []

        def spied(*given: Any) -> float:
            gone.append(sum(bucket.work is not None for bucket in stepper.replicas.buckets))  # type: ignore[union-attr]
            return finish(*given)

        vars(stepper.replicas)["finish"] = spied
        stepper.train(1)
        return gone[0], len(stepper.replicas.buckets)

    for gone, buckets in together(count, ranks=4):
        assert gone == buckets > 0
