"""Do our closed forms agree with ASTRA-sim, where are we right to differ, and what does a case cost?

Compares every row of `astra_sim_crosscheck*.csv` twice: with ASTRA-sim's assumptions switched on, where times should be
equal, and with our own, where each difference is explained by a bound or a hand calculation.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import harness
from supernode.collectives import grid
from supernode.collectives.exchange import level_exchange, ring_exchange
from supernode.collectives.outline import Leg, Outline, exchange, hierarchical
from supernode.fabric.flows import schedule_time
from supernode.fabric.level import OURS, Assumptions, Level, leg_time, outline_time, port_bound
from supernode.fabric.shapes import joined

PURE, WHOLE = "astra_sim_crosscheck_pure_network.csv", "astra_sim_crosscheck.csv"
KINDS = {"Ring": "ring", "FullyConnected": "full_mesh", "Switch": "switch"}
METHODS = {"ring": "ring", "direct": "direct", "halvingDoubling": "halving"}
THEIRS = {
    "unaware": Assumptions(shared_ports=False, store_and_forward=False),
    "aware": Assumptions(shared_ports=True, store_and_forward=True),
}

# What ASTRA-sim's system layer adds in the rows of WHOLE; read off its ring of eight (24 rows, 0.1 %).
ENDPOINT_DELAY = 10e-9  # seconds a step
LOCAL_BANDWIDTH = 1600e9 / 3  # bytes/s of a sum: two reads and a write of a memory of 1,600 GB/s

SAME = 0.005  # differences below half a percent need no reason
REPEATS = 50


@dataclass(frozen=True)
class Row:
    """One run of ASTRA-sim: what was asked, and its answers in seconds."""

    name: str
    levels: tuple[Level, ...]
    outline: Outline
    nbytes: float
    backend: str
    chunks: int
    time: float
    cpu: float

    @property
    def label(self) -> str:
        """Which run it is, in words."""
        mib = self.nbytes / 2**20
        return f"{self.name} {self.outline.kind} {self.outline.algorithm} {mib:.0f} MiB {self.backend} ×{self.chunks}"


def read(path: Path) -> list[Row]:
    """Return the rows of a table; its GB/s are GiB/s, and its all-gather sizes are one card's shard."""
    with path.open() as file:
        return [row(entry) for entry in csv.DictReader(file) if entry["rc"] == "0"]


def row(entry: dict[str, str]) -> Row:
    """Return one line of a table as values."""
    sizes = [int(size) for size in entry["npus"].split("x")]
    kinds = [KINDS[kind] for kind in entry["topology"].split("x")]
    rates = [float(rate) * 2**30 for rate in entry["bw_GiBps"].split("/")]
    latencies = [float(latency) * 1e-9 for latency in entry["lat_ns"].split("/")]
    methods = [METHODS[method] for method in entry["algo"].split("/")]
    kind = entry["coll"]
    outline = exchange(sizes, methods) if kind == "all_to_all" else hierarchical(kind, sizes, methods)
    return Row(
        name=entry["name"],
        levels=tuple(
            Level(kind=name, size=size, bandwidth=rate, latency=latency)
            for name, size, rate, latency in zip(kinds, sizes, rates, latencies, strict=True)
        ),
        outline=outline,
        nbytes=float(entry["size_bytes"]) * (math.prod(sizes) if kind == "all_gather" else 1),
        backend=entry["backend"],
        chunks=int(entry["chunks"]),
        time=int(entry["time_ns"]) * 1e-9,
        cpu=float(entry["cpu_s"]),
    )


def network_time(one: Row) -> float:
    """Return our time with their assumptions about links, without their system layer."""
    return float(outline_time(one.outline, one.levels, one.nbytes, given=THEIRS[one.backend]))


