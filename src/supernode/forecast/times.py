"""How long does a step take? A closed form over arrays of strategies, each part being what nothing hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.forecast.kernels import PassTimes, pass_times
from supernode.forecast.memory import card_parameters, expert_copies
from supernode.forecast.network import Wires, exchange_time, gather_time, members_inside, send_time
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import FULL, GPIPE, ZERO_BUBBLE, Software, Strategies
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
# Likewise of the expert axis' exchanges, beside another micro-batch.
EXPERT_HIDDEN = 0.7

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

    @property
    def total(self) -> Numbers:
        """Seconds in all."""
        busy = self.compute + self.launch + self.tensor + self.context + self.expert
        return busy + self.bubble + self.transfer + self.data + self.optimizer + self.step


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
    most, last = _shares(model, ways)
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
    return StepParts(
        compute=many * (weight * stage.body.gpu + in_ends + accumulation_time(model, ways, card, software)),
        launch=many * weight * np.maximum(stage.body.total - stage.body.gpu, 0),
        tensor=many * weight * stage.tensor,
        context=many * weight * stage.context,
        expert=many * weight * stage.expert,
        bubble=_bubble(ways, whole=whole, slow=slow),
        transfer=_transfers(model, ways, card, software),
        data=_data(
            model,
            ways,
            card,
            software,
            gather,
            forward=weight * stage.body.forward,
            backward=weight * stage.body.backward,
        ),
        optimizer=np.zeros(()) if software.adapters else update_time(model, ways, card, software),
        step=np.asarray(card.fitted.step),
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
        context=_context(model, ways, card, core), expert=_expert(model, ways, card, software),
    )  # fmt: skip


def _shares(model: ModelShape, ways: Strategies) -> tuple[Numbers, Numbers]:
    """Return the parts of the body that a middle pipeline rank and the last one hold; ends give way where uneven."""
    layers = np.maximum(model.layers, 1)
    parts = ways.pipeline * ways.interleave
    each = np.ceil(layers / parts) * ways.interleave
    spare = each * ways.pipeline - layers
    return np.minimum(each / layers, 1), np.maximum(each - spare / 2, 0) / layers * (ways.pipeline > 1) + (
        ways.pipeline <= 1
    )


def _bubble(ways: Strategies, *, whole: Numbers, slow: Numbers) -> Numbers:
    """Return how long the slowest rank waits while the pipeline fills and drains.

    Source: Narayanan et al., arXiv:2104.04473, section 2.2; a zero-bubble schedule fills a third with the weights'
    gradients at most (Qi et al., arXiv:2401.10241).
    """
    waits = np.maximum(whole - slow, 0) / ways.interleave
    return np.where(ways.pipeline > 1, waits, 0) * np.where(ways.schedule == ZERO_BUBBLE, 1 / 3, 1)


def _transfers(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return the waiting for activations and their gradients between stages, unless it is overlapped.

    Each micro-batch is exchanged twice, with the stage before and the one after; the fill and the drain pass each way
    once. What travels cut over the tensor axis is gathered where it arrives, save with sequence parallelism.
    """
    nbytes = ways.tokens * model.width * ways.element
    stride = ways.tensor * ways.context * ways.data
    ahead = send_time(card.tuned_wires, nbytes / ways.tensor, stride=stride)
    back = send_time(card.tuned_wires, nbytes / (1 if software.whole_gradients else ways.tensor), stride=stride)
    whole = (ways.tensor <= 1) | (ways.sequence_parallel > 0)
    gather = np.where(whole, 0, gather_time(card.tuned_wires, nbytes, cards=ways.tensor, stride=np.ones(())))
    each = 2 * (ahead + back if software.serial_transfers else np.maximum(ahead, back)) + 2 * gather
    steady = ways.micro_batches * ways.interleave * (0.0 if software.overlaps_pipeline else 1.0)
    steady = np.where(ways.schedule == GPIPE, 0, steady)
    return np.where(ways.pipeline > 1, each * steady + (ahead + back + 2 * gather) * (ways.pipeline - 1), 0)


