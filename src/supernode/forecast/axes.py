"""How long does a step wait for its axes? Tensor, context, expert, data, and what keeping them going costs a host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.forecast.memory import card_parameters, expert_copies, rank_shares
from supernode.forecast.network import Wires, exchange_time, gather_time, members_inside, scatter_time, sum_time
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import FULL, Software, Strategies

# The part of the tensor axis' collectives that user buffers or asynchronous tensor parallelism hide behind products.
TENSOR_HIDDEN = 0.6
# `bucket_cap_mb` of torch.nn.parallel.DistributedDataParallel: the last bucket has no backward left to hide behind.
BUCKET = 25 * 2**20

Gather = Callable[[Wires, Numbers, Numbers, Numbers], Numbers]
"""Seconds of an all-gather or a reduce-scatter over wires, of bytes in all, among cards, so many ranks apart."""


def ring(wires: Wires, nbytes: Numbers, cards: Numbers, stride: Numbers) -> Numbers:
    """Return the seconds of an all-gather or a reduce-scatter as rings do them."""
    return gather_time(wires, nbytes, cards=cards, stride=stride)


def tensor_time(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Numbers:
    """Return seconds of the tensor axis: a gather and a scatter per sublayer in each pass, once more if recomputed."""
    nbytes = ways.tokens * model.width * ways.element
    one = sum_time(card.tuned_wires, nbytes, cards=ways.tensor, stride=np.ones(()))
    passes = np.where(ways.recompute == FULL, 3, 2)
    exposed = (1 - TENSOR_HIDDEN) if software.overlaps_tensor else 1.0
    many = passes * model.sublayers * exposed + (2 if software.splits_ends else 0)
    return np.where(ways.tensor > 1, one * many, 0)


def context_time(model: ModelShape, ways: Strategies, card: CardModel, core: Numbers) -> Numbers:
    """Return the waiting for keys and values, which travel round the context axis while scores are computed."""
    wide = model.key_value_heads * (model.head_width + model.values) / ways.tensor
    nbytes = ways.context * ways.tokens * wide * ways.element
    gather = gather_time(card.tuned_wires, nbytes, cards=ways.context, stride=ways.tensor)
    passes = np.where(ways.recompute == FULL, 4, 3)
    wait = passes * model.attentions * gather
    exposed = np.maximum(wait - core, 0) + card.fitted.contention * np.minimum(wait, core)
    return np.where(ways.context > 1, exposed, 0)


def expert_time(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, beside: Numbers
) -> Numbers:
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


def data_waits(
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
        return exposed_time(wait, beside, first=first, contention=hidden)

    once = np.where(
        ways.sharding > 0, exposed(scatter, backward) + exposed(gather, forward), exposed(2 * scatter, backward)
    )
    each = exposed(gather, forward) + np.maximum(exposed(gather, backward) - first * gather, 0)
    both = exposed(gather + scatter, backward) if software.overlaps_sums else exposed(gather, backward) + scatter
    # Of the backward's gathers, the first is of the layer that has just been used.
    last = exposed(gather, forward) + np.maximum(both - first * gather, 0)
    return np.where(is_sharded, (ways.micro_batches - scatters) * each + scatters * last, once)


def exposed_time(wait: Numbers, beside: Numbers, *, first: Numbers, contention: Numbers) -> Numbers:
    """Return what shows of an exchange that goes on beside computing.

    Args:
        wait: seconds of the exchange.
        beside: seconds of the computing.
        first: part of the exchange beside which nothing runs.
        contention: part of the time beside each other that it costs the computing.
    """
    rest = (1 - first) * wait
    return first * wait + np.maximum(rest - beside, 0) + contention * np.minimum(rest, beside)


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
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, collective: Gather = ring
) -> tuple[Numbers, Numbers]:
    """Return the seconds of summing one step's gradients into shards, and of gathering the weights, hidden or not."""
    wires = replace(card.tuned_wires, outside=card.wires.outside * software.rails)
    if wires.curves is not None:
        return measured_data_times(model, ways, software, wires)
    body, routed = card_parameters(model, ways)
    dense = ways.data * ways.context, ways.tensor
    experts = expert_copies(ways), ways.expert * ways.expert_tensor

    def both(element: Numbers | float) -> Numbers:
        return collective(wires, body * element, *dense) + collective(wires, routed * element, *experts)

    return both(software.gradient_bytes), both(ways.element)


def measured_data_times(
    model: ModelShape, ways: Strategies, software: Software, wires: Wires
) -> tuple[Numbers, Numbers]:
    """Return what `data_times` does, of a machine whose collectives were measured, each kind by its own curve.

    Whole copies are summed by all-reduces, half of one standing for each way.
    """
    body, routed = card_parameters(model, ways)
    is_spread = ways.expert > 1  # else all ranks hold the same experts, which travel with the rest
    layers = rank_shares(model, ways)[0] * model.layers
    by_layer = (ways.sharding == 3) & software.gathers_by_layer

    def both(weights: Numbers, pieces: Numbers, cards: Numbers, stride: Numbers) -> tuple[Numbers, Numbers]:
        many = np.where(by_layer, pieces, 1)
        at, sums = {"cards": cards, "stride": stride}, weights * software.gradient_bytes
        scatter = np.where(
            ways.sharding == 0, sum_time(wires, sums, **at) / 2, many * scatter_time(wires, sums / many, **at)
        )
        return scatter, many * gather_time(wires, weights * ways.element / many, **at)

    dense = both(body + np.where(is_spread, 0, routed), layers + 1, ways.data * ways.context, ways.tensor)
    alone = both(routed, np.maximum(layers, 1), expert_copies(ways), ways.expert * ways.expert_tensor)
    scatter, gather = (one + np.where(is_spread, more, 0) for one, more in zip(dense, alone, strict=True))
    return scatter, gather


def meeting_time(ways: Strategies, card: CardModel) -> Numbers:
    """Return the time of the scalars that all ranks sum once a step; part of `fitted.step` where none was measured."""
    if card.wires.curves is None:
        return np.zeros(())
    return card.wires.curves.time("all_reduce", np.full((), 32.0), cards=ways.cards)


def host_time(ways: Strategies, card: CardModel, *, layers: Numbers, busy: Numbers) -> Numbers:
    """Return the seconds that a host spends on the axes of a strategy, beside computing and exchanging.

    Args:
        layers: that the rank holds.
        busy: seconds of a step that it computes.
    """
    total = np.zeros(())
    if not card.axes:
        return total
    copies = ways.data * ways.context
    degrees = {
        "tensor": ways.tensor, "pipeline": ways.pipeline, "replicas": np.where(ways.sharding == 0, copies, 1),
        "fsdp": np.where(ways.sharding == 3, copies, 1),
    }  # fmt: skip
    many = ways.micro_batches
    for axis, cost in card.axes.items():
        seconds = cost.step + layers * cost.layer + many * (cost.micro_batch + layers * cost.block)
        seconds = seconds + cost.waiting * busy
        total = total + np.where(degrees[axis] > 1, seconds, 0)
    return total