def system_time(one: Row) -> float:
    """Return our time with their system layer: chunks that queue for each level, a delay a step, time to add."""
    legs = [(leg.level, leg.reduces, with_system(leg, one)) for lane in one.outline.lanes for leg in lane]
    # A chunk keeps its place on a level for all legs that follow each other there.
    stages = [list(stage) for _, stage in itertools.groupby(legs, key=lambda leg: leg[:2])]
    jobs = [(stage[0][0], sum(seconds for _, _, seconds in stage)) for stage in stages]
    free = [0.0] * len(one.levels)
    waiting = [(0.0, chunk, 0) for chunk in range(one.chunks)]
    end = 0.0
    while waiting:
        ready, chunk, stage = heapq.heappop(waiting)
        level, seconds = jobs[stage]
        free[level] = end_of_leg = max(ready, free[level]) + seconds
        end = max(end, end_of_leg)
        if stage + 1 < len(jobs):
            heapq.heappush(waiting, (end_of_leg, chunk, stage + 1))
    return end


def with_system(leg: Leg, one: Row) -> float:
    """Return the seconds of a leg for one chunk."""
    nbytes = one.nbytes / one.chunks
    # Of halving, theirs charges nothing for the first step's sum.
    free = leg.pattern == "pair" and 2 * leg.distance == one.levels[leg.level].size
    adding = leg.share * nbytes / LOCAL_BANDWIDTH if leg.reduces and not free else 0.0
    network = float(leg_time(leg, one.levels[leg.level], nbytes, given=THEIRS[one.backend]))
    return network + leg.repeats * (ENDPOINT_DELAY + adding)


def difference(one: Row) -> dict[str, Any]:
    """Return theirs beside ours with our own assumptions, why they differ, and whether that reason holds in numbers."""
    ours = float(outline_time(one.outline, one.levels, one.nbytes))
    bound = port_bound(one.outline, one.levels, one.nbytes)
    stored = sum(
        leg.repeats * leg.share * one.nbytes / one.levels[leg.level].bandwidth
        for lane in one.outline.lanes
        for leg in lane
        if one.levels[leg.level].kind == "switch"
    )
    reason, holds = "none needed: equal within 0.5 %", abs(one.time / ours - 1) <= SAME
    if not holds and one.backend == "aware":
        reason = (
            f"a switch that stores whole messages adds one transmission a step, {stored * 1e6:.2f} µs in all; without "
            f"it theirs is {(one.time - stored) * 1e6:.2f} µs"
        )
        holds = abs((one.time - stored) / ours - 1) <= SAME
    elif not holds:
        reason = (
            f"messages that leave by one port at once are each given all of it; what each card sends takes its ports "
            f"{bound * 1e6:.2f} µs at least"
        )
        holds = one.time < bound <= ours if len(one.levels) == 1 else shared(one, ours)
    return {
        "row": one.label,
        "theirs_us": round(one.time * 1e6, 3),
        "ours_us": round(ours * 1e6, 3),
        "bound_us": round(bound * 1e6, 3),
        "reason": reason,
        "holds": bool(holds and ours >= bound * (1 - 1e-9)),
    }


def shared(one: Row, ours: float) -> bool:
    """Return whether sharing the ports of switches, worked out by hand, is all that parts the two times."""
    owed = sum(
        (one.outline.sizes[leg.level] - 2) * leg.share * one.nbytes / one.levels[leg.level].bandwidth
        for lane in one.outline.lanes
        for leg in lane
        if leg.pattern == "others" and one.levels[leg.level].kind == "switch"
    )
    return abs((one.time + owed) / ours - 1) <= SAME


def flows_over_closed_form(rows: Sequence[Row]) -> dict[str, float]:
    """Return, for each kind of row of up to 64 cards that has a schedule, the flows' time over the closed form's.

    Both under our assumptions; the schedules hold every message, and the flows share every link.
    """
    ratios = {}
    for one in rows:
        kind, sizes, methods = one.outline.kind, one.outline.sizes, one.outline.algorithm.split("+")
        label = f"{one.name} {kind} {one.outline.algorithm}"
        if label in ratios or one.outline.cards > 64 or (kind == "all_to_all" and "ring" in methods and len(sizes) > 1):
            continue
        if kind == "all_to_all":
            schedule = ring_exchange(sizes[0]) if methods == ["ring"] else level_exchange(sizes)
        else:
            schedule = grid.hierarchical(kind, sizes, methods)
        closed = float(outline_time(one.outline, one.levels, one.nbytes))
        ratios[label] = round(schedule_time(schedule, joined(one.levels), one.nbytes) / closed, 9)
    return ratios


