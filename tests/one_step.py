"""One step of a plan on this rank, with its gradients left whole: what the tests of axes compare with one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from supernode.data.sampler import Sampler
from supernode.hardware.assemble import build_machine
from supernode.parallel.assemble import Parts, assemble
from supernode.parallel.mesh import Place
from supernode.parallel.tensor import IGNORED, SplitCrossEntropy, cross_entropy, local
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism
from supernode.training.data import Feed, TokenWindows
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Loss, Outcome, Stepper

MACHINE = build_machine(card_count=8, card="H100")
SEQUENCE = 8


def plan_of(shape: DecoderShape, degrees: dict[str, object], *, batch: int = 8, micro_batches: int = 2) -> Plan:
    """Return the plan of a step whose weights stay as they are: the rate is 0, and nothing is clipped."""
    job = JobSpec(
        model=shape, batch=batch, gradient_accumulation=micro_batches, data=DataSpec(sequence=SEQUENCE), seed=3,
        parallelism=Parallelism(**{"data": 1} | degrees),  # type: ignore[arg-type]
        optimizer=OptimizerSpec(name="sgd", learning_rate=0, momentum=0, weight_decay=0, clip=0),
    )  # fmt: skip
    return make_plan(job, MACHINE, vocabulary=shape.vocabulary)


def alone(plan: Plan) -> Plan:
    """Return the same step on one process: one stage, all samples of a micro-batch at once."""
    job = replace(plan.job, parallelism=Parallelism(data=1))
    return make_plan(job, MACHINE, vocabulary=plan.vocabulary)


def feed_of(plan: Plan, place: Place | None, *, short: int) -> Feed:
    """Return random text of one epoch: one step, which lacks `short` samples of a whole batch."""
    count = plan.job.batch - short
    tokens = np.random.default_rng(5).integers(0, plan.vocabulary, count * SEQUENCE + 1)
    return Feed(
        plan=plan, data=place.data if place else 0, context=place.context if place else 0,
        train=TokenWindows(tokens, SEQUENCE), held_out=None,
        sampler=Sampler(count, plan.job.batch, plan.job.seed, drop_last=False), loss=cross_entropy,
        count=lambda target: int((target != IGNORED).sum()), pads=True,
    )  # fmt: skip


def take(plan: Plan, place: Place, *, short: int = 0) -> tuple[Outcome, Parts]:
    """Take one step; returns what it came to, and what this rank holds with its gradients."""
    parts = assemble(plan, place)
    sharpen(parts)
    optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
    feed, loss = feed_of(plan, place, short=short), loss_of(plan, place)
    return Stepper(plan, place, parts, feed, optimizer, loss).train(0), parts


def loss_of(plan: Plan, place: Place) -> Loss:
    """Return the loss of a decoder's end."""
    if plan.layout.tensor == 1:
        return cross_entropy
    return SplitCrossEntropy(place.group("tensor"), plan.vocabulary)


def one_step(plan: Plan, place: Place, *, short: int = 0) -> tuple[Outcome, dict[str, Tensor], Parts]:
    """Take one step; returns what it came to and the whole gradient of every parameter that this rank holds."""
    outcome, parts = take(plan, place, short=short)
    return outcome, {name: whole(parameter.grad) for name, parameter in parts.parameters()}, parts


@torch.no_grad()
def sharpen(parts: Parts) -> None:
    """Scale first values up, so that attention and routers are far from even and no gradient is near rounding."""
    for _, parameter in parts.parameters():
        local(parameter).mul_(8 if parameter.ndim > 1 else 1)


def whole(grad: Tensor | None) -> Tensor:
    """Return a gradient without the cuts; all ranks that share it call this in one order."""
    assert grad is not None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
