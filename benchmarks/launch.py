"""How long from the command to the first collective, and from a rank's death to all ranks at work again?

A round times `python -c "import torch"` before and after each `supernode run`, and compares with the mean of the two.
Once a run trains, one of its ranks is killed a few times; a restart ends when every rank has loaded the checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from supernode.control.journal import read
from supernode.schema.event import Event, RankReady, StepDone

LAYOUTS: dict[str, dict[str, Any]] = {"d8": {"data": 8}, "t2p2d2": {"tensor": 2, "pipeline": 2, "data": 2}}
HEADLINE = "d8"
RANKS = 8
JOB: dict[str, Any] = {
    "name": "launch",
    "model": {"layers": 4, "width": 64, "heads": 4},
    "data": {"text": str(Path(json.__file__).parent), "sequence": 64},
    "batch": 32,
    "gradient_accumulation": 2,
    "steps": 10_000,
    "checkpoint": {"every": 5},
    "evaluate": {"batches": 1},
    "threads": 1,
}
"""A small job without an end: what is timed is its start."""
SUPERNODE = str(Path(sys.executable).with_name("supernode"))
RUN_SECONDS = 120.0
IMPORT = [sys.executable, "-c", "import torch"]


def import_seconds() -> float:
    """Return how long a process takes that imports torch and ends."""
    begun = time.perf_counter()
    subprocess.run(IMPORT, check=True)
    return time.perf_counter() - begun


def launch(folder: Path, layout: str, kills: int, dice: random.Random) -> dict[str, Any]:
    """Run a job until its ranks work, kill one a few times, and return the seconds of each."""
    folder.mkdir()
    job, run = folder / "job.yaml", folder / "run"
    job.write_text(json.dumps(JOB | {"parallelism": LAYOUTS[layout]}))
    with (folder / "output.log").open("wb") as log:
        begun = time.time()
        controller = subprocess.Popen(
            [SUPERNODE, "run", str(job), "--folder", str(run), "--json"], stdout=log, stderr=log, cwd=folder
        )
    try:
        first = _first_step(run, controller, incarnation=1)
        result: dict[str, Any] = {"step": first - begun} | _ready(run, 1, since=begun) | {"restarts": []}
        for incarnation in range(2, 2 + kills):
            time.sleep(dice.uniform(0.2, 1.0))
            server = _children(controller.pid)[0]
            killed = time.time()
            os.kill(dice.choice(_children(server)), signal.SIGKILL)
            step = _first_step(run, controller, incarnation=incarnation) - killed
            result["restarts"].append({"step": step} | _ready(run, incarnation, since=killed))
    finally:
        controller.kill()
        controller.wait()
    return result


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _first_step(run: Path, controller: subprocess.Popen[bytes], *, incarnation: int) -> float:
    """Wait for the first step of an incarnation; returns when it was done."""
    begun = time.monotonic()
    while True:
        done = _times(run, lambda event: isinstance(event, StepDone) and event.incarnation == incarnation)
        if done:
            return done[0]
        assert controller.poll() is None, (run.parent / "output.log").read_text()
        assert time.monotonic() - begun < RUN_SECONDS, "the run hangs"
        time.sleep(0.05)


def _times(run: Path, wanted: Callable[[Event], bool]) -> list[float]:
    path = run / "journal.db"
    return [at for at, event in read(path) if wanted(event)] if path.exists() else []


def _ready(run: Path, incarnation: int, *, since: float) -> dict[str, float]:
    """Return the seconds until the last rank's first collective was done, and until the last was ready to train."""
    found = [
        (at, event)
        for at, event in read(run / "journal.db")
        if isinstance(event, RankReady) and event.incarnation == incarnation
    ]
    assert len(found) == RANKS, "a rank never became ready"
    return {
        "met": max(at - event.seconds + event.met_seconds for at, event in found) - since,
        "ready": max(at for at, _ in found) - since,
    }


def summed_up(rounds: list[dict[str, Any]], layout: str) -> dict[str, float]:
    """Return a layout's medians."""
    runs = [each[layout] for each in rounds]
    restarts = [restart for run in runs for restart in run["restarts"]]
    return {
        "met_seconds": statistics.median(run["met"] for run in runs),
        "met_over_import": statistics.median(run["met"] / run["import"] for run in runs),
        "all_ready_over_import": statistics.median(run["ready"] / run["import"] for run in runs),
        "ready_seconds": statistics.median(run["ready"] for run in runs),
        "first_step_seconds": statistics.median(run["step"] for run in runs),
        "restart_seconds": statistics.median(restart["ready"] for restart in restarts),
        "restart_until_first_step_seconds": statistics.median(restart["step"] for restart in restarts),
        "slowest_restart_seconds": max(restart["ready"] for restart in restarts),
    }


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    dice = random.Random(0)
    rounds: list[dict[str, Any]] = []
    import_seconds()  # The files are in memory before the first that counts.
    with harness.scratch() as folder:
        for number in range(15 if flags.full else 5):
            before, trials = import_seconds(), {}
            for layout in LAYOUTS:
                trial = launch(folder / f"{number}-{layout}", layout, 2, dice)
                after = import_seconds()
                trials[layout] = trial | {"import": (before + after) / 2}
                before = after
                restarts = ", ".join(f"{restart['ready']:.2f}" for restart in trial["restarts"])
                harness.say(
                    f"round {number} {layout:7} import {trials[layout]['import']:.2f} s, first collective"
                    f" {trial['met']:.2f}, ready {trial['ready']:.2f}, first step {trial['step']:.2f},"
                    f" restarts {restarts}"
                )
            rounds.append(trials)
    layouts = {layout: summed_up(rounds, layout) for layout in LAYOUTS}
    result = {
        "ready_over_import": layouts[HEADLINE]["met_over_import"],
        "restart_seconds": max(row["restart_seconds"] for row in layouts.values()),
        "what_is_timed": "from just before the command is started to the end of the first collective on the last of 8"
        " ranks, over the time of `python -c 'import torch'`; a restart from the signal until the last rank has loaded"
        " the checkpoint and met the others, loading included",
        "headline_layout": HEADLINE,
        "layouts": layouts,
        "import_seconds": statistics.median(trial["import"] for trials in rounds for trial in trials.values()),
        "load_average": os.getloadavg()[0],
        "rounds": rounds,
        "machine": harness.machine("torch"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