def cpu_seconds(one: Row, *, repeats: int = REPEATS) -> float:
    """Return CPU seconds to outline and cost a case, the mean of many."""
    methods = one.outline.algorithm.split("+")
    start = time.process_time()
    for _ in range(repeats):
        kind, sizes = one.outline.kind, one.outline.sizes
        outline = exchange(sizes, methods) if kind == "all_to_all" else hierarchical(kind, sizes, methods)
        outline_time(outline, one.levels, one.nbytes, given=THEIRS[one.backend])
    return (time.process_time() - start) / repeats


def errors(rows: Sequence[Row], answers: Sequence[float]) -> dict[str, float]:
    """Return worst, mean and 95th percentile of the relative errors, in percent."""
    percent = [abs(ours / one.time - 1) * 100 for one, ours in zip(rows, answers, strict=True)]
    return {
        "rows": len(percent),
        "worst_pct": round(max(percent), 4),
        "mean_pct": round(statistics.mean(percent), 4),
        "p95_pct": round(float(np.quantile(percent, 0.95)), 4),
    }


def result(folder: Path) -> dict[str, Any]:
    """Return all that the two tables say."""
    pure, whole = read(folder / PURE), read(folder / WHOLE)
    network = [network_time(one) for one in pure]
    system = [system_time(one) for one in whole]
    ratios = [(cpu_seconds(one) / one.cpu, one.outline.cards) for one in [*pure, *whole]]
    spent = time.process_time() / sum(one.cpu for one in [*pure, *whole])
    table = [difference(one) for one in pure]
    flows = flows_over_closed_form(pure)
    simple = [(one, ours) for one, ours in zip(whole, system, strict=True) if len(one.levels) == 1 or one.chunks == 1]
    piped = [(one, ours) for one, ours in zip(whole, system, strict=True) if len(one.levels) > 1 and one.chunks > 1]
    worst = sorted(zip(whole, system, strict=True), key=lambda pair: -abs(pair[1] / pair[0].time - 1))[:5]
    return {
        "worst_network_only_pct": errors(pure, network)["worst_pct"],
        "cpu_over_astra_512": round(statistics.median(ratio for ratio, cards in ratios if cards <= 512), 5),
        "cpu_over_astra_worst": round(max(ratio for ratio, _ in ratios), 5),
        "cpu_of_this_whole_process_over_astra_total": round(spent, 4),
        "cpu_note": "theirs is a process a row, its start included; ours is outlining and costing, without the import",
        "network_only": errors(pure, network),
        "with_system_layer": errors(whole, system),
        "with_system_layer_one_level_or_one_chunk": errors(*zip(*simple, strict=True)),
        "with_system_layer_chunks_over_levels": errors(*zip(*piped, strict=True)),
        "with_system_layer_worst": [
            f"{one.label}: theirs {one.time * 1e6:.2f} µs, ours {ours * 1e6:.2f} µs" for one, ours in worst
        ],
        "differences_with_our_assumptions": sum(not entry["reason"].startswith("none") for entry in table),
        "differences_explained": all(entry["holds"] for entry in table),
        "our_assumptions": str(OURS),
        "flows_agree_worst_pct": round(max(abs(ratio - 1) for ratio in flows.values()) * 100, 6),
        "flows_compared": len(flows),
        "differences": [entry for entry in table if not entry["reason"].startswith("none")],
        "machine": harness.machine("numpy"),
    }


def main() -> int:
    """Compare and print."""
    parser: argparse.ArgumentParser = harness.parser(__doc__)
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("SUPERNODE_DATA", beside)),
        help="folder with the two tables (default: $SUPERNODE_DATA, else ../shared/data beside the project)",
    )
    flags = parser.parse_args()
    absent = [name for name in (PURE, WHOLE) if not (flags.data / name).exists()]
    if absent:
        harness.say(
            f"no {' and no '.join(absent)} in {flags.data}\nhint: give their folder by --data or SUPERNODE_DATA."
        )
        return 2
    found = result(flags.data)
    for entry in found["differences"]:
        harness.say(
            f"{entry['row']}: theirs {entry['theirs_us']} µs, ours {entry['ours_us']} µs; {entry['reason']} "
            f"({'holds' if entry['holds'] else 'DOES NOT HOLD'})"
        )
    harness.finish(found, flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
