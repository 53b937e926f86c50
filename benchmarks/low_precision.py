"""How many bytes of training state does a parameter take, and what do few of them cost the loss?

The product's decoder learns the standard library's own sources through the product's data path and step, once with
everything in float32 (weights 4 bytes, gradients 4, moments 8) and once with weights in bfloat16 rounded by chance,
moments in 8 bits and updates made inside backward (2 + 0 + 2). Arithmetic is in float32 in both, so that the state
alone differs (and because this runs on CPUs). Same seed, same data in the same order; two seeds. Two controls, one
seed: the same with weights rounded to the nearest, and bfloat16 weights rounded by chance with moments in float32.

Bytes are the allocator's: what glibc's malloc counts as in use (`mallinfo2`: uordblks + hblkhd) with the state alive,
less what it counts once the model and its optimizer are dropped, after a full collection. Counted are weights,
gradients that live between steps, moments, their scales and Python's part of it all; not counted are data and the
rotary table, which is dropped before. `after_backward` is the same count when backward has just ended and, in float32,
no update has begun; `within_backward` the most seen after any parameter's gradient, activations that still live
included.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
from supernode.data.corpus import open_corpus, prepare
from supernode.hardware.assemble import build_machine
from supernode.parallel.assemble import Parts, assemble
from supernode.parallel.mesh import meet
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, EvaluateSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.training.data import open_feed
from supernode.training.optimizer import optimizer_for
from supernode.training.step import Stepper

STEPS = 1000
SHAPE = DecoderShape(layers=3, width=160, heads=5, hidden=448)
WINDOW = 50
"""Steps whose training losses are averaged before two curves are compared."""
FULL = OptimizerSpec(learning_rate=2e-3, warmup=50, decay="cosine", weight_decay=0.1)
LOW = replace(FULL, rounding="stochastic", state="float8", in_backward=True)
VARIANTS: dict[str, tuple[str, OptimizerSpec]] = {
    "float32": ("float32", FULL),
    "low": ("bfloat16", LOW),
    "low_nearest": ("bfloat16", replace(LOW, rounding="nearest")),
    "bfloat16_float32_moments": ("bfloat16", replace(FULL, rounding="stochastic", state="float32")),
}
CALLS = (("float32", 0), ("low", 0), ("float32", 1), ("low", 1), ("low_nearest", 0), ("bfloat16_float32_moments", 0))


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


_LIBC = ctypes.CDLL("libc.so.6")
_LIBC.mallinfo2.restype = _Mallinfo


def in_use() -> int:
    """Return the bytes that are allocated, on the heap and mapped."""
    info = _LIBC.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def settled() -> int:
    """Return the bytes that are allocated once nothing waits to be freed."""
    for _ in range(3):
        gc.collect()
    _LIBC.malloc_trim(0)
    return in_use()


def job(variant: str, seed: int, steps: int) -> JobSpec:
    """Return the job of a variant."""
    precision, optimizer = VARIANTS[variant]
    return JobSpec(
        model=SHAPE, batch=8, data=DataSpec(sequence=64), steps=steps, seed=seed, precision=precision,  # type: ignore[arg-type]
        arithmetic="float32", optimizer=optimizer, evaluate=EvaluateSpec(batches=100),
    )  # fmt: skip


def train(variant: str, seed: int, steps: int, data: Path, meeting: Path) -> dict[str, Any]:
    """Train one variant in this process; returns its losses and bytes."""
    torch.set_num_threads(1)
    plan = make_plan(job(variant, seed, steps), build_machine(card_count=1, card="H100"))
    place = meet(plan.layout, 0, folder=meeting, rendezvous="", silence=60)
    feed = open_feed(plan, open_corpus(data), 0)
    parts: Parts | None = assemble(plan, place)
    assert parts is not None
    optimizer: Any = optimizer_for(plan.job, dict(parts.parameters()))
    stepper: Stepper | None = Stepper(plan, place, parts, feed, optimizer, feed.loss)
    assert stepper is not None
    count = sum(parameter.numel() for parameter in stepper.trained)
    began = time.process_time()
    losses = [stepper.train(step).loss for step in range(steps - 1)]
    seconds = (time.process_time() - began) / (steps - 1)
    seen: dict[str, int] = {"within": 0}
    for parameter in stepper.trained:
        parameter.register_post_accumulate_grad_hook(lambda _: seen.update(within=max(seen["within"], in_use())))
    watch(stepper, seen)
    losses.append(stepper.train(steps - 1).loss)
    held_out = stepper.evaluate()
    parts.modules[0]._rotary = None  # type: ignore[assignment]
    stepper._norms.clear()
    alive = settled()
    del vars(stepper)["_meet"]
    for parameter in stepper.trained:  # A hook holds what it calls, and what that holds is the state.
        parameter._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]
    del parameter
    stepper = parts = optimizer = None
    dropped = settled()
    assert plan.memory is not None
    state = plan.memory.weights + plan.memory.gradients + plan.memory.optimizer
    return {
        "parameters": count, "losses": losses, "held_out": held_out, "cpu_seconds_per_step": seconds,
        "state": (alive - dropped) / count, "after_backward": (seen["after"] - dropped) / count,
        "within_backward": (seen["within"] - dropped) / count, "forecast": state / plan.parameters,
    }  # fmt: skip


def watch(stepper: Stepper, seen: dict[str, int]) -> None:
    """Count what is alive once backward has ended, before the ranks meet and the update is made."""
    meet_all = stepper._meet

    def met(*args: Any, **kwargs: Any) -> Any:
        seen["after"] = settled()
        return meet_all(*args, **kwargs)

    vars(stepper)["_meet"] = met


def in_a_process(variant: str, seed: int, steps: int, data: Path, folder: Path) -> dict[str, Any]:
    """Train one variant in a process of its own, so that its bytes are counted alone."""
    meeting = folder / f"{variant}-{seed}"
    meeting.mkdir()
    words = [sys.executable, __file__, "--child", variant, str(seed), str(steps), str(data), str(meeting)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{variant} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    harness.say(f"{variant}, seed {seed}: held-out loss {result['held_out']:.4f}, {result['state']:.3f} bytes")
    return result


def curve_gap(low: list[float], full: list[float]) -> float:
    """Return by how much one curve lies above another on average, in percent, after smoothing over `WINDOW` steps."""
    whole = len(low) // WINDOW * WINDOW
    smooth = [np.asarray(losses[:whole]).reshape(-1, WINDOW).mean(axis=1) for losses in (low, full)]
    return float((smooth[0] / smooth[1] - 1).mean() * 100)


def compare(runs: dict[tuple[str, int], dict[str, Any]], variant: str) -> dict[str, Any]:
    """Return a variant's figures, and its losses against float32 by seed."""
    seeds = [seed for name, seed in runs if name == variant]
    pairs = [(runs[variant, seed], runs["float32", seed]) for seed in seeds]
    return {
        "bytes_per_parameter": round(max(low["state"] for low, _ in pairs), 4),
        "after_backward_bytes_per_parameter": round(max(low["after_backward"] for low, _ in pairs), 4),
        "within_backward_bytes_per_parameter": round(max(low["within_backward"] for low, _ in pairs), 4),
        "forecast_bytes_per_parameter": round(pairs[0][0]["forecast"], 4),
        "held_out_losses": [round(low["held_out"], 5) for low, _ in pairs],
        "held_out_gaps_pct": [round((low["held_out"] / full["held_out"] - 1) * 100, 4) for low, full in pairs],
        "curve_gaps_pct": [round(curve_gap(low["losses"], full["losses"]), 4) for low, full in pairs],
        "cpu_seconds_per_step": round(min(low["cpu_seconds_per_step"] for low, _ in pairs), 4),
    }


