"""How long a sequence can ranks share, and what is a pipeline worth on long ones? Under memory limits that are real.

First the longest sequence that one rank trains on under a limit of the kernel's (RLIMIT_DATA) is looked for; then four
ranks under the same limit each share one at least four times as long, and one process without a limit judges the loss.

Then two ranks on two emulated hosts with one thread each train the same model on the same batches, spread over copies
or over stages. Each has the same limit, above what a pipeline rank needs and below what a copy needs that keeps all its
activations: copies compute again or shard, whichever of what fits is quickest. The link between the hosts is limited.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # The first optimizer step would import it, for seconds.
import torch.distributed as dist
import torch.distributed.pipelining  # likewise

import harness
from hosts import MBIT, Hosts, emulated
from supernode.control.journal import read
from supernode.data.sampler import Sampler
from supernode.errors import MachineError
from supernode.hardware.assemble import build_machine
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import place_of
from supernode.parallel.tensor import IGNORED, cross_entropy
from supernode.planning.planner import make_plan
from supernode.schema.event import StepDone
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism
from supernode.training.data import Feed, TokenWindows
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Stepper

RANKS = 4
SHARED = {"layers": 4, "width": 256, "heads": 8, "kv_heads": 4, "vocabulary": 256}
LIMIT = 512 * 2**20
"""Bytes of data that a rank may have, of which Python with torch takes 250 MiB before the run begins."""
STACK = 2**19
"""Bytes of a thread's stack, which the kernel counts whole though little of it is used, by default 8 MiB a thread."""
SHARDING = "fsdp"
"""Of the ranks that share a sequence: weights, gradients and moments are spread over the context axis as well."""
GRAIN = 128
"""Tokens between which the longest sequence is not told apart."""
STEPS = 2
"""From the second on, the optimizer's moments are held beside the activations."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
"""Freed blocks of 256 KiB and more go back to the kernel, so that the limit counts what is in use."""

SHAPE = DecoderShape(layers=4, width=512, heads=8, kv_heads=8, vocabulary=256)
SEQUENCE, BATCH = 1024, 4
BUDGET = 460 * 2**20
"""Bytes beyond the empty process that a rank of the second part may have, chosen between what a stage and a copy need:
a copy that keeps its activations takes about 490 MiB, one that computes them again 375, a shard 445, a stage 430."""
MAIN_RATE = 50.0
RATES = (25.0, 50.0, 100.0, None)
"""Mbit/s of the link; None is as fast as the computer."""
NO_MEMORY = 77
"""Exit code of a rank that had none left."""
WAYS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "data, recompute": {"data": 2, "recompute": "full"},
    "data, fsdp": {"data": 2, "sharding": "fsdp"},
    "pipeline": {"pipeline": 2},
    "pipeline, zero bubble": {"pipeline": 2, "schedule": "zero_bubble"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of a run: its losses by step, or what it said when it failed."""

    losses: dict[int, float]
    code: int
    says: str
    seconds: float


def write_tokens(path: Path, count: int, vocabulary: int) -> Path:
    """Write tokens that can be learned in part."""
    dice = np.random.default_rng(0)
    follows, other = dice.random(count) < 0.7, dice.integers(vocabulary, size=count)
    tokens = np.zeros(count, np.uint16)
    for place in range(1, count):
        tokens[place] = (5 * int(tokens[place - 1]) + 1) % vocabulary if follows[place] else other[place]
    np.save(path, tokens)
    return path


def bound(limit: int) -> None:
    """Limit this process and those that it starts."""
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def train(folder: Path, tokens: Path, sequence: int, *, context: int, limit: int | None, steps: int) -> Tried:
    """Train by the command line, as a user would, under a limit that every process of the run inherits."""
    job = {
        "name": "long", "model": SHARED, "data": {"tokens": str(tokens), "sequence": sequence, "held_out": 0.0},
        "batch": 1, "steps": steps, "seed": 1, "threads": 1,
        # Ranks that share a sequence hold the same weights and may share those, too; that outweighs what threads and
        # buffers for talking to each other take. One rank alone has nobody to share with.
        "parallelism": {"data": 1, "context": context, "sharding": SHARDING if context > 1 else "replicas"},
        "optimizer": {"warmup": 1}, "checkpoint": {"every": steps},
    }  # fmt: skip
    file, run = folder / "job.yaml", folder / f"run-{time.time_ns()}"
    file.write_text(json.dumps(job))
    words = [sys.executable, "-m", "supernode", "run", str(file), "--folder", str(run), "--cards", str(context)]
    begun = time.perf_counter()
    done = subprocess.run(
        words, env=os.environ | ALLOCATOR, capture_output=True, text=True, check=False, timeout=600,
        preexec_fn=lambda: bound(limit) if limit else None,
    )  # fmt: skip
    events = [event for _, event in read(run / "journal.db")] if (run / "journal.db").exists() else []
    said = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    tried = Tried(
        losses={event.step: event.loss for event in events if isinstance(event, StepDone)},
        code=done.returncode, says=" ".join(said), seconds=time.perf_counter() - begun,
    )  # fmt: skip
    harness.say(f"{sequence:6} tokens on {context}: {'trained' if not tried.code else said[0] if said else 'failed'}")
    if tried.code and "no memory" not in tried.says:
        raise RuntimeError(f"not for want of memory: {done.stderr}")
    return tried


