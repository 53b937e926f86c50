"""How long does the pool take to answer? Allocates 1 to 512 cards from a part-filled torus of 512."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from supernode.errors import CapacityError
from supernode.hardware.assemble import build_machine
from supernode.scheduling.pool import Pool
from supernode.schema.slice import Request

CARDS = 512
GB = 10**9


def part_filled(share: float, *, seed: int) -> Pool:
    """Return a pool of 512 cards with about so much of it held, after slices have come and gone."""
    pool, dice = Pool(build_machine(CARDS)), random.Random(seed)
    held = []
    while pool.used < share:
        try:
            held.append(pool.allocate(Request(cards=dice.choice([1, 2, 3, 4, 6, 8, 12, 16]))))
        except CapacityError:
            break
        if dice.random() < 0.25:
            pool.release(held.pop(dice.randrange(len(held))))
    return pool


def measure(sizes: list[int], *, share: float, repeats: int) -> tuple[dict[int, list[float]], int]:
    """Return milliseconds of each answer by size, refusals included, and how many were refusals."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    refused = 0
    for seed in range(repeats):
        pool = part_filled(share, seed=seed)
        for size in sizes:
            request = Request(cards=size, memory=80 * 2**30, bandwidth=100 * GB)
            start = time.perf_counter()
            try:
                made = pool.allocate(request)
            except CapacityError:
                made = None
            times[size].append((time.perf_counter() - start) * 1000)
            if made:
                pool.release(made)
            else:
                refused += 1
    return times, refused


def quantile(values: list[float], part: float) -> float:
    """Return the value that so much of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def machine_info() -> dict[str, object]:
    """Return what the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--full", action="store_true", help="more repeats")
    parser.add_argument("--share", type=float, default=0.3, help="part of the cards that is held before (default 0.3)")
    flags = parser.parse_args()
    times, refused = measure(list(range(1, CARDS + 1)), share=flags.share, repeats=5 if flags.full else 2)
    every = [value for values in times.values() for value in values]
    empty, _ = measure(list(range(1, CARDS + 1)), share=0.0, repeats=1)
    result = {
        "median_ms_512": round(statistics.median(every), 4),
        "p99_ms_512": round(quantile(every, 0.99), 4),
        "median_ms_512_granted_from_empty": round(statistics.median(v for values in empty.values() for v in values), 4),
        "answers": len(every),
        "refused": refused,
        "held_before": flags.share,
        "by_size_ms": {str(2**power): round(statistics.median(times[2**power]), 4) for power in range(10)},
        "machine": machine_info(),
    }
    print(f"512-card torus, {flags.share:.0%} held: {len(every)} answers, {refused} refusals", file=sys.stderr)
    print(f"median {result['median_ms_512']} ms, 99 % within {result['p99_ms_512']} ms", file=sys.stderr)
    for size, milliseconds in result["by_size_ms"].items():
        print(f"{size:>5} cards  {milliseconds:.3f} ms", file=sys.stderr)
    if flags.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
