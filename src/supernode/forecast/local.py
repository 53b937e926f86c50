"""What is different where CPU cores stand in for cards? Shared cores, measured exchanges, Python that nothing hides."""

from __future__ import annotations

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.forecast.memory import rank_shares
from supernode.forecast.network import Wires, gather_time, scatter_time, sum_time
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import Software, Strategies


def left_open(
    ways: Strategies, bubble: Numbers, card: CardModel, *, busy: Numbers, even: Numbers
) -> Numbers:  # fmt: skip
    """Return what is left of a pipeline's bubble where ranks share cores.

    One that waits leaves its core to another, so that only what the cores cannot fill is lost: the way through the
    pipeline at a whole core's speed may yet be longer than all the work over all cores. Below zero, uneven ranks make
    up for each other, and the slowest is done before its share of a core says.

    Args:
        busy: seconds of a step that the slowest rank computes, at its share of a core.
        even: likewise of the mean rank.
    """
    if card.sharing <= 1:
        return bubble
    return np.where(ways.pipeline > 1, np.maximum((busy + bubble) / card.sharing, even) - busy, 0)


def meeting_time(ways: Strategies, card: CardModel) -> Numbers:
    """Return the time of the scalars that all ranks sum once a step; part of `fitted.step` where none was measured."""
    if card.wires.curves is None:
        return np.zeros(())
    return card.wires.curves.time("all_reduce", np.full((), 32.0), cards=ways.cards)


def host_time(model: ModelShape, ways: Strategies, card: CardModel, share: Numbers, busy: Numbers) -> Numbers:
    """Return the seconds that a host spends on the axes of a strategy, beside computing and exchanging.

    Args:
        share: of the layers that the rank holds.
        busy: seconds of a step that it computes.
    """
    total = np.zeros(())
    if not card.axes:
        return total
    degrees = {
        "tensor": ways.tensor, "pipeline": ways.pipeline, "replicas": np.where(ways.sharding == 0, ways.data, 1),
        "fsdp": np.where(ways.sharding == 3, ways.data, 1),
    }  # fmt: skip
    layers, many = share * model.layers, ways.micro_batches
    for axis, cost in card.axes.items():
        seconds = cost.step + layers * cost.layer + many * (cost.micro_batch + layers * cost.block)
        seconds = seconds + cost.waiting * busy
        total = total + np.where(degrees[axis] > 1, seconds, 0)
    return total


def measured_data_times(
    model: ModelShape, ways: Strategies, software: Software, wires: Wires, weights: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the same of a machine whose collectives were measured, each kind by its own curve.

    Whole copies are summed by all-reduces, half of one standing for each way.
    """
    layers = rank_shares(model, ways)[0] * model.layers
    pieces = np.where((ways.sharding == 3) & software.gathers_by_layer, layers + 1, 1)
    sums = weights * software.gradient_bytes / pieces
    scatter = pieces * scatter_time(wires, sums, cards=ways.data, stride=ways.tensor)
    half = sum_time(wires, weights * software.gradient_bytes, cards=ways.data, stride=ways.tensor) / 2
    gather = pieces * gather_time(wires, weights * ways.element / pieces, cards=ways.data, stride=ways.tensor)
    return np.where(ways.sharding == 0, half, scatter), gather