def longest(folder: Path, tokens: Path) -> tuple[int, Tried]:
    """Return the shortest sequence, to a grain, that one rank cannot hold under the limit, and what it says of it."""
    holds, fails, refused = 0, 0, None
    guess = 1024
    while not fails or fails - holds > GRAIN:
        tried = train(folder, tokens, guess, context=1, limit=LIMIT, steps=STEPS)
        if tried.code:
            fails, refused = guess, tried
        else:
            holds = guess
        guess = (holds + fails) // 2 // GRAIN * GRAIN if fails else 2 * holds
        guess = max(guess, holds + GRAIN)
    assert refused is not None
    return fails, refused


def share(folder: Path) -> dict[str, Any]:
    """Return what four ranks under the limit hold over what one does, and whether they compute the same."""
    tokens = write_tokens(folder / "tokens.npy", 300_000, SHARED["vocabulary"] - 5)
    fails, refused = longest(folder, tokens)
    most = RANKS * fails
    together = train(folder, tokens, most, context=RANKS, limit=LIMIT, steps=STEPS)
    alone = train(folder, tokens, most, context=1, limit=None, steps=STEPS)
    one_limited = train(folder, tokens, most, context=1, limit=LIMIT, steps=1)
    gaps = [abs(together.losses[step] - loss) / loss for step, loss in alone.losses.items() if step in together.losses]
    same = len(gaps) == STEPS
    return {
        "longest_over_one_rank": most / (fails - GRAIN) if not together.code else 0.0,
        "loss_rel": max(gaps) if same else math.inf,
        "limit_bytes": LIMIT,
        "one_rank_tokens": fails - GRAIN,
        "one_rank_fails_at": fails,
        "one_rank_says": refused.says,
        "one_rank_exit_code": refused.code,
        "one_rank_fails_at_the_shared_length": bool(one_limited.code),
        "context": RANKS,
        "sharding": SHARDING,
        "shared_tokens": most,
        "losses_shared": list(together.losses.values()),
        "losses_alone": list(alone.losses.values()),
    }


def plan_of(degrees: dict[str, Any]) -> Plan:
    """Return the plan of one way: one sequence in a micro-batch."""
    spread = Parallelism(**{"data": 1} | degrees)
    job = JobSpec(
        model=SHAPE, batch=BATCH, gradient_accumulation=BATCH // spread.data, data=DataSpec(sequence=SEQUENCE),
        parallelism=spread, optimizer=OptimizerSpec(warmup=0, decay="none"), seed=1, threads=1,
    )  # fmt: skip
    return make_plan(job, build_machine(card_count=2, card="H100"), vocabulary=SHAPE.vocabulary)


