"""How full does the fullest card of a plan get? The forecast's count, given the plan's own cut and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from supernode.forecast.efficiency import precision_index
from supernode.forecast.memory import memory_parts
from supernode.hardware.machine import Machine
from supernode.planning.work import ELEMENT_BYTES, shape_of
from supernode.schema.job import JobSpec
from supernode.schema.plan import MemoryUse, Plan, Stage
from supernode.workload.shape import decoder_shape
from supernode.workload.strategy import (
    FULL,
    GPIPE,
    INTERLEAVED,
    NO_RECOMPUTE,
    ONE_F_ONE_B,
    SELECTIVE,
    ZERO_BUBBLE,
    Software,
    Strategies,
    make_strategies,
)

# Of a card's memory, for tensors; the rest is the driver's, the communication library's, and lost to fragments.
USABLE = 0.9
BLOCK = 256
"""Moments in 8 bits that share a scale, as `precision.moments` has them."""
SCHEDULES = {"gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED, "zero_bubble": ZERO_BUBBLE}
RECOMPUTES = {"none": NO_RECOMPUTE, "selective": SELECTIVE, "full": FULL}


def memory_use(plan: Plan) -> MemoryUse | None:
    """Return the estimate for the fullest card; None for the user's own module.

    Weights, gradients and moments are all of the job's precision, as PyTorch's optimizers keep them, unless the job
    says otherwise. The driver's own memory and what the allocator loses to fragments are not counted.
    """
    shape = shape_of(plan)
    if shape is None:
        return None
    does = trainer(precision=plan.job.precision, moments=moments(plan.job), drops=shape.dropout > 0)
    does = with_state(does, plan.job)
    held = memory_parts(decoder_shape(shape), strategy_of(plan), does)
    names = ("weights", "gradients", "optimizer", "activations", "workspace")
    return MemoryUse(**{name: round(float(getattr(held, name))) for name in names})


def wall(machine: Machine) -> float:
    """Return the bytes above which a card's part does not fit.

    A core's share of the host's memory is no wall: neighbours may need less. All of it is one.
    """
    return machine.card.memory * (machine.card_count if machine.card.kind == "cpu" else USABLE)


def moments(job: JobSpec) -> int:
    """Return how many numbers per parameter the optimizer keeps."""
    return 2 if job.optimizer.name == "adamw" else int(job.optimizer.momentum > 0)


def moment_bytes(job: JobSpec) -> float:
    """Return the bytes of one moment of a weight: in 8 bits, a byte and its part of a block's scale."""
    return {"same": ELEMENT_BYTES[job.precision], "float32": 4.0, "float8": 1 + 1 / BLOCK}[job.optimizer.state]


def with_state(does: Software, job: JobSpec) -> Software:
    """Return our trainer with the weights, moments and updates that the job asks for."""
    spec, element, each = job.optimizer, ELEMENT_BYTES[job.precision], moment_bytes(job)
    is_own = spec.in_backward or spec.rounding != "nearest" or spec.state != "same" or job.precision == "float16"
    moved = 2 * does.moments * (each - element)
    return replace(
        does, weight_bytes=element, moment_bytes=each, early=spec.in_backward, gradient_bytes=element,
        update_bytes=does.update_bytes + moved, copies_update=does.copies_update and not is_own,
    )  # fmt: skip


def strategy_of(plan: Plan) -> Strategies:
    """Return the plan's degrees in the forecast's terms, with the layers that its pipeline ranks really hold."""
    layout, shape = plan.layout, plan.job.shape
    has_experts = shape is not None and shape.experts > 0
    most, last = held_layers(plan.stages, pipeline=layout.pipeline)
    return make_strategies(
        tensor=layout.tensor, pipeline=layout.pipeline, interleave=layout.interleave, data=layout.data,
        context=layout.context, expert=layout.expert, expert_tensor=layout.tensor if has_experts else 1,
        sequence_parallel=int(layout.sequence),
        recompute=RECOMPUTES[layout.recompute],
        sharding=3 if layout.sharding == "fsdp" and layout.copies > 1 else 0, micro_batch=plan.micro_batch,
        batch=plan.micro_batch * plan.micro_batches * layout.data, sequence=plan.job.data.sequence,
        schedule=SCHEDULES[layout.schedule], precision=precision_index(product_precision(plan.job)),
        fullest=most, last=last,
    )  # fmt: skip


def product_precision(job: JobSpec) -> str:
    """Return the precision of the job's matrix products."""
    return "float8" if job.arithmetic == "float8" else job.activations


def held_layers(stages: Sequence[Stage], *, pipeline: int) -> tuple[int, int]:
    """Return the layers of the pipeline rank that holds most, the last one left out, and of the last; 0 of one rank."""
    held = [0] * pipeline
    for stage in stages:
        held[stage.rank] += stage.last - stage.first
    return (max(held[:-1]), held[-1]) if pipeline > 1 else (0, 0)


def trainer(
    *, precision: str = "bfloat16", clips: bool = False, moments: int = 2, copies: bool = False, drops: bool = False
) -> Software:
    """Return what our own trainer does: eager PyTorch with `scaled_dot_product_attention`.

    Clipping reads the gradient twice and writes it once; the update reads weights, gradient and moments and writes all
    but the gradient. Whole copies gather their gradients in buckets first, which reads and writes them.

    Args:
        precision: of weights and arithmetic.
        clips: the gradient's norm is limited.
        moments: numbers that the optimizer keeps for each weight.
        copies: the data axis keeps whole copies.
        drops: blocks have dropout.
    """
    element = ELEMENT_BYTES[precision]
    passes = 3 * clips + 3 + 2 * moments + 2 * copies
    return Software(
        fused=False, dropout=drops, gradient_bytes=element, update_bytes=passes * element, splits_ends=True,
        scatters_once=True, whole_gradients=True, whole_messages=True, master_copy=False, moments=moments,
        copies_update=True,
    )  # fmt: skip
