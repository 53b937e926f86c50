"""What if weights, optimizer or activations lie in the host's memory? Bytes moved away, and the time it costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supernode.forecast.memory import MemoryParts, fuller_rank
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import Software, Strategies

OPTIMIZER, WEIGHTS, ACTIVATIONS = 1, 2, 4
"""Bits of an offload: what lies with the host while it is not used."""
EVERY_OFFLOAD = tuple(range(8))
# A layer at work, and the next one on its way.
BUFFERS = 2
# PCI Express 4.0 with 16 lanes carries 32 GB/s in one direction; packets' headers leave about four fifths.
HOST_BANDWIDTH = 25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where tensors can lie.

    Attributes:
        memory: bytes of a card that tensors can have.
        host_memory: bytes of host memory for each card; 0 forbids offloading.
        host_bandwidth: bytes/s between a card and its host, one direction.
    """

    memory: float
    host_memory: float = 0.0
    host_bandwidth: float = HOST_BANDWIDTH


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """Bytes by where they can lie, and what has to travel if they lie with the host.

    Attributes:
        parts: on the card, nothing being offloaded.
        total: their sum.
        each: activations that one micro-batch leaves.
        layer: part of a card's layers that `BUFFERS` of them are.
    """

    parts: MemoryParts
    total: Numbers
    each: Numbers
    layer: Numbers


def holding(model: ModelShape, ways: Strategies, software: Software) -> Holding:
    """Return what the fullest card holds; all arguments broadcast."""
    parts, each = fuller_rank(model, ways, software)
    layer = np.minimum(BUFFERS * ways.pipeline / np.maximum(model.layers, 1), 1)
    return Holding(parts=parts, total=parts.total, each=each, layer=layer)


def moved(held: Holding, option: int) -> Numbers:
    """Return the bytes that an offload moves from the card to the host, less the buffers that stay."""
    parts, away = held.parts, np.zeros(())
    if option & OPTIMIZER:
        away = away + parts.optimizer * (1 - held.layer)
    if option & WEIGHTS:
        away = away + parts.weights * (1 - held.layer)
    if option & ACTIVATIONS:
        # One micro-batch's pass through `BUFFERS` layers stays.
        away = away + np.maximum(parts.activations - held.each * held.layer, 0)
    return away


def waiting(held: Holding, option: int, ways: Strategies, passes: Numbers, room: Room) -> Numbers:
    """Return the seconds that offloading adds to a step.

    Weights come for each pass of each micro-batch, activations go and come back. The host's link carries them from the
    first pass to the last, while the card computes and while it waits for others: links and network are not its way.
    So passes and link overlap, and the longer of both is what it takes. The optimizer's states come and go (the link
    carries both ways at once) when there is nothing left to compute.

    Args:
        passes: seconds that these take where nothing is offloaded: of a step, all but the update and what surrounds it.
    """
    wait, stream = np.zeros(()), np.zeros(())
    if option & OPTIMIZER:
        wait = held.parts.optimizer / room.host_bandwidth
    if option & WEIGHTS:
        stream = 2 * ways.micro_batches * held.parts.weights
    if option & ACTIVATIONS:
        stream = stream + 2 * ways.micro_batches * held.each
    if option & (WEIGHTS | ACTIVATIONS):
        wait = wait + np.maximum(stream / room.host_bandwidth - passes, 0)
    return wait
