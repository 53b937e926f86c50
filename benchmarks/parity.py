"""Does a parallel run compute what one process computes? Every layout against a plain PyTorch loop, step by step.

The reference below shares the model's class, its first values and the order of the samples with the product, nothing
else: one process, whole batches in one pass, PyTorch's own cross-entropy, clipping and unfused AdamW.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import harness
from supernode.control.journal import read
from supernode.control.supernode import SuperNode
from supernode.control.training import start
from supernode.data.corpus import open_corpus
from supernode.data.sampler import Sampler
from supernode.intake.jobfile import job_from
from supernode.models.decoder import Decoder
from supernode.parallel.chance import seed_for
from supernode.schema.event import Evaluated, StepDone
from supernode.schema.model import DecoderShape

SHAPE = DecoderShape(layers=5, width=64, heads=4, kv_heads=2, vocabulary=97, tied=True)
"""Five layers over two or four stages, and 97 rows of a tied embedding over two tensor ranks: neither divides."""
SEQUENCE, BATCH, ACCUMULATION, STEPS = 32, 16, 4, 30
TRAINED = 11 * BATCH + 7
"""Samples to train on: steps 12 and 24 end an epoch with 7 samples, which leaves whole micro-batches without any."""
HELD_OUT = 2 * BATCH + 7
EVALUATE_EVERY = 10
LEARNING_RATE, WARMUP, FINAL_RATIO, DECAY, BETAS, EPSILON = 2e-3, 5, 0.1, 0.1, (0.9, 0.95), 1e-8
CLIP = 0.5
SEED = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "t2": {"tensor": 2},
    "p2": {"pipeline": 2},
    "p2 gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "p2 interleaved 2": {"pipeline": 2, "schedule": "interleaved", "interleave": 2},
    "p4": {"pipeline": 4},
    "d2": {"data": 2},
    "d2 fsdp": {"data": 2, "sharding": "fsdp"},
    "t2p2": {"tensor": 2, "pipeline": 2},
    "t2d2": {"tensor": 2, "data": 2},
    "t2d2 fsdp": {"tensor": 2, "data": 2, "sharding": "fsdp"},
    "p2d2": {"pipeline": 2, "data": 2},
    "p2d2 fsdp": {"pipeline": 2, "data": 2, "sharding": "fsdp"},
    "p2d2 fsdp interleaved 2": {
        "pipeline": 2, "data": 2, "sharding": "fsdp", "schedule": "interleaved", "interleave": 2,
    },
    "t2p2d2": {"tensor": 2, "pipeline": 2, "data": 2},
    "t2p2d2 fsdp": {"tensor": 2, "pipeline": 2, "data": 2, "sharding": "fsdp"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a run came to: losses by step, norms before clipping, held-out losses by step, final parameters by name."""

    losses: dict[int, float]
    norms: dict[int, float]
    held_out: dict[int, float]
    parameters: dict[str, Tensor]


def write_tokens(path: Path) -> tuple[Path, float]:
    """Write tokens that can be learned in part; returns the file and the share of it to hold out."""
    trained, held = TRAINED * SEQUENCE + 5, HELD_OUT * SEQUENCE + 3
    dice = np.random.default_rng(SEED)
    tokens = np.zeros(trained + held, np.uint16)
    for place in range(1, len(tokens)):
        follows = (5 * int(tokens[place - 1]) + 1) % SHAPE.vocabulary
        tokens[place] = follows if dice.random() < 0.7 else dice.integers(SHAPE.vocabulary)
    tokens[0] = SHAPE.vocabulary - 1
    np.save(path, tokens)
    return path, (held + 0.5) / len(tokens)


def job_for(tokens: Path, share: float, parallelism: dict[str, Any]) -> dict[str, Any]:
    """Return the job of one layout."""
    return {
        "name": "parity",
        "model": {
            "layers": SHAPE.layers, "width": SHAPE.width, "heads": SHAPE.heads, "kv_heads": SHAPE.kv_heads,
            "vocabulary": SHAPE.vocabulary, "tied": SHAPE.tied,
        },
        "data": {"tokens": str(tokens), "sequence": SEQUENCE, "held_out": share},
        "batch": BATCH,
        "gradient_accumulation": ACCUMULATION,
        "steps": STEPS,
        "seed": SEED,
        "parallelism": {"data": 1, **parallelism},
        "optimizer": {
            "name": "adamw", "learning_rate": LEARNING_RATE, "warmup": WARMUP, "decay": "cosine",
            "final_ratio": FINAL_RATIO, "weight_decay": DECAY, "betas": list(BETAS), "epsilon": EPSILON, "clip": CLIP,
        },
        "checkpoint": {"every": STEPS},
        "evaluate": {"every": EVALUATE_EVERY, "batches": 4},
        "threads": 1,
    }  # fmt: skip


