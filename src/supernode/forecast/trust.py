"""How far can a forecast be trusted? What it was fitted on, and how wrong it was on rows that it had not seen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from supernode.forecast.efficiency import FILE, card_names
from supernode.forecast.rates import card_of
from supernode.hardware.machine import Machine
from supernode.schema.plan import Plan

WORDS = {"cards": "cards", "width": "the width", "sequence": "the sequence", "tensor": "the tensor degree",
         "pipeline": "the pipeline degree"}  # fmt: skip


@cache
def calibrated_ranges() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Return, by generation, the least and the most of what the fitting rows ran."""
    content: Mapping[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    ranges: Mapping[str, Mapping[str, tuple[float, float]]] = content["ranges"]
    return ranges


def doubts(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Return why a plan's predicted time may be off, as sentences; nothing where the forecast is on known ground."""
    shape = plan.job.shape
    if shape is None or machine.card.kind == "cpu":
        return ()
    generation = card_of(machine).generation
    if not generation:
        known = ", ".join(card_names())
        return (f"no published training run stands behind times on {machine.card.name}; calibrated: {known}.",)
    asked = {
        "cards": plan.ranks, "width": shape.width, "sequence": plan.job.data.sequence, "tensor": plan.layout.tensor,
        "pipeline": plan.layout.pipeline,
    }  # fmt: skip
    ranges = calibrated_ranges()[generation]
    outside = [
        f"{WORDS[name]} {value:,} (fitted: {ranges[name][0]:,.0f} to {ranges[name][1]:,.0f})"
        for name, value in asked.items()
        if not ranges[name][0] <= value <= ranges[name][1]
    ]
    return (
        (f"times on {machine.card.name} are outside what they were fitted on: {', '.join(outside)}.",)
        if outside
        else ()
    )
