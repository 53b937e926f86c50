"""How long does a step take? A closed form over arrays of strategies, each part being what nothing hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.forecast.kernels import PassTimes, pass_times
from supernode.forecast.local import host_time, left_open, measured_data_times, meeting_time
from supernode.forecast.memory import card_parameters, expert_copies, rank_shares
from supernode.forecast.network import (
    Wires,
    exchange_time,
    gather_time,
    members_inside,
    sum_time,
)
from supernode.forecast.pipeline import bubble_time, forward_shares, transfer_time
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import FULL, ZERO_BUBBLE, Software, Strategies
from supernode.workload.sublayers import (
    attention_demand,
    embedding_traffic,
    head_demand,
    mamba_demand,
    mixture_demand,
    mlp_demand,
)

# The part of the tensor axis' collectives that user buffers or asynchronous tensor parallelism hide behind products.
TENSOR_HIDDEN = 0.6

Gather = Callable[[Wires, Numbers, Numbers, Numbers], Numbers]
"""Seconds of an all-gather or a reduce-scatter over wires, of bytes in all, among cards, so many ranks apart."""


def _ring(wires: Wires, nbytes: Numbers, cards: Numbers, stride: Numbers) -> Numbers:
    return gather_time(wires, nbytes, cards=cards, stride=stride)


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
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, gather: Gather = _ring
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
    weight = slow / np.maximum(body, 1e-12)  # of the body, so that parts add up to the slowest stage's time
    many = ways.micro_batches
    in_ends = np.where((ways.pipeline > 1) & (middle >= final), 0.0, ends[0] + np.where(ways.pipeline > 1, 0, ends[1]))
    weight = (slow - in_ends) / np.maximum(body, 1e-12)
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
    data = _data(model, ways, card, software, gather, forward=held * stage.body.forward, backward=held * last_pass)
    # Weights that are gathered for every pass make every rank's passes longer, so that others wait for those, too.
    longer = np.where(ways.sharding == 3, data / many, 0)
    passes["whole"], passes["slow"] = passes["whole"] + ways.pipeline * longer, passes["slow"] + longer
    moved = 2 * ways.element + software.gradient_bytes
    forward = forward + ways.pipeline * longer * ways.element / moved
    passes["weights"] = passes["weights"] + ways.pipeline * longer * software.gradient_bytes / moved
    left = bubble_time(ways, **passes, forward=forward)
    left = left_open(
        ways, left, card, busy=many * passes["slow"], even=many * passes["whole"] / ways.pipeline
    )  # fmt: skip
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
            model, ways, card, np.where(slow > middle, last, most), many * (weight * stage.body.gpu + in_ends)
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
        body=body, head=head, embedding=embedding, tensor=_tensor(model, ways, card, software),
        context=_context(model, ways, card, core), expert=_expert(model, ways, card, software, beside=body.total),
    )  # fmt: skip


def _forward_waits(ways: Strategies, software: Software, stage: StageParts) -> Numbers:
    """Return what of the axes' exchanges the forwards wait for."""
    shares = forward_shares(ways, software)
    return stage.tensor * shares["tensor"] + stage.context * shares["context"] + stage.expert * shares["expert"]


