"""Which strategies can our own trainer run, and as what job? The others are forecast only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from supernode.errors import SpecError
from supernode.planning.cost import with_sums
from supernode.planning.cut import cut_stages
from supernode.planning.memory import held_layers, trainer, with_state
from supernode.schema.job import JobSpec
from supernode.schema.spread import Parallelism
from supernode.search.search import Choice
from supernode.search.space import Space
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import (
    FLOAT32,
    FULL,
    GPIPE,
    INTERLEAVED,
    NO_RECOMPUTE,
    ONE_F_ONE_B,
    PRECISIONS,
    SELECTIVE,
    ZERO_BUBBLE,
    Software,
    Strategies,
    make_strategies,
)

Precision = Literal["float32", "bfloat16"]
SCHEDULES: Mapping[int, Literal["1f1b", "gpipe", "interleaved", "zero_bubble"]] = {
    GPIPE: "gpipe",
    ONE_F_ONE_B: "1f1b",
    INTERLEAVED: "interleaved",
    ZERO_BUBBLE: "zero_bubble",
}
RECOMPUTES: Mapping[int, Literal["none", "selective", "full"]] = {
    NO_RECOMPUTE: "none",
    SELECTIVE: "selective",
    FULL: "full",
}
SHARDINGS: Mapping[int, Literal["replicas", "fsdp"]] = {0: "replicas", 3: "fsdp"}


def runnable_space(space: Space, job: JobSpec | None = None, *, is_core: bool = False) -> Space:
    """Return the part of a space that our trainer can run, with what its software does.

    Args:
        job: whose optimizer and dropout are taken; None for AdamW, unclipped.
        is_core: cards are a computer's cores, which do not compute while they send.

    Raises:
        SpecError: the model is none that the trainer builds.
    """
    model = space.model
    if not is_trainable(model):
        raise SpecError(
            "our trainer builds dense decoders with gated feed-forward layers, and this model is another",
            hint="leave out `--runnable` and `--write`; a forecast is possible.",
        )
    if PRECISIONS[space.precision] not in get_args(Precision):
        raise SpecError(
            f"our trainer does not compute in {PRECISIONS[space.precision]}",
            hint=f"choose `--precision` {' or '.join(get_args(Precision))}, or leave out `--runnable` and `--write`.",
        )
    precision: Precision = "float32" if space.precision == FLOAT32 else "bfloat16"
    spec = (job or JobSpec()).optimizer
    shape = job.shape if job is not None else None
    ours = trainer(
        precision=precision, clips=spec.clip > 0, drops=shape is not None and shape.dropout > 0,
        moments=2 if spec.name == "adamw" else int(spec.momentum > 0),
    )  # fmt: skip

    if job is not None and job.precision == precision:
        ours = with_state(ours, job)

    def does(software: Software, ways: Strategies) -> Software:
        summed = with_sums(software, ways, is_core=is_core)
        # Whole copies gather their gradients in buckets, which reads and writes them.
        copied = 2 * ways.element * ((ways.data * ways.context > 1) & (ways.sharding == 0))
        return replace(summed, update_bytes=software.update_bytes + copied)

    return replace(
        space, software=with_sums(ours, make_strategies(), is_core=is_core), does=does, schedules=tuple(SCHEDULES),
        shardings=tuple(SHARDINGS), offloads=(0,), is_filled=True, allows=_go_together,
        cut=planner_cut(model, space.sequence), most_tensor=min(space.most_tensor, int(model.key_value_heads)),
    )  # fmt: skip


TOGETHER = ("recompute", "schedule", "pipeline", "context", "tensor", "sequence_parallel")


def _go_together(ways: Strategies) -> NDArray[np.bool_]:
    """Return which strategies' axes our trainer takes together."""
    twice = (ways.recompute == FULL) & (ways.schedule == ZERO_BUBBLE) & (ways.pipeline > 1)
    # Each rank of a context axis takes a part from the front and one from the back, and its tensor ranks share both.
    parts = np.where(ways.context > 1, 2 * ways.context, 1) * np.where(ways.sequence_parallel > 0, ways.tensor, 1)
    uneven = ways.sequence % parts != 0
    return np.asarray(~(twice | uneven))


