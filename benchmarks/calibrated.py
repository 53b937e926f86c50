"""Does a forecast of runs on this computer hold? Calibrates, trains in several layouts, and compares their step times.

Calibration and runs take turns, so that a machine that grows slower or busier does so for both; of several rounds the
calm ones count. A step is timed as a user sees it: from one `StepDone` in the journal to the next.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import harness
from supernode.backends.fork_client import ForkServer
from supernode.control.calibrate import QUIET, calmest, evaluate, measure, programme, write
from supernode.control.journal import read
from supernode.control.supernode import SuperNode
from supernode.schema.event import StepDone
from supernode.schema.plan import StepTime

SHAPE = {"layers": 4, "width": 256, "heads": 8, "vocabulary": 256, "tied": False}
SEQUENCE = 256
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"parallelism": {"data": 2}, "batch": 4},
    "tensor 2": {"parallelism": {"tensor": 2, "data": 1}, "batch": 2},
    "pipeline 2, 1f1b, 4 micro-batches": {
        "parallelism": {"pipeline": 2, "data": 1}, "batch": 4, "gradient_accumulation": 4,
    },
    "tensor 2 × data 2": {"parallelism": {"tensor": 2, "data": 2}, "batch": 4},
    "pipeline 2 × data 2, 4 micro-batches": {
        "parallelism": {"pipeline": 2, "data": 2}, "batch": 8, "gradient_accumulation": 4,
    },
    "fsdp 2, 2 micro-batches": {
        "parallelism": {"data": 2, "sharding": "fsdp"}, "batch": 4, "gradient_accumulation": 2,
    },
}  # fmt: skip
DEMO = {
    "model": "tiny",
    "parallelism": {"tensor": 2, "pipeline": 2, "data": 1},
    "batch": 16,
    "gradient_accumulation": 2,
}
"""The model and layout of examples/demo.yaml; its row is told, and counts for nothing."""
DEMO_SEQUENCE = 128
SECONDS = 4.0
"""Of steps in one run, by the forecast."""
STEPS = (8, 40)
"""Least and most of them."""
WARMUP = 3
ROUNDS = 2
LIMIT = 480.0
"""Seconds from the start after which no round begins."""


def job(name: str, tokens: Path, steps: int) -> dict[str, Any]:
    """Return one layout's job, as a user would write it."""
    given = DEMO if name == "demo" else {"model": SHAPE, **LAYOUTS[name]}
    return {
        "name": "calibrated", "steps": steps, "threads": 1, "checkpoint": {"every": steps}, "evaluate": {"batches": 1},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip": 1.0},
        "data": {"tokens": str(tokens), "sequence": DEMO_SEQUENCE if name == "demo" else SEQUENCE}, **given,
    }  # fmt: skip


def machine_for(wanted: dict[str, Any]) -> SuperNode:
    """Return this computer with as many cards as a job's degrees make."""
    degrees = {"tensor": 1, "pipeline": 1, "data": 1} | wanted["parallelism"]
    return SuperNode.discover(cards=degrees["tensor"] * degrees["pipeline"] * degrees["data"], cpu_only=True)


def forecast(name: str, tokens: Path) -> StepTime:
    """Return what the plan says of a layout, by the calibration at hand."""
    wanted = job(name, tokens, 10)
    step = machine_for(wanted).plan(wanted).step
    assert step is not None
    return step


def run(name: str, tokens: Path, folder: Path, guess: float) -> dict[str, float]:
    """Train; returns the median step's seconds, and how much of the cores other programs took."""
    steps = int(min(max(SECONDS / guess, STEPS[0]), STEPS[1])) + WARMUP
    wanted = job(name, tokens, steps)
    marks: list[tuple[float, float, float]] = []

    def watch(event: object, _: object) -> None:
        if isinstance(event, StepDone):
            marks.append((time.perf_counter(), _busy_seconds(), _our_seconds()))

    machine_for(wanted).run(wanted, folder=folder, watch=watch)
    first, last = marks[WARMUP - 1], marks[-1]
    ends = [at for at, event in read(folder / "journal.db") if isinstance(event, StepDone)][WARMUP - 1 :]
    others = max(0.0, (last[1] - first[1]) - (last[2] - first[2])) / ((last[0] - first[0]) * (os.cpu_count() or 1))
    return {"seconds": statistics.median(b - a for a, b in pairwise(ends)), "others": others, "steps": steps - WARMUP}


