"""Ours, run as the others are: a real job from `SuperNode.run`, journalled, watched from outside for its CPU time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from supernode.backends.fork_client import ForkServer
from supernode.control.supernode import SuperNode
from supernode.control.training import start
from supernode.intake.jobfile import job_from
from supernode.schema.event import Event, StepDone
from supernode.schema.report import RunState


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of another process with all its threads, by the clock that it would read itself."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), as Linux encodes it


def main() -> None:
    """Train until the benchmark interrupts."""
    orders: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    answer, cards = Path(orders["answer"]), orders["ranks"]
    job = job_from({
        "name": "step-time",
        "model": {key: value for key, value in orders["shape"].items() if key != "dropout"},
        "data": {"tokens": orders["tokens"], "sequence": orders["sequence"]},
        "batch": cards * orders["batch"],
        "steps": orders["steps"],
        "parallelism": {"data": cards},
        "optimizer": {"name": "adamw", "learning_rate": orders["learning_rate"], "clip": 1.0},
        "checkpoint": {"every": orders["steps"]},
        "evaluate": {"batches": 1},
        "recovery": {"silence": 3600},  # The benchmark stops ranks for a while.
        "threads": 1,
    })  # fmt: skip
    server = ForkServer()
    pids: list[int] = []
    marks = (answer / "marks-0").open("w", buffering=1)

    def watch(event: Event, _: RunState) -> None:
        if not isinstance(event, StepDone):
            return
        if not pids:
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            pids.extend(map(int, children))
            (answer / "pids").write_text(" ".join(children))
        spent = sum(map(cpu_seconds, pids)) + time.process_time()
        marks.write(f"{time.perf_counter()!r} {spent / cards!r} {event.seconds!r}\n")

    start(SuperNode.discover(cards=cards).pool, job, folder=answer / "run", watch=watch, server=server)


if __name__ == "__main__":
    main()