def _tensor(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return seconds of the tensor axis: a gather and a scatter per sublayer in each pass, once more if recomputed."""
    nbytes = ways.tokens * model.width * ways.element
    one = 2 * gather_time(card.tuned_wires, nbytes, cards=ways.tensor, stride=np.ones(()))
    passes = np.where(ways.recompute == FULL, 3, 2)
    exposed = (1 - TENSOR_HIDDEN) if software.overlaps_tensor else 1.0
    return np.where(ways.tensor > 1, one * passes * model.sublayers * exposed, 0)


def _context(model: ModelShape, ways: Strategies, card: CardModel, core: Numbers) -> Numbers:
    """Return the waiting for keys and values, which travel round the context axis while scores are computed."""
    wide = model.key_value_heads * (model.head_width + model.values) / ways.tensor
    nbytes = ways.context * ways.tokens * wide * ways.element
    gather = gather_time(card.tuned_wires, nbytes, cards=ways.context, stride=ways.tensor)
    passes = np.where(ways.recompute == FULL, 4, 3)
    wait = passes * model.attentions * gather
    exposed = np.maximum(wait - core, 0) + card.fitted.contention * np.minimum(wait, core)
    return np.where(ways.context > 1, exposed, 0)


def _expert(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return seconds of the expert axis: tokens to their experts and back, in each pass.

    A token that several experts of one node want crosses the network once (as in DeepEP).
    """
    wires = card.tuned_wires
    tokens = ways.tokens / ways.tensor
    inside = members_inside(wires, ways.expert, ways.expert_tensor)
    nodes = np.maximum(ways.expert / inside, 1)
    copies = nodes * (1 - (1 - 1 / nodes) ** model.routed)
    nbytes = tokens * model.routed_width * ways.element
    within = exchange_time(wires, nbytes * model.routed, cards=inside, stride=ways.expert_tensor)
    across = (nodes > 1) * (
        nbytes * copies * (nodes - 1) / nodes / (wires.outside * wires.outside_efficiency) + wires.outside_latency
    )
    passes = np.where((ways.recompute == FULL) | software.redone_experts, 6, 4)
    exposed = (1 - EXPERT_HIDDEN) if software.overlaps_expert else 1.0
    return np.where(ways.expert > 1, exposed * passes * model.mixtures * (within + across), 0)


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
    hidden = card.fitted.contention
    # Interleaved, a part of the model is synchronised while the others' last passes of a group of micro-batches run, and
    # gathered while the others' first ones do (Megatron-LM, core/pipeline_parallel/schedules.py, grad_sync_func).
    group = np.minimum(ways.pipeline, np.maximum(ways.micro_batches, 1)) - 1
    beside = 1 + np.where(is_sharded, 0, group * (ways.interleave - 1) / ways.interleave)
    forward, backward = beside * forward, beside * backward
    if not software.overlaps_data:
        once = scatter + np.where(ways.sharding > 0, gather, scatter)
        return np.where(is_sharded, ways.micro_batches * (2 * gather + scatter), once)

    def exposed(wait: Numbers, beside: Numbers) -> Numbers:
        return np.maximum(wait - beside, 0) + hidden * np.minimum(wait, beside)

    once = np.where(
        ways.sharding > 0, exposed(scatter, backward) + exposed(gather, forward), exposed(2 * scatter, backward)
    )
    each = exposed(gather, forward) + exposed(gather + scatter, backward)
    return np.where(is_sharded, ways.micro_batches * each, once)


def data_times(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, collective: Gather = _ring
) -> tuple[Numbers, Numbers]:
    """Return the seconds of summing one step's gradients into shards, and of gathering the weights, hidden or not."""
    body, routed = card_parameters(model, ways)
    dense = ways.data * ways.context, ways.tensor
    experts = expert_copies(ways), ways.expert * ways.expert_tensor
    wires = replace(card.tuned_wires, outside=card.wires.outside * software.rails)

    def both(element: Numbers | float) -> Numbers:
        return collective(wires, body * element, *dense) + collective(wires, routed * element, *experts)

    return both(software.gradient_bytes), both(ways.element)


def accumulation_time(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return the time of adding one micro-batch's gradients to the sum; FSDP adds only shards, which costs nothing."""
    dense, experts = card_parameters(model, ways)
    kept = np.where((ways.sharding == 3) | software.adapters, 0.0, dense + experts)
    return kept * software.accumulate_bytes / (card.memory_bandwidth * card.fitted.memory)


def update_time(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return the time of the optimizer, which memory binds."""
    body, routed = card_parameters(model, ways)
    whole = ways.sharding == 0
    mine = body / np.where(whole, 1, ways.data * ways.context) + routed / np.where(whole, 1, expert_copies(ways))
    return mine * software.update_bytes / (card.memory_bandwidth * card.fitted.memory)
