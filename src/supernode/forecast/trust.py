"""How far can a forecast be trusted? What it was fitted on, and how wrong it was on rows that it had not seen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log2
from typing import Any

import yaml

from supernode.forecast.efficiency import FILE, card_model, card_names
from supernode.forecast.rates import card_of
from supernode.hardware.machine import Machine
from supernode.schema.plan import Plan

WORDS = {"cards": "cards", "width": "the width", "sequence": "the sequence", "tensor": "the tensor degree",
         "pipeline": "the pipeline degree"}  # fmt: skip


@cache
def calibrated_ranges() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Return, by generation, the least and the most of what the fitting rows ran."""
    ranges: Mapping[str, Mapping[str, tuple[float, float]]] = _content()["ranges"]
    return ranges


@cache
def _content() -> Mapping[str, Any]:
    content: Mapping[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return content


def band(card: str, *, cards: float, width: float, mixtures: bool = False, sharded: bool = False) -> float:
    """Return the relative error that four of five unseen published runs stayed within, of the table nearest to a run.

    Nearest is first of the card's generation, then with mixtures or without, then with sharded weights or without, then
    in cards and width. Beyond the ranges that `doubts` tells of, the error may be larger.

    Args:
        card: name in `cards.yaml`.
        cards: that the run takes.
        width: of the model's residual stream.
        mixtures: the model has mixtures of experts.
        sharded: weights are sharded, not whole on each copy.

    Raises:
        SpecError: no published run stands behind the card.

    >>> band("A100-80", cards=512, width=12288) < 0.15
    True
    """
    generation = card_model(card).generation

    def distance(entry: Mapping[str, Any]) -> tuple[bool, bool, bool, float]:
        apart = abs(log2(cards / entry["cards"])) + abs(log2(width / entry["width"]))
        return entry["generation"] != generation, entry["mixtures"] != mixtures, entry["sharded"] != sharded, apart

    return float(min(_content()["bands"], key=distance)["band"])


def plan_band(plan: Plan, machine: Machine) -> float | None:
    """Return the band of a plan's time; None where no published training run stands behind it."""
    if plan.job.shape is None or not card_of(machine).generation:
        return None
    shape, is_sharded = plan.job.shape, plan.layout.sharding == "fsdp"
    return band(machine.card.name, cards=plan.ranks, width=shape.width, sharded=is_sharded)


def strays(generation: str, asked: Mapping[str, float]) -> str:
    """Return in words what lies outside of what a generation's numbers were fitted on; nothing where nothing does.

    Args:
        asked: by the names of `WORDS`.
    """
    ranges = calibrated_ranges().get(generation)
    if ranges is None:
        return ""
    return ", ".join(
        f"{WORDS[name]} {value:,.0f} (fitted: {ranges[name][0]:,.0f} to {ranges[name][1]:,.0f})"
        for name, value in asked.items()
        if not ranges[name][0] <= value <= ranges[name][1]
    )


def plan_strays(plan: Plan, machine: Machine) -> str:
    """Return likewise where a plan lies outside."""
    shape = plan.job.shape
    if shape is None:
        return ""
    asked = {
        "cards": plan.ranks, "width": shape.width, "sequence": plan.job.data.sequence, "tensor": plan.layout.tensor,
        "pipeline": plan.layout.pipeline,
    }  # fmt: skip
    return strays(card_of(machine).generation, asked)


def doubts(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Return why a plan's predicted time may be off, as sentences; nothing where the forecast is on known ground."""
    shape = plan.job.shape
    if shape is None or machine.card.kind == "cpu":
        return machine.notes
    generation = card_of(machine).generation
    if not generation:
        known = ", ".join(card_names())
        return (f"no published training run stands behind times on {machine.card.name}; calibrated: {known}.",)
    outside = plan_strays(plan, machine)
    return (f"times on {machine.card.name} are outside what they were fitted on: {outside}.",) if outside else ()
