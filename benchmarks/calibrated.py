"""Does a forecast of runs on this computer hold? Calibrates, trains in several layouts, and compares their step times.

Calibration and runs take turns, so that a machine that grows slower or busier does so for both; of several rounds the
calm stretches count. A step is timed as a user sees it: from one `StepDone` in the journal to the next.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import harness
from supernode.backends.fork_client import ForkServer
from supernode.calibrating.evaluate import evaluate
from supernode.calibrating.programme import programme
from supernode.control.calibrate import QUIET, measure, write
from supernode.control.journal import read
from supernode.control.supernode import SuperNode
from supernode.hardware.calibration import Sample
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
STEPS = (12, 60)
"""Least and most of them."""
WARMUP = 4
WINDOW = 4
"""Steps of a stretch, long enough to tell what others took."""
ROUNDS = 2
LIMIT = 480.0
"""Seconds from the start after which no round begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A few steps one after the other: the median step's seconds, and the part of all cores that others took."""

    seconds: float
    others: float


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
    return SuperNode.discover(cards=degrees["tensor"] * degrees["pipeline"] * degrees["data"])


def forecast(name: str, tokens: Path) -> StepTime:
    """Return what the plan says of a layout, by the calibration at hand."""
    wanted = job(name, tokens, 10)
    step = machine_for(wanted).plan(wanted).step
    assert step is not None
    return step


def run(name: str, tokens: Path, folder: Path, guess: float) -> list[Window]:
    """Train; returns stretches of a few steps each."""
    steps = int(min(max(SECONDS / guess, STEPS[0]), STEPS[1])) // WINDOW * WINDOW + WARMUP
    wanted = job(name, tokens, steps)
    spent: list[tuple[float, float]] = []

    def watch(event: object, _: object) -> None:
        if isinstance(event, StepDone):
            spent.append((_busy_seconds(), _our_seconds()))

    machine_for(wanted).run(wanted, folder=folder, watch=watch)
    ends = [at for at, event in read(folder / "journal.db") if isinstance(event, StepDone)]
    found = []
    for first in range(WARMUP - 1, steps - WINDOW, WINDOW):
        last = first + WINDOW
        (busy, ours), (busy_before, ours_before) = spent[last], spent[first]
        others = max(0.0, (busy - busy_before) - (ours - ours_before))
        seconds = statistics.median(after - before for before, after in pairwise(ends[first : last + 1]))
        share = others / ((ends[last] - ends[first]) * (os.cpu_count() or 1))
        found.append(Window(seconds=seconds, others=share))
    return found


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


def calmest(rounds: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return one sample of each kind out of several rounds: the median of the calm ones, else the calmest."""
    found = []
    for tries in zip(*rounds, strict=True):
        calm = [sample for sample in tries if sample.others <= QUIET]
        best = min(tries, key=lambda sample: sample.others)
        found.append(replace(best, seconds=statistics.median(s.seconds for s in calm)) if calm else best)
    return found


def settled(windows: list[Window]) -> float:
    """Return the median over the calm stretches, or over the calmest quarter where few were calm."""
    by_others = sorted(windows, key=lambda window: window.others)
    calm = [window for window in by_others if window.others <= QUIET]
    kept = calm if len(calm) >= len(windows) / 4 else by_others[: -(-len(windows) // 4)]
    return statistics.median(window.seconds for window in kept)


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    begun, rounds = time.monotonic(), 5 if flags.full else ROUNDS
    with harness.scratch() as folder:
        os.environ["SUPERNODE_CALIBRATION"] = str(folder / "calibration.yaml")
        tokens, size = folder / "tokens.npy", 2**18 + 1
        np.save(tokens, np.random.default_rng(0).integers(0, 256, size, dtype=np.uint16))
        found: dict[str, list[Window]] = {name: [] for name in (*LAYOUTS, "demo")}
        samples, longest = [], 0.0
        while len(samples) < rounds and (flags.full or time.monotonic() - begun + longest < LIMIT):
            round_begun = time.monotonic()
            server = ForkServer()
            samples.append(measure(programme(4), server))
            server.close()
            write(evaluate(calmest(samples)), folder / "calibration.yaml")
            harness.say(f"round {len(samples)}: calibrated in {time.monotonic() - round_begun:.0f} s")
            for name, windows in found.items():
                guess = forecast(name, tokens).total
                windows += run(name, tokens, folder / f"{len(samples)}-{name}", guess)
                harness.say(
                    f"  {name}: forecast {guess * 1000:.0f} ms, measured {settled(windows) * 1000:.0f} ms, "
                    f"others take {statistics.median(window.others for window in windows):.0%}"
                )
            longest = max(longest, time.monotonic() - round_begun)
        rows = [_row(name, forecast(name, tokens), windows) for name, windows in found.items()]
        calibration = evaluate(calmest(samples))
    disturbed = [sample.others for sample in calibration.samples]
    result = {
        "worst_step_error_pct": max(abs(row["error_pct"]) for row in rows if row["layout"] != "demo"),
        "demo_error_pct": abs(rows[-1]["error_pct"]),
        "rows": rows,
        "others_share": {
            "runs": round(statistics.median(one.others for windows in found.values() for one in windows), 3),
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


def _row(name: str, step: StepTime, windows: list[Window]) -> dict[str, Any]:
    measured = settled(windows)
    return {
        "layout": name,
        "forecast_ms": round(1000 * step.total, 2),
        "measured_ms": round(1000 * measured, 2),
        "error_pct": round(100 * (step.total / measured - 1), 2),
        "forecast_parts_ms": {part: round(1000 * getattr(step, part), 2) for part in step.__slots__},
        "stretches_ms_and_others": [[round(1000 * one.seconds, 2), round(one.others, 3)] for one in windows],
    }


if __name__ == "__main__":
    main()
