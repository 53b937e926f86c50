"""A card that computes or remembers wrongly and says nothing is named by its copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from one_step import feed_of, loss_of, plan_of
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import place_of
from supernode.parallel.tensor import local
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.training.checking import Comparison, Difference, flip_a_bit, odd_ones
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Stepper

SHAPE = DecoderShape(layers=2, width=16, heads=2, vocabulary=32)
EXPERTS = DecoderShape(layers=2, width=16, heads=2, vocabulary=32, experts=2, experts_per_token=1)


def watched(plan: Plan, rank: int) -> tuple[Comparison, Stepper, torch.optim.Optimizer]:
    """Take two steps, between which copies must be alike."""
    place = place_of(plan.layout, rank)
    parts = assemble(plan, place)
    optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
    stepper = Stepper(plan, place, parts, feed_of(plan, place, short=0), optimizer, loss_of(plan, place))
    comparison = Comparison(parts, optimizer, place)
    for number in range(2):
        stepper.train(number)
        assert comparison.look() is None
    return comparison, stepper, optimizer


def test_of_four_copies_the_one_with_another_bit_is_named_and_what_it_is_in(together: Callable[..., list[Any]]) -> None:
    def look(rank: int) -> list[Difference | None]:
        comparison, stepper, _ = watched(plan_of(SHAPE, {"data": 4}, batch=8, micro_batches=1), rank)
        found = []
        if rank == 2:
            flip_a_bit(stepper.parts)
        found.append(comparison.look())
        if rank == 2:
            flip_a_bit(stepper.parts)  # Twice is as it was.
        found.append(comparison.look())
        gradient = local(stepper.trained[-1].grad)
        if rank == 3:
            gradient.view(-1)[0] += 1
        found.append(comparison.look())
        return found

    everyone = together(look, ranks=4)

    weights = Difference(ranks=(2,), among=(0, 1, 2, 3), what="weights or moments")
    gradients = Difference(ranks=(3,), among=(0, 1, 2, 3), what="summed gradients")
    assert everyone == [[weights, None, gradients]] * 4


def test_copies_are_found_behind_stages_and_experts_and_shards_have_none(together: Callable[..., list[Any]]) -> None:
    def staged(rank: int) -> Difference | None:
        comparison, stepper, _ = watched(plan_of(SHAPE, {"data": 2, "pipeline": 2}, micro_batches=2), rank)
        if rank == 3:
            flip_a_bit(stepper.parts)
        return comparison.look()

    def spread(rank: int) -> Difference | None:
        comparison, stepper, _ = watched(plan_of(EXPERTS, {"data": 4, "expert": 2}, micro_batches=1), rank)
        own = next(p for p in stepper.trained if "expert" in str(getattr(p, "device_mesh", "")))
        if rank == 0:
            local(own).detach().view(-1)[0] += 1
        return comparison.look()

    def sharded(rank: int) -> bool:
        comparison, _, _ = watched(plan_of(SHAPE, {"data": 2, "sharding": "fsdp"}, micro_batches=1), rank)
        return comparison.is_needed

    # Of two, it is not known which one is wrong; the other stage's copies agree.
    both = Difference(ranks=(2, 3), among=(2, 3), what="weights or moments")
    assert together(staged, ranks=4) == [None, None, both, both]
    # Experts 0 lie on ranks 0 and 2, experts 1 on the others.
    odd = Difference(ranks=(0, 2), among=(0, 2), what="weights or moments")
    assert together(spread, ranks=4) == [odd, None, odd, None]
    assert together(sharded, ranks=2) == [False, False]


@pytest.mark.parametrize(
    ("digests", "odd"),
    [([5, 5, 5], ()), ([5, 6, 5], (1,)), ([5, 6], (0, 1)), ([5, 5, 6, 6], (0, 1, 2, 3)), ([1, 5, 2, 5, 5], (0, 2))],
)  # fmt: skip
def test_the_most_are_right_and_without_a_most_nobody_is(digests: list[int], odd: tuple[int, ...]) -> None:
    assert odd_ones(digests) == odd