def data_bytes() -> int:
    """Return the bytes of data that this process has, as its limit counts them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def steps_of(way: dict[str, Any], hosts: Hosts) -> Callable[[int], dict[str, Any]]:
    """Return what a rank does: a step at each rate, timed between barriers."""
    plan = plan_of(way)

    def live(rank: int) -> dict[str, Any]:
        most = data_bytes() + BUDGET
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        try:
            return _steps(plan, rank, hosts)
        except (RuntimeError, MemoryError) as error:
            cause: BaseException | None = error
            while cause is not None:  # The pipeline's runtime wraps what a stage raised.
                if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                    os._exit(NO_MEMORY)
                cause = cause.__cause__
            raise

    return live


def _steps(plan: Plan, rank: int, hosts: Hosts) -> dict[str, Any]:
    place = place_of(plan.layout, rank)
    parts = assemble(plan, place)
    tokens = np.random.default_rng(5).integers(0, SHAPE.vocabulary, 64 * SEQUENCE + 1)
    feed = Feed(
        plan=plan, data=place.data, train=TokenWindows(tokens, SEQUENCE), held_out=None,
        sampler=Sampler(64, BATCH, plan.job.seed, drop_last=False), loss=cross_entropy,
        count=lambda target: int((target != IGNORED).sum()), pads=True,
    )  # fmt: skip
    optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
    stepper = Stepper(plan, place, parts, feed, optimizer, cross_entropy)
    losses: list[float] = []
    seconds: dict[str, float] = {}
    for number, rate in enumerate((None, *RATES)):  # The first step settles memory; its time is overwritten.
        if rank == 0:
            hosts.limit(None if rate is None else rate * MBIT)
        dist.barrier()
        begun = time.perf_counter()
        losses.append(stepper.train(number).loss)
        dist.barrier()
        seconds[name_of(rate)] = time.perf_counter() - begun
    return {"losses": losses, "seconds": seconds}


def name_of(rate: float | None) -> str:
    """Return how a rate is called in the table."""
    return "unlimited" if rate is None else f"{rate:g} Mbit/s"


def attempt(name: str, hosts: Hosts) -> dict[str, Any] | None:
    """Return the losses and seconds of one way under the limit; None where it does not fit."""
    begun = time.perf_counter()
    try:
        first, _ = hosts.run(steps_of(WAYS[name], hosts), (0, 1), patience=400)
    except RuntimeError as error:
        if f"ended with {NO_MEMORY}" not in str(error):
            raise
        harness.say(f"{name}: does not fit")
        return None
    finally:
        hosts.limit(None)
    took = ", ".join(f"{rate} {seconds:.1f} s" for rate, seconds in first["seconds"].items())
    harness.say(f"{name}: {took}; {time.perf_counter() - begun:.0f} s in all")
    return first


def compare(*, rounds: int) -> dict[str, Any]:
    """Return what a pipeline takes against copies, both under the limit, over links of each rate."""
    seconds: dict[str, list[dict[str, float]]] = {}
    losses: dict[str, list[float]] = {}
    left = list(WAYS)
    with emulated(2) as hosts:
        for _ in range(rounds):  # The ways take turns.
            for name in tuple(left):
                found = attempt(name, hosts)
                if found is None:
                    left.remove(name)
                    continue
                losses[name] = found["losses"]
                seconds.setdefault(name, []).append(found["seconds"])
    speedups, best = {}, {}
    for rate in map(name_of, RATES):
        quickest = [
            {
                kind: min((seconds[n][turn][rate], n) for n in left if n.startswith(kind))
                for kind in ("data", "pipeline")
            }
            for turn in range(rounds)
        ]
        speedups[rate] = statistics.median(turn["data"][0] / turn["pipeline"][0] for turn in quickest)
        best[rate] = [quickest[0]["data"][1], quickest[0]["pipeline"][1]]
    reference = losses[left[0]]
    gap = max(abs(a - b) / b for name in left for a, b in zip(losses[name], reference, strict=True))
    return {
        "pipeline_speedup": speedups[name_of(MAIN_RATE)],
        "pipeline_rate_mbit": MAIN_RATE,
        "pipeline_speedups": speedups,
        "pipeline_claim_holds_at": [rate for rate, ratio in speedups.items() if ratio >= 1.8],
        "pipeline_against": best,
        "pipeline_does_not_fit": [name for name in WAYS if name not in left],
        "pipeline_seconds": seconds,
        "pipeline_loss_rel": gap,
        "pipeline_budget_bytes": BUDGET,
        "pipeline_budget_is": "chosen between what a stage and a copy that keeps its activations need",
        "pipeline_tokens": SEQUENCE,
        "pipeline_batch": BATCH,
        "pipeline_parameters": SHAPE.parameters,
    }


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    if any(os.environ.get(key) != value for key, value in ALLOCATOR.items()):  # The allocator reads them at the start.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    torch.set_num_threads(1)
    with harness.scratch() as folder:
        result = share(folder)
    try:
        result |= compare(rounds=5 if flags.full else 2)
    except MachineError as error:
        harness.say(f"no emulated hosts: {error.message}")
        result |= {"pipeline_speedup": None, "pipeline_why": error.message}
    harness.finish(result | {"machine": harness.machine("torch")}, flags)


if __name__ == "__main__":
    main()
