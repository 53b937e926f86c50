"""What any rank knows after the first step is told, not only what the first one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from one_step import MACHINE, feed_of, plan_of
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import place_of
from supernode.parallel.tensor import cross_entropy
from supernode.planning.planner import make_plan
from supernode.schema.model import DecoderShape
from supernode.training.notes import notes_of_all
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Stepper

Together = Callable[..., list[Any]]


def test_a_later_stage_is_heard_and_trials_count_to_no_step(together: Together) -> None:
    shape = DecoderShape(layers=2, width=32, heads=2, hidden=64, vocabulary=16)
    plan = plan_of(shape, {"pipeline": 2})
    plan = make_plan(replace(plan.job, arithmetic="float8"), MACHINE, vocabulary=16)

    def train(rank: int) -> tuple[dict[str, str], float]:
        place = place_of(plan.layout, rank)
        parts = assemble(plan, place)
        optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
        feed = feed_of(plan, place, short=0)
        feed.held_out = feed.train
        stepper = Stepper(plan, place, parts, feed, optimizer, cross_entropy)
        stepper.train(0)
        if rank == 1:
            stepper._idle.add(dict(parts.parameters())["blocks.1.mlp.up.weight"])
        notes = notes_of_all(stepper)
        stepper.evaluate()
        return notes, stepper.passes.seconds

    (notes, first), (nothing, second) = together(train)

    # Seven layers in each of two blocks; the head stays as it is.
    assert notes == {
        "parameters without a gradient": "blocks.1.mlp.up.weight",
        "products in float8": "14 of 15 linear layers",
    }
    assert nothing == {}
    assert first == second == 0.0
