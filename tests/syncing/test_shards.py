"""Sharded gradients travel during the last backward, and waiting late changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from one_step import feed_of, plan_of, sharpen, whole
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import place_of
from supernode.parallel.tensor import cross_entropy
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Communication
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Stepper

Together = Callable[..., list[Any]]
SHAPE = DecoderShape(layers=3, width=16, heads=2, vocabulary=32, tied=False)


def gradients(rank: int, *, overlap: bool, **degrees: Any) -> tuple[float, list[int], list[Tensor]]:
    """Take one step of two micro-batches; returns its loss, what was sent before each backward pass, and gradients."""
    plan = plan_of(SHAPE, {"data": 2, "sharding": "fsdp"} | degrees)
    plan = replace(plan, job=replace(plan.job, communication=Communication(overlap=overlap)))
    place = place_of(plan.layout, rank)
    parts = assemble(plan, place)
    sharpen(parts)
    sent: list[int] = []

    def noting(output: Tensor, target: Tensor) -> Tensor:
        sent.append(len(stepper.shards))
        return cross_entropy(output, target)

    optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
    stepper = Stepper(plan, place, parts, feed_of(plan, place, short=0), optimizer, noting)
    waiting: list[int] = []
    finish = stepper.shards.finish

    def noted() -> float:
        waiting.append(len(stepper.shards))
        return finish()

    stepper.shards.finish = noted  # type: ignore[method-assign]
    outcome = stepper.train(0)
    return outcome.loss, sent + waiting, [whole(parameter.grad) for _, parameter in parts.parameters()]


@pytest.mark.parametrize(("degrees", "ranks"), [({}, 2), ({"pipeline": 2}, 4)])
def test_reduce_scatters_leave_in_the_last_backward_alone_and_give_the_same_bits(
    together: Together, degrees: dict[str, int], ranks: int
) -> None:
    def both(rank: int) -> list[Any]:
        return [gradients(rank, overlap=overlap, **degrees) for overlap in (True, False)]

    for (loss, sent, grads), (other_loss, never_sent, others) in together(both, ranks=ranks):
        assert loss == other_loss
        assert len(grads) == len(others)
        assert all(torch.equal(grad, other) for grad, other in zip(grads, others, strict=True))
        # Neither micro-batch's loss saw one on its way. At the end those of all sharded modules were: three blocks and
        # what holds them; on a stage one or two blocks and what holds them.
        assert not any(sent[:-1])
        assert sent[-1] in ((2, 3) if degrees else (4,))
        assert not any(never_sent)
