"""How long does one step of a plan take? The forecast's closed form, given the plan's own cut, cards and trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from supernode.forecast.efficiency import CardModel
from supernode.forecast.pipeline import forward_shares
from supernode.forecast.rates import card_of
from supernode.forecast.times import accumulation_time, stage_parts, step_parts
from supernode.hardware.machine import Machine
from supernode.planning.memory import moments, strategy_of, trainer, with_state
from supernode.planning.work import shape_of
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan, Stage, StepTime
from supernode.workload.flops import token_flops
from supernode.workload.shape import decoder_shape
from supernode.workload.strategy import Software, Strategies

# Our own trainer as it is without a job at hand: AdamW in bfloat16, nothing clipped.
TRAINER = trainer()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds that one micro-batch takes in one stage.

    Attributes:
        forward: computing, without waiting for axes.
        backward: likewise.
        tensor_forward: what a pass waits for its axes (tensor, context, expert), which nothing hides.
        tensor_backward: likewise.
    """

    stage: Stage
    forward: float
    backward: float
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0

    @property
    def computing(self) -> float:
        """Forward and backward, without waiting for axes."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """Forward and backward with everything."""
        return self.computing + self.tensor_forward + self.tensor_backward


def flops_per_step(shape: DecoderShape, tokens: int, sequence: int) -> float:
    """Return the floating-point operations of one step over all cards, as `token_flops` counts them.

    Args:
        tokens: that the step trains on.
        sequence: tokens in a sample.
    """
    return tokens * token_flops(decoder_shape(shape), sequence)


def stage_times(plan: Plan, machine: Machine) -> tuple[StageTime, ...]:
    """Return the seconds of every stage, in order; none for the user's own module."""
    shape = shape_of(plan)
    if shape is None:
        return ()
    model, ways = decoder_shape(shape), strategy_of(plan)
    software, card = software_of(plan, machine), at_work(plan, machine)
    one = stage_parts(model, ways, card, software)
    ahead = forward_shares(ways, software)
    waits = {"tensor": one.tensor, "context": one.context, "expert": one.expert}
    early = sum(float(wait * ahead[axis]) for axis, wait in waits.items())
    late = sum(float(wait) for wait in waits.values()) - early
    adding = plan.layout.pipeline * float(accumulation_time(model, ways, card, software))
    made = []
    for stage in plan.stages:
        share = (stage.last - stage.first) / shape.layers
        ends = stage.heads * one.head.forward + stage.embeds * one.embedding / 2
        back = stage.heads * one.head.backward + stage.embeds * one.embedding / 2
        made.append(
            StageTime(
                stage=stage,
                forward=float(share * one.body.forward + ends),
                backward=float(share * (one.body.backward + adding) + back),
                tensor_forward=share * early,
                tensor_backward=share * late,
            )
        )
    return tuple(made)


def step_time(plan: Plan, machine: Machine) -> StepTime | None:
    """Return the prediction; None for the user's own module."""
    shape = shape_of(plan)
    if shape is None:
        return None
    parts = step_parts(decoder_shape(shape), strategy_of(plan), at_work(plan, machine), software_of(plan, machine))
    return StepTime(
        compute=float(parts.compute + parts.launch),
        tensor=float(parts.tensor),
        pipeline=float(parts.bubble + parts.transfer),
        data=float(parts.data),
        optimizer=float(parts.optimizer),
        overhead=float(parts.step + parts.host),
        context=float(parts.context),
        expert=float(parts.expert),
    )


def software_of(plan: Plan, machine: Machine) -> Software:
    """Return what our trainer does on the plan's job, as far as time depends on it."""
    job = plan.job
    does = trainer(
        precision=job.precision, clips=job.optimizer.clip > 0, moments=moments(job),
        copies=plan.layout.copies > 1 and plan.layout.sharding == "replicas",
    )  # fmt: skip
    return with_sums(with_state(does, job), strategy_of(plan), is_core=machine.card.kind == "cpu")


def with_sums(does: Software, ways: Strategies, *, is_core: bool) -> Software:
    """Return our trainer with the bytes that it adds and copies, which follow from the strategies.

    All but the first micro-batch's gradients are added to a sum. FSDP copies what it gathers, twice a micro-batch, to
    its tensors, and the sums once more before they are scattered (torch.distributed.fsdp, _fsdp_collectives.py).

    Args:
        is_core: cards are a computer's cores, which do not compute while they send.
    """
    added = 3 * ways.element * (1 - 1 / ways.micro_batches)
    copied = 4 * ways.element + 2 * ways.element / ways.micro_batches
    does = replace(does, accumulate_bytes=added, shard_bytes=copied + added)
    if not is_core:
        return does
    return replace(does, overlaps_data=False, overlaps_pipeline=False, gathers_by_layer=True)


def at_work(plan: Plan, machine: Machine) -> CardModel:
    """Return the plan's card with what surrounds it, where the plan's cards lie.

    Groups are laid out as if the first card were a node's first. Where it is not, or cards are no one run, only as
    many neighbours as all runs have in common lie surely within a node.
    """
    card = card_of(machine, plan.ranks)
    inner, first, last = card.wires.node_cards, min(plan.cards), max(plan.cards)
    if first // inner == last // inner:
        return card
    starts = [place for place, each in enumerate(plan.cards) if place and each != plan.cards[place - 1] + 1]
    common = math.gcd(inner, first, *starts, *(plan.cards[place] for place in starts))
    return replace(card, wires=replace(card.wires, node_cards=common))
