"""What does the time model know of a machine's card? Fitted numbers where there are any, else what to expect."""

from __future__ import annotations

from dataclasses import replace

from supernode.forecast.efficiency import CardModel, Efficiency, card_model, card_names
from supernode.forecast.network import Wires
from supernode.hardware.machine import Machine
from supernode.hardware.parts import Card

# What microbenchmarks of accelerators let one expect before any training run; the priors of `fit_efficiency.py`.
EXPECTED = Efficiency(
    products=0.75, products_low=0.65, products_four=0.5, operands=1.0, scores=0.5, memory=0.75, launch=8e-6, tail=2e-6,
    sync=1e-4, inside=0.75, outside=0.85, contention=0.3, step=0.01,
)  # fmt: skip
# Special-function units keep pace with products over heads 64 wide, as on H100.
FLOPS_PER_EXPONENTIAL = 256.0


def is_calibrated(card: Card) -> bool:
    """Return whether published training runs of the card's kind stand behind its forecast."""
    return card.name in card_names()


def card_of(machine: Machine) -> CardModel:
    """Return the machine's card as the time model sees it.

    A CPU core computes nothing while it launches, so launching is not counted here, and reaches what was measured.
    """
    card = machine.card
    if is_calibrated(card):
        return replace(card_model(card.name), wires=_wires(machine))
    slowest = min(card.flops.values())
    half = card.flops.get("bfloat16", slowest)
    low = card.flops.get("float8", half)
    expected = replace(EXPECTED, products=card.efficiency, products_low=card.efficiency)
    if card.kind == "cpu":
        expected = replace(expected, scores=card.efficiency, memory=1.0, launch=0.0, tail=0.0, sync=0.0, step=0.0)
    return CardModel(
        generation="",
        peaks=(half, half, low, low, low, card.flops.get("float32", slowest)),
        exponentials=(max(card.flops.values()) if card.kind == "cpu" else half) / FLOPS_PER_EXPONENTIAL,
        memory_bandwidth=card.memory_bandwidth,
        memory=float(card.memory),
        wires=_wires(machine),
        fitted=expected,
    )


def _wires(machine: Machine) -> Wires:
    """Return the innermost and the outermost tier as two."""
    inner, outer = machine.tiers[0], machine.tiers[-1]
    return Wires(
        node_cards=inner.cards, inside=inner.bandwidth, outside=outer.bandwidth, inside_latency=inner.latency,
        outside_latency=outer.latency,
    )  # fmt: skip
