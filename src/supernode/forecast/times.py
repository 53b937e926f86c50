"""How long does a step take? A closed form over arrays of strategies, each part being what nothing hides."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from supernode.forecast.axes import (
    Gather,
    context_time,
    data_waits,
    expert_time,
    host_time,
    meeting_time,
    ring,
    tensor_time,
)
from supernode.forecast.efficiency import CardModel
from supernode.forecast.kernels import PassTimes, pass_times
from supernode.forecast.memory import card_parameters, expert_copies, rank_shares
from supernode.forecast.pipeline import bubble_time, forward_shares, left_open, transfer_time
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import ZERO_BUBBLE, Software, Strategies
from supernode.workload.sublayers import (
    attention_demand,
    embedding_traffic,
    head_demand,
    mamba_demand,
    mixture_demand,
    mlp_demand,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepParts:
    """Seconds of one step by part, for each strategy.

    Attributes:
        compute: matrix products and memory-bound operations of the slowest stage.
        launch: waiting for the host to launch.
        tensor: waiting for the tensor axis.
        context: waiting for keys and values of the context axis.
        expert: waiting for tokens on their way to experts and back.
        bubble: waiting for the pipeline to fill and drain.
        transfer: waiting for activations between stages.
        data: waiting for gradients, and for sharded weights.
        optimizer: the update.
        step: loader, gradient norm, scalars.
        host: what keeping the axes going costs a host that cannot compute meanwhile.
    """

    compute: Numbers
    launch: Numbers
    tensor: Numbers
    context: Numbers
    expert: Numbers
    bubble: Numbers
    transfer: Numbers
    data: Numbers
    optimizer: Numbers
    step: Numbers
    host: Numbers = field(default_factory=lambda: np.zeros(()))

    @property
    def total(self) -> Numbers:
        """Seconds in all."""
        busy = self.compute + self.launch + self.tensor + self.context + self.expert
        return busy + self.bubble + self.transfer + self.data + self.optimizer + self.step + self.host


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageParts:
    """One micro-batch on one pipeline rank: all of the model's sublayers over the stages, and the ends.

    Attributes:
        body: sums over all sublayers of the whole model.
        head: the head's.
        embedding: the embedding's.
        tensor: seconds of the tensor axis, whole body.
        context: likewise.
        expert: likewise.
    """

    body: PassTimes
    head: PassTimes
    embedding: Numbers
    tensor: Numbers
    context: Numbers
    expert: Numbers


def step_parts(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, gather: Gather = ring
) -> StepParts:
    """Return the parts of one step's time; all arguments broadcast.

    Args:
        gather: how gradients and sharded weights travel over the data axis.
    """
    stage = stage_parts(model, ways, card, software)
    most, last = rank_shares(model, ways)
    body = stage.body.total + stage.tensor + stage.context + stage.expert
    ends = stage.head.total, stage.embedding
    middle = most * body
    final = last * body + ends[0] + np.where(ways.pipeline > 1, 0, ends[1])
    slow = np.where(ways.pipeline > 1, np.maximum(middle, final), final)
    many = ways.micro_batches
    in_ends = np.where((ways.pipeline > 1) & (middle >= final), 0.0, ends[0] + np.where(ways.pipeline > 1, 0, ends[1]))
    weight = (slow - in_ends) / np.maximum(body, 1e-12)  # of the body, so that parts add up to the slowest stage's
    whole = body + ends[0] + ends[1]
    added = accumulation_time(model, ways, card, software)
    # All ranks' passes and the slowest's, for what the pipeline waits.
    passes = {
        "whole": whole + ways.pipeline * added, "slow": slow + added, "weights": stage.body.weights + stage.head.weights
    }  # fmt: skip
    forward = stage.body.forward + stage.head.forward + ends[1] / 2 + _forward_waits(ways, software, stage)
    # The first rank begins first and ends last; put off, the weights' gradients are all that is then left.
    is_staged = (ways.pipeline > 1) & (ways.sharding < 3)
    held = np.where(is_staged, most, weight)
    last_pass = np.where(is_staged & (ways.schedule == ZERO_BUBBLE), stage.body.weights, stage.body.backward)
    data = data_waits(model, ways, card, software, gather, forward=held * stage.body.forward, backward=held * last_pass)
    # Weights that are gathered for every pass make every rank's passes longer, so that others wait for those, too.
    longer = np.where(ways.sharding == 3, data / many, 0)
    passes["whole"], passes["slow"] = passes["whole"] + ways.pipeline * longer, passes["slow"] + longer
    moved = 2 * ways.element + software.gradient_bytes
    forward = forward + ways.pipeline * longer * ways.element / moved
    passes["weights"] = passes["weights"] + ways.pipeline * longer * software.gradient_bytes / moved
    left = bubble_time(ways, **passes, forward=forward)
    left = left_open(
        ways, left, sharing=card.sharing, busy=many * passes["slow"], even=many * passes["whole"] / ways.pipeline
    )
    return StepParts(
        compute=many * (weight * stage.body.gpu + in_ends + added) + np.minimum(left, 0),
        launch=many * weight * np.maximum(stage.body.total - stage.body.gpu, 0),
        tensor=many * weight * stage.tensor,
        context=many * weight * stage.context,
        expert=many * weight * stage.expert,
        bubble=np.maximum(left, 0),
        transfer=transfer_time(model, ways, card, software, **passes),
        data=data,
        optimizer=np.zeros(()) if software.adapters else update_time(model, ways, card, software),
        step=np.asarray(card.fitted.step) + meeting_time(ways, card),
        host=host_time(
            ways,
            card,
            layers=np.where(slow > middle, last, most) * model.layers,
            busy=many * (weight * stage.body.gpu + in_ends),
        ),
    )


def stage_parts(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> StageParts:
    """Return the seconds of one micro-batch through the whole model, for the closed form and for events alike."""
    kinds = [
        (model.attentions, attention_demand), (model.mlps, mlp_demand), (model.mixtures, mixture_demand),
        (model.mambas, mamba_demand),
    ]  # fmt: skip
    body = PassTimes.none()
    core = np.zeros(())
    for count, demand_of in kinds:
        if not np.any(count):
            continue
        demand = demand_of(model, ways, software)
        times = pass_times(demand, ways, card, software)
        body = body + times.scaled(count)
        core = core + count * times.core if demand_of is attention_demand else core
    head = pass_times(head_demand(model, ways), ways, card, software, again=False)
    embedding = 2 * embedding_traffic(model, ways) / (card.memory_bandwidth * card.fitted.memory)
    return StageParts(
        body=body, head=head, embedding=embedding, tensor=tensor_time(model, ways, card, software),
        context=context_time(model, ways, card, core),
        expert=expert_time(model, ways, card, software, beside=body.total),
    )  # fmt: skip


def _forward_waits(ways: Strategies, software: Software, stage: StageParts) -> Numbers:
    """Return what of the axes' exchanges the forwards wait for."""
    shares = forward_shares(ways, software)
    return stage.tensor * shares["tensor"] + stage.context * shares["context"] + stage.expert * shares["expert"]


def accumulation_time(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return the time of adding one micro-batch's gradients to the sum, or of copying what sharding puts together."""
    dense, experts = card_parameters(model, ways)
    kept = np.where(ways.sharding == 3, software.shard_bytes, software.accumulate_bytes) * (dense + experts)
    return np.where(software.adapters, 0.0, kept) / (card.memory_bandwidth * card.fitted.memory)


def update_time(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return the time of the optimizer, which memory binds."""
    body, routed = card_parameters(model, ways)
    whole = ways.sharding == 0
    mine = body / np.where(whole, 1, ways.data * ways.context) + routed / np.where(whole, 1, expert_copies(ways))
    return mine * software.update_bytes / (card.memory_bandwidth * card.fitted.memory)
