"""How many strategies a CPU-second does the search evaluate, and how long does the optimum of a whole space take?"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

from harness import finish, machine, parser, say
from supernode.errors import CapacityError
from supernode.forecast.efficiency import card_model
from supernode.search.best import OFFLOADS, SCHEDULES, USABLE, words
from supernode.search.exhaustive import alone, exhaustive
from supernode.search.offload import Room
from supernode.search.search import OBJECTIVES, Bill, search
from supernode.search.space import OVERLAPS, Space
from supernode.workload.shape import gpt_shape, make_shape
from supernode.workload.strategy import INTERLEAVED, NO_RECOMPUTE, Software

CARD = card_model("A100-80")
# Calculon's system for these spaces (systems/a100_80e.json) has 512 GiB of second-tier memory for each card.
ROOM = Room(memory=CARD.memory * USABLE, host_memory=512 * 2**30)
# Watts of an A100 with its eighth of a node, from rest to full load, 15,000 USD over six years, 0.08 USD/kWh.
BILL = Bill(idle=250.0, full=925.0, price=15_000 / (6 * 365 * 86_400), tariff=0.08 / 3.6e6)
# Attention that writes its scores, as in the models' own runs, so that selective recomputation is a choice.
SOFTWARE = Software(flash=False, dropout=True)
# Calculon's rates on one core of a machine like ours, by space and share of strategies that fit.
CALCULON_RATES = (380, 900)
# Batches with which Calculon's llm-optimal-execution, two networks and second-tier memory, has just so many executions.
SPACES: dict[str, dict[str, Any]] = {
    "GPT-3 175B on 512": {
        "layers": 96, "width": 12288, "heads": 96, "cards": 512, "batch": 512, "calculon": 6_582_816,
    },
    "Turing 530B on 2,240": {
        "layers": 105, "width": 20480, "heads": 128, "cards": 2240, "batch": 1920, "calculon": 4_215_872,
    },
    "Megatron 1T on 3,072": {
        "layers": 128, "width": 25600, "heads": 160, "cards": 3072, "batch": 3072, "calculon": 7_002_336,
    },
}  # fmt: skip


# What Calculon (commit caa4b11, a100_80g.json, float16) itself found, by its own times, when run once over a part
# of each space: tensor degrees to 8, no offload, reduce-scatter with all-gather, sharded optimizer, data overlapped,
# each axis on its natural network. The whole spaces would take it hours.
CALCULON_FOUND: dict[str, dict[str, float]] = {
    "GPT-3 175B on 512": {
        "executions": 5395, "seconds": 9.560, "tensor": 8, "pipeline": 4, "data": 16, "interleave": 12,
        "micro_batch": 2,
    },
    "Turing 530B on 2,240": {
        "executions": 2080, "seconds": 23.998, "tensor": 8, "pipeline": 7, "data": 40, "interleave": 15,
        "micro_batch": 1,
    },
    "Megatron 1T on 3,072": {
        "executions": 5695, "seconds": 50.922, "tensor": 8, "pipeline": 16, "data": 24, "interleave": 8,
        "micro_batch": 2, "recompute": 1,
    },
}  # fmt: skip


def ours_of(space: Space, found: dict[str, float]) -> dict[str, Any]:
    """Return Calculon's choice by its times and by ours; sequence parallel, all traffic overlapped."""
    degrees = {name: value for name, value in found.items() if name not in ("executions", "seconds")}
    axes = {
        "cards": float(space.cards[0]), "context": 1.0, "expert": 1.0, "schedule": float(INTERLEAVED),
        "sequence_parallel": 1.0, "recompute": float(NO_RECOMPUTE), "sharding": 1.0, "offload": 0.0,
        **degrees, **dict.fromkeys(OVERLAPS, 1.0),
    }  # fmt: skip
    ours = alone(space, CARD, Room(memory=1e15), BILL, axes)
    assert ours is not None, "everything fits into a petabyte"
    return {
        "executions_run": int(found["executions"]),
        "strategy": words(ours),
        "seconds_by_calculon": found["seconds"],
        "seconds_by_our_model": round(ours.time, 4),
        "memory_GB_by_our_model": round(ours.memory / 1e9, 1),
        "fits_by_our_model": ours.memory <= ROOM.memory,
    }


def space_of(row: dict[str, Any]) -> Space:
    """Return all strategies of a row."""
    model = gpt_shape(layers=row["layers"], width=row["width"], heads=row["heads"], vocabulary=51_200, positions=2048)
    return Space(
        model=model, cards=(row["cards"],), batch=row["batch"], sequence=2048, software=SOFTWARE,
        overlaps=(False, True), spare=7,
    )  # fmt: skip


