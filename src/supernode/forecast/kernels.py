"""How long does a card take for what a sublayer asks? Products, memory traffic, and the launches that may bind both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.workload.shape import Numbers
from supernode.workload.strategy import FLOAT32, FULL, SELECTIVE, Software, Strategies
from supernode.workload.sublayers import Demand

# Flash attention's backward computes five products where the forward has two (Dao, arXiv:2307.08691, section 4.1).
FLASH_BACKWARD = 2.5
# How much faster the attention's core is in 8 bits: its products double their rate, its exponentials do not.
LOW_ATTENTION = 1.4
# Bytes of an operand of a matrix product, by precision.
OPERAND_BYTES = (2.0, 2.0, 1.0, 1.0, 0.5, 4.0)
# Casting an activation, forward and for the weights' gradient alike: tensor scaling reads it twice and writes a byte;
# blocks of 32 are scaled along rows and columns; four bits add a Hadamard transform and stochastic rounding.
CAST_BYTES = (0.0, 0.0, 5.0, 6.0, 9.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTimes:
    """Seconds of one micro-batch's passes.

    Attributes:
        forward: the forward, launches included.
        backward: the backward with what is recomputed, likewise.
        gpu: both, if launching cost nothing.
        core: the attention's core in both, during which keys and values can travel.
        weights: of the backward, the weights' gradients, which nothing waits for.
    """

    forward: Numbers
    backward: Numbers
    gpu: Numbers
    core: Numbers
    weights: Numbers

    @property
    def total(self) -> Numbers:
        """Both passes."""
        return self.forward + self.backward

    @classmethod
    def none(cls) -> PassTimes:
        """Return no time at all."""
        zero = np.zeros(())
        return cls(forward=zero, backward=zero, gpu=zero, core=zero, weights=zero)

    def __add__(self, other: PassTimes) -> PassTimes:
        """Return one after the other."""
        return PassTimes(
            forward=self.forward + other.forward, backward=self.backward + other.backward, gpu=self.gpu + other.gpu,
            core=self.core + other.core, weights=self.weights + other.weights,
        )  # fmt: skip

    def scaled(self, count: Numbers) -> PassTimes:
        """Return so many of them."""
        return PassTimes(
            forward=count * self.forward, backward=count * self.backward, gpu=count * self.gpu,
            core=count * self.core, weights=count * self.weights,
        )  # fmt: skip


def pass_times(
    demand: Demand, ways: Strategies, card: CardModel, software: Software, *, again: bool = True
) -> PassTimes:
    """Return the time of a demand's forward and backward.

    Args:
        again: it can be recomputed (the head is not).
    """
    fitted, bandwidth = card.fitted, card.memory_bandwidth
    index = ways.precision.astype(int)
    linear = demand.products / card.product_rate(ways.precision)
    linear = linear + fitted.operands * demand.operands * np.asarray(OPERAND_BYTES)[index] / bandwidth
    cast = demand.inputs * np.asarray(CAST_BYTES)[index]
    wide = index == FLOAT32
    core = demand.scores / np.where(wide, card.peaks[FLOAT32], card.peaks[1])
    core = core + demand.exponentials / card.exponentials
    core = core / (fitted.scores * software.attention)
    core = core / np.where((index > 1) & ~wide & software.low_attention, LOW_ATTENTION, 1.0)
    scored = demand.score_traffic / (bandwidth * fitted.memory)
    moved = (demand.traffic + cast) / (bandwidth * fitted.memory)
    tails = demand.kernels * fitted.tail + demand.syncs * fitted.sync
    forward = linear + core + scored + moved + tails
    inner = core * (FLASH_BACKWARD if software.flash else 2.0) + 1.75 * scored
    backward = (1 if software.adapters else 2) * linear + inner + 2 * moved + 1.4 * tails
    full = ((ways.recompute == FULL) | demand.redone) & again
    selective = (ways.recompute == SELECTIVE) & again
    light = software.selective * linear + (software.selective > 0) * moved if software.flash else core + scored
    again_full = forward - demand.last * linear if software.early_stop else forward
    redone = np.where(full, again_full, np.where(selective, light, 0))
    redone = redone + demand.renewed / (bandwidth * fitted.memory)
    host = (demand.kernels - demand.recorded) * fitted.launch * software.launches
    return PassTimes(
        forward=_longer(forward, np.asarray(host)), backward=_longer(backward + redone, host * (1.4 + full)),
        gpu=forward + backward + redone, core=core * (1 + (FLASH_BACKWARD if software.flash else 2.0)),
        weights=np.zeros(()) if software.adapters else linear,
    )  # fmt: skip


def _longer(busy: Numbers, host: Numbers) -> Numbers:
    """Return the longer of two times that run side by side, smoothly where they are alike."""
    squared = busy * busy, host * host
    result: Numbers = np.sqrt(np.sqrt(squared[0] * squared[0] + squared[1] * squared[1]))
    return result
