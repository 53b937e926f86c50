"""Overlap changes no number of a run, what is not hidden is told as `sync`, and what nobody uses is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from one_step import feed_of, plan_of
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import place_of
from supernode.parallel.tensor import cross_entropy
from supernode.schema.job import OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Communication
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Outcome, Stepper

Together = Callable[..., list[Any]]
SHAPE = DecoderShape(layers=4, width=16, heads=2, vocabulary=32, tied=True)
SLOWNESS = 0.02  # seconds


def stepper_of(rank: int, *, overlap: bool, idle: bool = False, **degrees: Any) -> Stepper:
    plan = plan_of(SHAPE, {"data": 2} | degrees, micro_batches=4)
    job = replace(
        plan.job, communication=Communication(overlap=overlap, bucket=4096), steps=4,
        optimizer=OptimizerSpec(name="adamw", learning_rate=1e-2, warmup=0, clip=0.5),
    )  # fmt: skip
    plan = replace(plan, job=job)
    place = place_of(plan.layout, rank)
    parts = assemble(plan, place)
    if idle:
        parts.modules[0].register_parameter("idle", torch.nn.Parameter(torch.ones(3)))
    optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
    return Stepper(plan, place, parts, feed_of(plan, place, short=0), optimizer, cross_entropy)


def told(outcome: Outcome) -> tuple[float, float]:
    return outcome.loss, outcome.norm


@pytest.mark.parametrize("degrees", [{}, {"pipeline": 2}, {"pipeline": 2, "schedule": "gpipe"}])
def test_a_run_is_the_same_to_the_bit_with_and_without_overlap(together: Together, degrees: dict[str, Any]) -> None:
    def both(rank: int) -> list[Any]:
        steppers = [stepper_of(rank, overlap=overlap, **degrees) for overlap in (True, False)]
        curves = [[told(stepper.train(0)) for _ in range(4)] for stepper in steppers]
        weights = [[p.detach().clone() for _, p in stepper.parts.parameters()] for stepper in steppers]
        return [curves, all(torch.equal(one, other) for one, other in zip(*weights, strict=True))]

    answers = together(both, ranks=2 * degrees.get("pipeline", 1))
    for (overlapped, plain), alike in answers:
        assert overlapped == plain
        assert overlapped == answers[0][0][0]
        assert overlapped[-1][0] < overlapped[0][0]
        assert alike


@dataclass
class Slow:
    """A sum that takes its time once it is waited for."""

    flat: Tensor

    def wait(self) -> None:
        time.sleep(SLOWNESS)
        dist.all_reduce(self.flat)


def test_what_a_step_waits_for_is_told_as_sync_and_idle_parameters_are_named(together: Together) -> None:
    def wait(rank: int) -> tuple[int, float, float, list[str]]:
        stepper = stepper_of(rank, overlap=True, idle=True)
        sync = stepper.replicas
        assert sync is not None
        stepper.train(0)
        sync.start = lambda flat, key="": Slow(flat)
        begun = time.perf_counter()
        parts = stepper.train(1).parts
        return len(sync.buckets), parts["sync"], time.perf_counter() - begun - sum(parts.values()), stepper.unused

    for buckets, seconds, unaccounted, unused in together(wait):
        assert buckets >= 3
        assert seconds >= buckets * SLOWNESS
        assert unaccounted >= 0
        assert unused == ["idle"]
