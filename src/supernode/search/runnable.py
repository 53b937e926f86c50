"""Which strategies can our own trainer run, and as what job? The others are forecast only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from supernode.errors import SpecError
from supernode.planning.cost import TRAINER
from supernode.schema.job import JobSpec, Parallelism
from supernode.search.search import Choice
from supernode.search.space import Space
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import FULL, GPIPE, INTERLEAVED, NO_RECOMPUTE, ONE_F_ONE_B, ZERO_BUBBLE

SCHEDULES: Mapping[int, Literal["1f1b", "gpipe", "interleaved"]] = {
    GPIPE: "gpipe",
    ONE_F_ONE_B: "1f1b",
    INTERLEAVED: "interleaved",
}
SHARDINGS: Mapping[int, Literal["replicas", "fsdp"]] = {0: "replicas", 3: "fsdp"}


def runnable_space(space: Space) -> Space:
    """Return the part of a space that our trainer can run, with what its software does.

    Raises:
        SpecError: the model is none that the trainer builds.
    """
    model = space.model
    if not is_trainable(model):
        raise SpecError(
            "our trainer builds dense decoders with gated feed-forward layers, and this model is another",
            hint="leave out `--runnable` and `--write`; a forecast is possible.",
        )
    return replace(
        space, software=TRAINER, schedules=tuple(SCHEDULES), shardings=tuple(SHARDINGS), offloads=(0,),
        sequence_parallels=(0,), only_recomputes=(NO_RECOMPUTE,), most_context=1, is_filled=True,
        most_tensor=min(space.most_tensor, int(model.key_value_heads)),
    )  # fmt: skip


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
    for name in ("context", "expert"):
        if axes[name] > 1:
            yield f"{name} parallelism"
    if axes["tensor"] > model.key_value_heads:
        yield "tensor degrees above the key heads"
    if axes["sequence_parallel"]:
        yield "sequence parallelism"
    if axes["sharding"] not in SHARDINGS:
        yield f"ZeRO {axes['sharding']:.0f}"
    if axes["recompute"]:
        yield "full recomputation" if axes["recompute"] == FULL else "selective recomputation"
    if axes["schedule"] == ZERO_BUBBLE and axes["pipeline"] > 1:
        yield "zero-bubble schedules"
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
    )  # fmt: skip
    return replace(job, batch=space.batch, gradient_accumulation=micro_batches(space, choice), parallelism=degrees)