def measure(name: str, row: dict[str, Any], *, repeats: int) -> dict[str, Any]:
    """Return CPU-seconds of a whole search: building the space, evaluating all of it, telling the best five."""
    space, seconds, with_front = space_of(row), [], []
    for _ in range(repeats):
        start = time.process_time()
        found = search(space, CARD, ROOM, BILL, front=False)
        seconds.append(time.process_time() - start)
        start = time.process_time()
        whole = search(space, CARD, ROOM, BILL)
        with_front.append(time.process_time() - start)
    best = found.best[0]
    return {
        "strategies": found.strategies,
        "calculon_executions": row["calculon"],
        "fitting": found.fitting,
        "cpu_seconds": round(max(with_front), 3),
        "cpu_seconds_without_front": round(max(seconds), 3),
        "evaluated_per_cpu_second": round(found.strategies / max(with_front)),
        "evaluated_per_cpu_second_without_front": round(found.strategies / max(seconds)),
        "front": len(whole.front),
        "best": words(best),
        "best_seconds": round(best.time, 4),
        "best_memory_GB": round(best.memory / 1e9, 1),
        "calculon_found": ours_of(space, CALCULON_FOUND[name]),
        "calculon_cpu_seconds_at_its_rates": [round(row["calculon"] / rate) for rate in reversed(CALCULON_RATES)],
    }


def small_spaces() -> list[Space]:
    """Return spaces small enough to try every strategy alone: all axes appear in one or another."""
    dense = gpt_shape(layers=6, width=4096, heads=32, vocabulary=51_200, positions=1024)
    mixture = make_shape(
        width=2048, vocabulary=32_000, attentions=4, heads=16, key_value_heads=4, head_width=128, mixtures=4,
        experts=8, routed=2, expert_width=4096, gated=1,
    )  # fmt: skip
    common: dict[str, Any] = {"batch": 4, "sequence": 512}
    return [
        Space(model=dense, cards=(4,), software=SOFTWARE, most_context=1, spare=0, **common),
        Space(model=dense, cards=(2, 4), offloads=(0, 4), **common),
        Space(model=mixture, cards=(4,), offloads=(0, 2), shardings=(0, 1), **common),
        Space(model=dense, cards=(4,), offloads=(0,), overlaps=(False, True), shardings=(1, 3), **common),
    ]


def equals_exhaustive() -> tuple[bool, int]:
    """Return whether the search finds the optimum of each small space in each room, and how many were tried alone."""
    tried_in_all, equal = 0, True
    rooms = (Room(memory=7e9, host_memory=4e9), Room(memory=80e9, host_memory=80e9))
    for space, room in itertools.product(small_spaces(), rooms):
        tried = exhaustive(space, CARD, room, BILL)
        tried_in_all += space.strategies
        for objective in OBJECTIVES:
            try:
                found = search(space, CARD, room, BILL, objective=objective)
            except CapacityError:
                equal &= not tried
                continue
            best = min(getattr(choice, objective) for choice in tried)
            equal &= abs(getattr(found.best[0], objective) / best - 1) < 1e-12
            equal &= found.fitting == len(tried) and any(c.axes == found.best[0].axes for c in tried)
    return equal, tried_in_all


def main() -> None:
    """Measure and print."""
    flags: argparse.Namespace = parser(__doc__).parse_args()
    say("checking the search against every strategy tried alone")
    equal, tried = equals_exhaustive()
    repeats = 5 if flags.full else 2
    spaces = {}
    for name, row in SPACES.items():
        spaces[name] = measure(name, row, repeats=repeats)
        say(
            f"{name}: {spaces[name]['strategies']:,} strategies (Calculon: {row['calculon']:,} executions) in "
            f"{spaces[name]['cpu_seconds']} CPU-seconds; best {spaces[name]['best_seconds']} s a step: "
            f"{spaces[name]['best']}"
        )
    slowest = min(row["evaluated_per_cpu_second"] for row in spaces.values())
    result = {
        "plans_per_cpu_second": slowest,
        "evaluated_per_cpu_second": slowest,
        "decided_per_cpu_second": slowest,
        "slowest_space_cpu_seconds": max(row["cpu_seconds"] for row in spaces.values()),
        "equals_exhaustive": int(equal),
        "tried_alone": tried,
        "counted": "strategies whose time, memory, energy and cost were computed, over the process' CPU time of the "
        "whole search, Pareto front included, in the slowest space; nothing is pruned: decided is evaluated",
        "axes": f"tensor × sequence parallel × context × pipeline × {len(SCHEDULES)} schedules × interleave × data × "
        f"ZeRO 0 to 3 × micro-batch × recompute 3 × offload of {', '.join(OFFLOADS.values())} × overlap of tensor, "
        "data, pipeline",
        "calculon_per_cpu_second": list(CALCULON_RATES),
        "spaces": spaces,
        "machine": machine("numpy"),
    }
    finish(result, flags)


if __name__ == "__main__":
    main()