def main() -> None:
    """Run all variants, two at a time, and print the figures."""
    if sys.argv[1:2] == ["--child"]:
        variant, seed, steps, data, meeting = sys.argv[2:]
        print(json.dumps(train(variant, int(seed), int(steps), Path(data), Path(meeting))))
        return
    flags_parser = harness.parser(__doc__)
    flags_parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each run")
    flags = flags_parser.parse_args()
    steps = flags.steps * (3 if flags.full else 1)
    with harness.scratch() as folder:
        prepare(job("float32", 0, steps), folder / "data")
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(in_a_process, *call, steps, folder / "data", folder) for call in CALLS]
            runs = dict(zip(CALLS, [future.result() for future in futures], strict=True))
    found = {variant: compare(runs, variant) for variant in VARIANTS}
    low, full = found["low"], found["float32"]
    errors = [abs(one["forecast_bytes_per_parameter"] / one["bytes_per_parameter"] - 1) for one in found.values()]
    harness.finish(
        {
            "benchmark": "low_precision", "machine": harness.machine("torch"), "steps": steps,
            "parameters": runs["low", 0]["parameters"], "seeds": 2,
            "state_bytes_per_parameter": low["bytes_per_parameter"],
            "state_bytes_per_parameter_float32": full["bytes_per_parameter"],
            "less_pct": round((1 - low["bytes_per_parameter"] / full["bytes_per_parameter"]) * 100, 2),
            "forecast_error_pct": round(max(errors) * 100, 2),
            "loss_gap_pct": max(low["held_out_gaps_pct"], key=abs),
            "curve_gap_pct": max(low["curve_gaps_pct"], key=abs),
            "variants": found,
        },
        flags,
    )  # fmt: skip


if __name__ == "__main__":
    main()
