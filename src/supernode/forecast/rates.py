"""What does the time model know of a machine's card? Fitted numbers where there are any, else what to expect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from supernode.forecast.efficiency import CardModel, Efficiency, card_model, card_names
from supernode.forecast.network import Curves, Wires
from supernode.hardware.calibration import Calibration
from supernode.hardware.machine import Machine
from supernode.hardware.parts import Card

# What microbenchmarks of accelerators let one expect before any training run; the priors of `fit_efficiency.py`.
EXPECTED = Efficiency(
    products=0.75, products_low=0.65, products_four=0.5, operands=1.0, scores=0.5, memory=0.75, launch=8e-6, tail=2e-6,
    sync=1e-4, inside=0.75, outside=0.85, contention=0.3, step=0.01,
)  # fmt: skip
# One kernel of a sublayer in eager PyTorch on one x86 core, autograd included: a decoder block at width 32, where
# arithmetic is next to nothing, takes 0.56 ms forward and backward, for 40 kernels forward and 1.4 as many backward.
OPERATION = 0.56e-3 / (2.4 * 40)
# Special-function units keep pace with products over heads 64 wide, as on H100.
FLOPS_PER_EXPONENTIAL = 256.0


def is_calibrated(card: Card) -> bool:
    """Return whether published training runs of the card's kind stand behind its forecast."""
    return card.name in card_names()


def card_of(machine: Machine, ranks: int = 0) -> CardModel:
    """Return the machine's card as the time model sees it.

    A CPU core computes nothing while it launches: what a host needs for a kernel is a gap after it.

    Args:
        ranks: that will be at work; 0 for one on each card. They share a computer's cores and loopback.
    """
    card = machine.card
    if machine.calibration is not None:
        return _measured(machine, machine.calibration, ranks or machine.card_count)
    if is_calibrated(card):
        return replace(card_model(card.name), wires=_wires(machine))
    slowest = min(card.flops.values())
    half = card.flops.get("bfloat16", slowest)
    low = card.flops.get("float8", half)
    expected = replace(EXPECTED, products=card.efficiency, products_low=card.efficiency)
    wires, more, sharing = _wires(machine), 1.0, 1.0
    if card.kind == "cpu":
        # A card is a part of a core; ranks that leave others idle have theirs, too.
        whole = max(1.0, machine.card_count / max(1, machine.cores))
        sharing = max(1.0, (ranks or machine.card_count) / max(1, machine.cores))
        more = whole / sharing
        expected = replace(
            expected, scores=card.efficiency, memory=1.0, launch=0.0, tail=OPERATION * sharing, sync=0.0, step=0.0,
            inside=1.0, outside=1.0,
        )  # fmt: skip
        wires = replace(
            wires, inside=wires.inside * more, outside=wires.outside * more,
            inside_latency=wires.inside_latency / more, outside_latency=wires.outside_latency / more,
        )  # fmt: skip
    half, low, full = half * more, low * more, card.flops.get("float32", slowest) * more
    return CardModel(
        generation="",
        peaks=(half, half, low, low, low, full),
        exponentials=(max(card.flops.values()) * more if card.kind == "cpu" else half) / FLOPS_PER_EXPONENTIAL,
        memory_bandwidth=card.memory_bandwidth * more,
        memory=float(card.memory),
        wires=wires,
        fitted=expected,
        sharing=sharing,
    )


def _measured(machine: Machine, measured: Calibration, ranks: int) -> CardModel:
    """Return a rank's share of what was measured; more ranks than cores take turns on them."""
    rates, curves = measured.compute_for(ranks), measured.curves_for(ranks)
    sharing = max(1.0, ranks / max(1, machine.cores))
    known = {(curve.kind, curve.cards): (np.array(curve.nbytes), np.array(curve.seconds)) for curve in curves}
    half, full = rates.products_half / sharing, rates.products / sharing
    return CardModel(
        generation="",
        peaks=(half, half, half, half, half, full),
        exponentials=np.inf,
        memory_bandwidth=rates.memory / sharing,
        memory=float(machine.card.memory),
        wires=replace(_wires(machine), curves=Curves(seconds=known) if known else None),
        fitted=replace(
            EXPECTED, products=1.0, products_low=1.0, products_four=1.0, operands=rates.memory / rates.operands,
            scores=rates.scores / rates.products, memory=1.0, launch=0.0, tail=rates.operation * sharing, sync=0.0,
            inside=1.0, outside=1.0, contention=0.0, step=rates.step * sharing,
        ),
        sharing=sharing,
        axes=measured.axes_for(ranks),
    )  # fmt: skip


def _wires(machine: Machine) -> Wires:
    """Return the innermost and the outermost tier as two."""
    inner, outer = machine.tiers[0], machine.tiers[-1]
    return Wires(
        node_cards=inner.cards, inside=inner.bandwidth, outside=outer.bandwidth, inside_latency=inner.latency,
        outside_latency=outer.latency, link=machine.link_bandwidth if machine.is_direct else 0.0,
    )  # fmt: skip