def _tensor(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return seconds of the tensor axis: a gather and a scatter per sublayer in each pass, once more if recomputed."""
    nbytes = ways.tokens * model.width * ways.element
    one = sum_time(card.tuned_wires, nbytes, cards=ways.tensor, stride=np.ones(()))
    passes = np.where(ways.recompute == FULL, 3, 2)
    exposed = (1 - TENSOR_HIDDEN) if software.overlaps_tensor else 1.0
    many = passes * model.sublayers * exposed + (2 if software.splits_ends else 0)
    return np.where(ways.tensor > 1, one * many, 0)


def _context(model: ModelShape, ways: Strategies, card: CardModel, core: Numbers) -> Numbers:
    """Return the waiting for keys and values, which travel round the context axis while scores are computed."""
    wide = model.key_value_heads * (model.head_width + model.values) / ways.tensor
    nbytes = ways.context * ways.tokens * wide * ways.element
    gather = gather_time(card.tuned_wires, nbytes, cards=ways.context, stride=ways.tensor)
    passes = np.where(ways.recompute == FULL, 4, 3)
    wait = passes * model.attentions * gather
    exposed = np.maximum(wait - core, 0) + card.fitted.contention * np.minimum(wait, core)
    return np.where(ways.context > 1, exposed, 0)


def _expert(model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, beside: Numbers) -> Numbers:
    """Return seconds of the expert axis: tokens to their experts and back, in each pass.

    A fused dispatcher sends a token that several experts of one node want over the network once (as DeepEP does), a
    plain all-to-all once for each.
    """
    wires = card.tuned_wires
    tokens = ways.tokens / ways.tensor
    inside = members_inside(wires, ways.expert, ways.expert_tensor)
    nodes = np.maximum(ways.expert / inside, 1)
    copies = nodes * (1 - (1 - 1 / nodes) ** model.routed) if software.fused_dispatch else model.routed
    nbytes = tokens * model.routed_width * ways.element
    within = exchange_time(wires, nbytes * model.routed, cards=inside, stride=ways.expert_tensor)
    across = (nodes > 1) * (
        nbytes * copies * (nodes - 1) / nodes / (wires.outside * wires.outside_efficiency) + wires.outside_latency
    )
    passes = np.where((ways.recompute == FULL) | software.redone_experts, 6, 4)
    wait = passes * model.mixtures * (within + across)
    if software.overlaps_expert:  # beside another micro-batch
        wait = np.maximum(wait - beside, 0) + card.fitted.contention * np.minimum(wait, beside)
    return np.where(ways.expert > 1, wait, 0)


def _data(
    model: ModelShape,
    ways: Strategies,
    card: CardModel,
    software: Software,
    collective: Gather,
    *,
    forward: Numbers,
    backward: Numbers,
) -> Numbers:
    """Return the waiting for gradients and sharded weights that computing does not hide."""
    scatter, gather = data_times(model, ways, card, software, collective=collective)
    is_sharded = ways.sharding == 3
    if software.adapters:
        return np.zeros(())
    hidden = data_contention(model, ways, card, software, scatter + gather)
    # Interleaved, a part of the model is synchronised beside the others' last passes of a group of micro-batches, and
    # gathered beside their first ones (Megatron-LM, core/pipeline_parallel/schedules.py, grad_sync_func).
    group = np.minimum(ways.pipeline, np.maximum(ways.micro_batches, 1)) - 1
    beside = 1 + np.where(is_sharded, 0, group * (ways.interleave - 1) / ways.interleave)
    forward, backward = beside * forward, beside * backward
    scatters = 1 if software.scatters_once else ways.micro_batches
    if not software.overlaps_data:
        once = scatter + np.where(ways.sharding > 0, gather, scatter)
        return np.where(is_sharded, ways.micro_batches * 2 * gather + scatters * scatter, once)

    first = first_share(model, ways)

    def exposed(wait: Numbers, beside: Numbers) -> Numbers:
        rest = (1 - first) * wait
        return first * wait + np.maximum(rest - beside, 0) + hidden * np.minimum(rest, beside)

    once = np.where(
        ways.sharding > 0, exposed(scatter, backward) + exposed(gather, forward), exposed(2 * scatter, backward)
    )
    each = exposed(gather, forward) + np.maximum(exposed(gather, backward) - first * gather, 0)
    both = exposed(gather + scatter, backward) if software.overlaps_sums else exposed(gather, backward) + scatter
    # Of the backward's gathers, the first is of the layer that has just been used.
    last = exposed(gather, forward) + np.maximum(both - first * gather, 0)
    return np.where(is_sharded, (ways.micro_batches - scatters) * each + scatters * last, once)


def data_contention(model: ModelShape, ways: Strategies, card: CardModel, software: Software, wait: Numbers) -> Numbers:
    """Return the part of the time beside computing that exchanges over the data axis cost it.

    What a transfer takes from the card, multiprocessors and memory bandwidth, goes with its rate.

    Args:
        wait: seconds of the exchanges.
    """
    fast = replace(card, wires=replace(card.wires, node_cards=2**30))
    alone = np.minimum(sum(data_times(model, ways, fast, software)) / np.maximum(wait, 1e-12), 1.0)
    return np.asarray(card.fitted.contention * alone)


def first_share(model: ModelShape, ways: Strategies) -> Numbers:
    """Return the part of a card's parameters beside which nothing runs: gathered before the first layer, summed last.

    It is what the embedding's end of the model is wrapped with, and a layer.
    """
    body = (model.body_parameters + model.routed_parameters) / ways.pipeline
    ends = model.vocabulary * model.width * np.where((ways.pipeline > 1) | (model.tied > 0), 1, 2)
    layer = body * ways.pipeline / np.maximum(model.layers, 1)
    return np.minimum((ends + layer) / (ends + body), 1.0)


def data_times(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, collective: Gather = _ring
) -> tuple[Numbers, Numbers]:
    """Return the seconds of summing one step's gradients into shards, and of gathering the weights, hidden or not."""
    body, routed = card_parameters(model, ways)
    dense = ways.data * ways.context, ways.tensor
    experts = expert_copies(ways), ways.expert * ways.expert_tensor
    wires = replace(card.tuned_wires, outside=card.wires.outside * software.rails)
    if wires.curves is not None:
        return measured_data_times(model, ways, software, wires, body + routed)

    def both(element: Numbers | float) -> Numbers:
        return collective(wires, body * element, *dense) + collective(wires, routed * element, *experts)

    return both(software.gradient_bytes), both(ways.element)


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