def train_by_product(job: dict[str, Any], folder: Path) -> Curve:
    """Train a layout on forked ranks and read what came of it from the run's folder."""
    degrees = job["parallelism"]
    ranks = degrees.get("tensor", 1) * degrees.get("pipeline", 1) * degrees["data"]
    start(SuperNode.discover(cards=ranks).pool, job_from(job), folder=folder)
    events = [event for _, event in read(folder / "journal.db")]
    steps = [event for event in events if isinstance(event, StepDone)]
    names = {f"model.{name}": torch.empty_like(parameter) for name, parameter in Decoder(SHAPE).named_parameters()}
    checkpoint = folder / "checkpoints" / f"step-{STEPS:08d}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(names, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return Curve(
        losses={event.step: event.loss for event in steps},
        norms={event.step: event.norm for event in steps},
        held_out={event.step: event.loss for event in events if isinstance(event, Evaluated)},
        parameters={name.removeprefix("model."): tensor for name, tensor in names.items()},
    )


def train_plainly(data: Path) -> Curve:
    """Train in this process, one pass a step."""
    corpus = open_corpus(data)
    train, held_out = (windows(np.fromfile(part, corpus.dtype)) for part in (corpus.train, corpus.held_out))
    assert (len(train[0]), len(held_out[0])) == (TRAINED, HELD_OUT), "the corpus was cut in another way"
    model = Decoder(SHAPE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.initialise(name, parameter, torch.Generator().manual_seed(seed_for(SEED, name)))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, foreach=False, fused=False,
    )  # fmt: skip
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_share)
    sampler = Sampler(TRAINED, BATCH, SEED, False)
    curve = Curve(losses={}, norms={}, held_out={}, parameters={name: p.data for name, p in model.named_parameters()})
    for step in range(1, STEPS + 1):
        chosen = torch.from_numpy(sampler.indices(step - 1))
        optimizer.zero_grad()
        loss = mean_loss(model, train[0][chosen], train[1][chosen])
        loss.backward()
        curve.norms[step] = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        rates.step()
        curve.losses[step] = loss.item()
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                curve.held_out[step] = mean_loss(model, *held_out).item()
    return curve


def windows(tokens: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    """Return consecutive windows of a row of tokens and the same shifted by one."""
    row = torch.from_numpy(tokens.astype(np.int64))
    count = (len(row) - 1) // SEQUENCE
    return row[: count * SEQUENCE].view(count, SEQUENCE), row[1 : count * SEQUENCE + 1].view(count, SEQUENCE)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of next tokens."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def rate_share(step: int) -> float:
    """Return the learning rate over the highest: linear up, then half a cosine down to `FINAL_RATIO`."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = min(1.0, (step - WARMUP) / (STEPS - 1 - WARMUP))
    return FINAL_RATIO + (1 - FINAL_RATIO) * (1 + math.cos(math.pi * progress)) / 2


def worst_gap(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Return the largest relative difference; infinite where one has a step that the other lacks."""
    if ours.keys() != theirs.keys():
        return math.inf
    return max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in theirs)


def parameter_gaps(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return for each tensor the norm of the difference over the norm of the reference's."""
    return {name: float((ours[name] - tensor).norm() / tensor.norm()) for name, tensor in theirs.items()}


def compare(ours: Curve, plain: Curve) -> dict[str, Any]:
    """Return a layout's row of the table."""
    gaps = parameter_gaps(ours.parameters, plain.parameters)
    worst = max(gaps, key=lambda name: gaps[name])
    return {
        "loss_rel": worst_gap(ours.losses, plain.losses),
        "held_out_rel": worst_gap(ours.held_out, plain.held_out),
        "norm_rel": worst_gap(ours.norms, plain.norms),
        "parameter_rel": gaps[worst],
        "worst_parameter": worst,
        "last_loss": ours.losses.get(STEPS, math.nan),
    }


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    plain: Curve | None = None
    with harness.scratch() as folder:
        tokens, share = write_tokens(folder / "tokens.npy")
        for name, parallelism in LAYOUTS.items():
            begun, run = time.perf_counter(), folder / name.replace(" ", "-")
            ours = train_by_product(job_for(tokens, share, parallelism), run)
            if plain is None:
                plain = train_plainly(run / "data")
            rows[name] = compare(ours, plain) | {"seconds": round(time.perf_counter() - begun, 1)}
            row = rows[name]
            harness.say(
                f"{name:24} loss {row['loss_rel']:.1e}  held out {row['held_out_rel']:.1e}  norm {row['norm_rel']:.1e}"
                f"  parameters {row['parameter_rel']:.1e} ({row['worst_parameter']})  {row['seconds']} s"
            )
    assert plain is not None
    clipped = sum(norm > CLIP for norm in plain.norms.values())
    result = {
        "worst_loss_rel": max(max(row["loss_rel"], row["held_out_rel"]) for row in rows.values()),
        "worst_train_loss_rel": max(row["loss_rel"] for row in rows.values()),
        "worst_held_out_rel": max(row["held_out_rel"] for row in rows.values()),
        "worst_norm_rel": max(row["norm_rel"] for row in rows.values()),
        "worst_parameter_rel": max(row["parameter_rel"] for row in rows.values()),
        "layouts": len(rows),
        "steps": STEPS,
        "clipped_steps": clipped,
        "short_batches": sum(len(Sampler(TRAINED, BATCH, SEED, False).indices(step)) < BATCH for step in range(STEPS)),
        "reference_losses": [plain.losses[1], plain.losses[STEPS]],
        "table": rows,
        "machine": harness.machine("torch", "numpy"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