def planner_cut(model: ModelShape, sequence: int) -> Callable[[int, int], tuple[int, int]]:
    """Return what tells, for pipeline and interleaving, the layers of the fullest rank but the last, and of the last.

    The planner evens out arithmetic, so that ranks hold unequal layers: the head counts for some on the last one.
    """
    width, heads, keys = float(model.width), float(model.heads), float(model.key_value_heads)
    attention = heads * float(model.head_width + model.values) + keys * float(model.head_width + model.values)
    # As `planning.work` counts them: FLOPs per token of a layer's forward, causal scores included, and of the head's.
    layer = 2 * width * (attention + 3 * float(model.mlp_width)) + 2 * width * sequence
    head = 2 * width * float(model.vocabulary)

    @cache
    def cut(pipeline: int, interleave: int) -> tuple[int, int]:
        stages = cut_stages([layer] * int(model.layers), pipeline=pipeline, interleave=interleave, head=head)
        return held_layers(stages, pipeline=pipeline)

    return cut


def is_runnable(space: Space) -> bool:
    """Return whether our trainer builds the space's model and computes in its precision."""
    return is_trainable(space.model) and PRECISIONS[space.precision] in get_args(Precision)


def is_trainable(model: ModelShape) -> bool:
    """Return whether our trainer builds such models: dense causal decoders with gated feed-forward layers."""
    return not (model.mixtures or model.mambas or model.positions) and bool(model.causal and model.gated)


def obstacles(space: Space, choice: Choice) -> tuple[str, ...]:
    """Return what our trainer cannot do of a strategy; nothing where it can run it."""
    return tuple(_obstacles(space, choice))


def _obstacles(space: Space, choice: Choice) -> Iterator[str]:
    axes, model = choice.axes, space.model
    if not is_trainable(model):
        yield "such models"
    if axes["expert"] > 1:
        yield "experts of other models than its own"
    if axes["tensor"] > model.key_value_heads:
        yield "tensor degrees above the key heads"
    if axes["sharding"] not in SHARDINGS:
        yield f"ZeRO {axes['sharding']:.0f}"
    if not _go_together(make_strategies(**{n: v for n, v in axes.items() if n in TOGETHER}, sequence=space.sequence)):
        yield "layers computed again under zero-bubble schedules, or a sequence that its axes cannot share evenly"
    if axes["offload"]:
        yield "offloading to the host"
    if micro_batches(space, choice) < axes["pipeline"]:
        yield "steps of fewer micro-batches than stages"


def micro_batches(space: Space, choice: Choice) -> int:
    """Return the micro-batches of one step on each pipeline."""
    return int(space.batch // (choice.axes["data"] * choice.axes["micro_batch"]))


def job_of(space: Space, choice: Choice, job: JobSpec) -> JobSpec:
    """Return the job with a strategy's degrees, as the trainer and `supernode plan` take it.

    Raises:
        SpecError: the trainer cannot run the strategy; the message says why.
    """
    if found := obstacles(space, choice):
        raise SpecError(
            f"our trainer lacks {', '.join(found)}", hint="search with `--runnable` for a plan that it can run."
        )
    axes = {name: int(value) for name, value in choice.axes.items()}
    degrees = Parallelism(
        tensor=axes["tensor"], pipeline=axes["pipeline"], data=axes["data"], sharding=SHARDINGS[axes["sharding"]],
        schedule=SCHEDULES[axes["schedule"]] if axes["pipeline"] > 1 else "1f1b", interleave=axes["interleave"],
        context=axes["context"], sequence=bool(axes["sequence_parallel"]), recompute=RECOMPUTES[axes["recompute"]],
    )  # fmt: skip
    return replace(job, batch=space.batch, gradient_accumulation=micro_batches(space, choice), parallelism=degrees)