def _busy_seconds() -> float:
    columns = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, columns)
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _our_seconds() -> float:
    """Return the CPU seconds of this process and of all below it that live."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in _below(os.getpid()))  # clock_getcpuclockid(3)


def _below(pid: int) -> Iterator[int]:
    yield pid
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        for child in (tasks / "children").read_text().split():
            yield from _below(int(child))


def settled(tries: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of the calm runs of a layout, else the calmest."""
    calm = sorted((one for one in tries if one["others"] <= QUIET), key=lambda one: one["seconds"])
    return calm[(len(calm) - 1) // 2] if calm else min(tries, key=lambda one: one["others"])


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    begun, rounds = time.monotonic(), 5 if flags.full else ROUNDS
    with harness.scratch() as folder:
        os.environ["SUPERNODE_CALIBRATION"] = str(folder / "calibration.yaml")
        tokens, size = folder / "tokens.npy", 2**18 + 1
        np.save(tokens, np.random.default_rng(0).integers(0, 256, size, dtype=np.uint16))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in (*LAYOUTS, "demo")}
        samples, longest = [], 0.0
        while len(samples) < rounds and (flags.full or time.monotonic() - begun + longest < LIMIT):
            round_begun = time.monotonic()
            server = ForkServer()
            samples.append(measure(programme(4), server))
            server.close()
            write(evaluate(calmest(samples)), folder / "calibration.yaml")
            harness.say(f"round {len(samples)}: calibrated in {time.monotonic() - round_begun:.0f} s")
            for name, tries in found.items():
                guess = forecast(name, tokens).total
                tries.append(run(name, tokens, folder / f"{len(samples)}-{name}", guess))
                harness.say(
                    f"  {name}: forecast {guess * 1000:.0f} ms, measured {tries[-1]['seconds'] * 1000:.0f} ms, "
                    f"others take {tries[-1]['others']:.0%}"
                )
            longest = max(longest, time.monotonic() - round_begun)
        rows = [_row(name, forecast(name, tokens), settled(tries), tries) for name, tries in found.items()]
        calibration = evaluate(calmest(samples))
    disturbed = [sample.others for sample in calibration.samples]
    result = {
        "worst_step_error_pct": max(abs(row["error_pct"]) for row in rows if row["layout"] != "demo"),
        "demo_error_pct": abs(rows[-1]["error_pct"]),
        "rows": rows,
        "others_share": {
            "runs": round(statistics.median(one["others"] for tries in found.values() for one in tries), 3),
            "calibration": round(statistics.median(disturbed), 3),
        },
        "what_is_timed": "median time from one journalled step to the next, of a run through SuperNode.run; forecast by"
        " SuperNode.plan on SuperNode.discover with a calibration made in this call",
        "setting": {"shape": SHAPE, "sequence": SEQUENCE, "layouts": LAYOUTS, "demo": DEMO, "rounds": len(samples)},
        "compute": [
            {name: float(getattr(each, name)) for name in each.__slots__} for each in calibration.compute
        ],
        "machine": harness.machine("torch", "numpy"),
    }  # fmt: skip
    harness.finish(result, flags)


def _row(name: str, step: StepTime, best: dict[str, float], tries: list[dict[str, float]]) -> dict[str, Any]:
    parts = {part: round(1000 * getattr(step, part), 2) for part in step.__slots__}
    return {
        "layout": name,
        "forecast_ms": round(1000 * step.total, 2),
        "measured_ms": round(1000 * best["seconds"], 2),
        "error_pct": round(100 * (step.total / best["seconds"] - 1), 2),
        "forecast_parts_ms": parts,
        "runs": [{key: round(value, 4) for key, value in one.items()} for one in tries],
    }


if __name__ == "__main__":
    main()
