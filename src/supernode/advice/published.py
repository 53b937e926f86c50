"""What did published projects take from start to end, and how would they be forecast? One table, row by row."""

from __future__ import annotations

import csv
from dataclasses import replace

from supernode.advice.pace import Pace, pace_from, pace_of_best
from supernode.advice.question import Question, search
from supernode.forecast.efficiency import precision_index
from supernode.forecast.rates import card_of
from supernode.hardware import load
from supernode.hardware.assemble import build_machine
from supernode.hardware.machine import Machine, Tier
from supernode.search.best import bill_of, outside_of
from supernode.search.exhaustive import alone
from supernode.search.offload import Room
from supernode.search.space import Space
from supernode.validation.tables import FOLDER
from supernode.workload.presets import public_model
from supernode.workload.shape import make_shape
from supernode.workload.strategy import INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, Software

SCHEDULES = {"1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED, "zero-bubble": ZERO_BUBBLE}

Row = dict[str, str]


def published_rows() -> list[Row]:
    """Return the rows of `whole_runs.csv`: what was run, how long it took, and where which of it was read."""
    with (FOLDER / "whole_runs.csv").open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def is_fitting(row: Row) -> bool:
    """Return whether the overhead is fitted to a row: a whole run, every published figure of which was read."""
    return row["read"] == "read" and row["kind"] != "ideal"


def published_seconds(row: Row) -> float:
    """Return how long a row's run took."""
    hours = float(row["days"]) * 24 if row["days"] else float(row["gpu_hours"]) / float(row["cards"])
    return hours * 3600


def question_of(row: Row) -> Question:
    """Return what a row's step asks."""
    if row["shape"]:
        model = public_model(row["shape"])
    else:
        layers, width, heads = (float(row[name]) for name in ("layers", "width", "heads"))
        model = make_shape(
            width=width, vocabulary=float(row["vocabulary"]), tied=float(row["tied"]),
            positions=float(row["positions"]), attentions=layers, heads=heads, key_value_heads=float(row["kv_heads"]),
            head_width=width / heads, mlps=layers, mlp_width=float(row["mlp_width"]), gated=float(row["gated"]),
        )  # fmt: skip
    return Question(
        name=row["model"], model=model, batch=int(row["batch"]), sequence=int(row["sequence"]),
        precision=row["precision"],
    )  # fmt: skip


def machine_of(row: Row) -> Machine:
    """Return a row's machine: nodes of eight with so many bits per second between them."""
    card = load.card("H100" if row["card"] == "H800" else row["card"].replace("A100-40", "A100-80"))
    if row["card"] == "A100-40":
        card = replace(card, name="A100-40", memory=40 * 10**9, memory_bandwidth=1555e9)
    if row["card"] == "H800":  # an H100 with NVLink cut to 400 GB/s in both directions (arXiv:2412.19437, section 3)
        card = replace(card, scale_up_bandwidth=200e9)
    cards = int(row["cards"])
    machine = build_machine(cards, "Hybrid", card=card)
    outside = float(row["node_gbit"]) * 1e9 / 8 / machine.node_cards
    whole = replace(machine.tiers[-1], cards=cards, bandwidth=outside)
    node = Tier(name="node", cards=8, bandwidth=card.scale_up_bandwidth, latency=card.scale_up_latency)
    return replace(machine, tiers=(node, whole))


def pace_of(row: Row, question: Question, machine: Machine) -> Pace:
    """Return how fast the row's layout goes, or the best one where none is published."""
    if not row["data"]:
        return pace_of_best(search(question, machine, top=1))
    names = ("tensor", "pipeline", "data", "micro_batch", "interleave", "sharding", "recompute", "sequence_parallel",
             "expert")  # fmt: skip
    axes = {name: float(row[name]) for name in names} | {
        "cards": float(row["cards"]), "context": 1.0, "offload": 0.0, "schedule": float(SCHEDULES[row["schedule"]]),
        "overlaps_tensor": 0.0, "overlaps_data": 1.0, "overlaps_pipeline": 1.0,
    }  # fmt: skip
    software = Software(flash=row["flash"] == "1", overlaps_expert=row["schedule"] == "zero-bubble")
    space = Space(
        model=question.model, cards=(int(row["cards"]),), batch=question.batch, sequence=question.sequence,
        precision=precision_index(question.precision), software=software,
    )  # fmt: skip
    card = card_of(machine)
    choice = alone(space, card, Room(memory=float("inf")), bill_of(machine), axes)
    assert choice is not None  # everything fits into infinity
    return replace(pace_from(choice), is_outside=bool(outside_of(card, space, choice)))
