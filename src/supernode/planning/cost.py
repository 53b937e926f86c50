"""How long does one step take? A closed form: compute, what the axes wait for, the update, and what launching costs."""

from __future__ import annotations

from dataclasses import dataclass

from supernode.forecast.efficiency import precision_index
from supernode.forecast.kernels import pass_times
from supernode.forecast.rates import card_of
from supernode.hardware.machine import Machine
from supernode.planning.exchange import (
    all_gather_time,
    all_reduce_time,
    data_tier,
    ends_tier,
    pipeline_tier,
    send_time,
    tensor_tier,
)
from supernode.planning.memory import moments
from supernode.planning.work import (
    ELEMENT_BYTES,
    block_matrix,
    head_matrix,
    micro_batch_tokens,
    rank_parameters,
    shape_of,
    sharded_by,
    share,
)
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan, Stage, StepTime
from supernode.workload.shape import decoder_shape
from supernode.workload.strategy import Software, make_strategies
from supernode.workload.sublayers import attention_demand, embedding_traffic, head_demand, mlp_demand

# Counted by torch.profiler over forward and backward of one decoder block in eager PyTorch 2.13: 262 operations that
# call no other; timed at width 32, where arithmetic is next to nothing: 0.56 ms on one x86 core, 2.1 µs each.
BLOCK_OPERATIONS = 262
OPERATION_TIME = 2.1e-6
# `bucket_cap_mb` of torch.nn.parallel.DistributedDataParallel: the last bucket has no backward left to hide behind.
BUCKET = 25 * 2**20
# Our own trainer: eager PyTorch with `scaled_dot_product_attention`.
TRAINER = Software(fused=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds that one micro-batch takes in one stage.

    Attributes:
        forward: computing, without the tensor axis.
        backward: likewise.
        tensor_forward: all-reduces over the tensor axis, which nothing hides.
        tensor_backward: likewise.
    """

    stage: Stage
    forward: float
    backward: float
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0

    @property
    def computing(self) -> float:
        """Forward and backward, without the tensor axis."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """Forward and backward with everything."""
        return self.computing + self.tensor_forward + self.tensor_backward


def flops_per_step(shape: DecoderShape, tokens: int, sequence: int) -> float:
    """Return the floating-point operations of one step over all cards.

    6 for each parameter and token, and 12 × layers × width × sequence for each token's attention, of which the causal
    mask leaves half.

    Args:
        tokens: that the step trains on.
        sequence: tokens in a sample.

    Source: Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B; halved for the mask.
    """
    return tokens * (6.0 * shape.parameters + 12.0 * shape.layers * shape.width * sequence / 2)


def stage_times(plan: Plan, machine: Machine) -> tuple[StageTime, ...]:
    """Return the seconds of every stage, in order; none for the user's own module."""
    shape = shape_of(plan)
    if shape is None:
        return ()
    sync = _tensor_sync(plan, shape, machine)
    return tuple(_stage_time(plan, shape, machine, stage, sync) for stage in plan.stages)


def transfer_time(plan: Plan, machine: Machine) -> float:
    """Return the time of one micro-batch's way from stage to stage; 0 on one stage."""
    shape = shape_of(plan)
    if shape is None or plan.layout.pipeline == 1:
        return 0.0
    nbytes = micro_batch_tokens(plan) * shape.width * ELEMENT_BYTES[plan.job.precision]
    return send_time(nbytes, tier=pipeline_tier(plan, machine))


def step_time(plan: Plan, machine: Machine) -> StepTime | None:
    """Return the prediction; None for the user's own module.

    Everything is told from the busiest pipeline rank: the parts add up to its step.
    """
    shape = shape_of(plan)
    if shape is None:
        return None
    times = stage_times(plan, machine)
    by_rank = [[t for t in times if t.stage.rank == rank] for rank in range(plan.layout.pipeline)]
    busiest = max(by_rank, key=lambda mine: sum(t.total for t in mine))
    compute = plan.micro_batches * sum(t.computing for t in busiest)
    tensor = plan.micro_batches * sum(t.total - t.computing for t in busiest)
    parameters = max(rank_parameters(plan, shape, rank) for rank in range(plan.layout.pipeline))
    return StepTime(
        compute=compute,
        tensor=tensor,
        pipeline=_bubble(plan, times, busiest) + _exposed_transfers(plan, machine),
        data=_data_sync(plan, shape, machine, parameters, busiest),
        optimizer=_update(plan, machine, parameters),
        overhead=_overhead(plan, machine, busiest),
    )


def _stage_time(plan: Plan, shape: DecoderShape, machine: Machine, stage: Stage, sync: float) -> StageTime:
    model, card = decoder_shape(shape), card_of(machine)
    ways = make_strategies(
        tensor=plan.layout.tensor, micro_batch=plan.micro_batch, sequence=plan.job.data.sequence,
        precision=precision_index(plan.job.precision),
    )  # fmt: skip
    blocks = stage.last - stage.first
    kinds = (attention_demand(model, ways, TRAINER), mlp_demand(model, ways, TRAINER))
    passes = [pass_times(kind, ways, card, TRAINER) for kind in kinds]
    head = pass_times(head_demand(model, ways), ways, card, TRAINER, again=False)
    embedding = float(embedding_traffic(model, ways)) / (card.memory_bandwidth * card.fitted.memory)
    forward = blocks * sum(float(each.forward) for each in passes)
    backward = blocks * sum(float(each.backward) for each in passes)
    return StageTime(
        stage=stage,
        forward=forward + stage.heads * float(head.forward) + stage.embeds * embedding,
        backward=backward + stage.heads * float(head.backward) + stage.embeds * embedding,
        tensor_forward=(2 * blocks + stage.embeds) * sync,
        tensor_backward=(2 * blocks + stage.heads) * sync,
    )


def _tensor_sync(plan: Plan, shape: DecoderShape, machine: Machine) -> float:
    """Return the time of one all-reduce of a micro-batch's whole width; two per block in each direction.

    Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
    """
    if plan.layout.tensor == 1:
        return 0.0
    nbytes = micro_batch_tokens(plan) * shape.width * ELEMENT_BYTES[plan.job.precision]
    return all_reduce_time(nbytes, cards=plan.layout.tensor, tier=tensor_tier(plan, machine))


def _bubble(plan: Plan, times: tuple[StageTime, ...], busiest: list[StageTime]) -> float:
    """Return how long the busiest rank waits for the pipeline to fill and drain.

    It is a share of (p − 1) / (m v) of the work where all stages are alike (Narayanan et al., arXiv:2104.04473,
    section 2.2): one stage's time for each other rank.
    """
    others = [t.total for t in times if t not in busiest]
    return (plan.layout.pipeline - 1) * sum(others) / len(others) if others else 0.0


def _exposed_transfers(plan: Plan, machine: Machine) -> float:
    """Return the waiting for activations and gradients on their way between stages.

    GPipe and the interleaved schedule wait for them while the pipeline fills and drains: once through all stages and
    back. 1F1B has p micro-batches in flight, and the next p start when those are back, so that each round waits for
    the way to the last rank and back. The event-by-event simulation agrees, to the last way, where stages are alike.
    """
    layout = plan.layout
    if layout.pipeline == 1:
        return 0.0
    if layout.schedule == "1f1b":
        rounds = plan.micro_batches / layout.pipeline
        ways = 2 * (layout.pipeline - 1) * rounds + 2 * (layout.pipeline - 2)
    else:
        ways = 2 * (layout.pipeline * layout.interleave - 1)
    return ways * transfer_time(plan, machine)


def _data_sync(plan: Plan, shape: DecoderShape, machine: Machine, parameters: int, busiest: list[StageTime]) -> float:
    """Return the gradient synchronisation (and, for `fsdp`, the gathering of weights) that computing does not hide."""
    layout, element = plan.layout, ELEMENT_BYTES[plan.job.precision]
    ends = 0.0
    if shape.tied and layout.pipeline > 1:
        nbytes = head_matrix(shape, layout.tensor) * element / sharded_by(layout)
        ends = all_reduce_time(nbytes, cards=2, tier=ends_tier(plan, machine))
    if layout.data == 1:
        return ends
    tier = data_tier(plan, machine)
    # A CPU that sends does not compute meanwhile.
    overlaps = machine.card.kind != "cpu"
    forward = overlaps * sum(t.forward + t.tensor_forward for t in busiest)
    backward = overlaps * sum(t.backward + t.tensor_backward for t in busiest)
    gather = all_gather_time(parameters * element, cards=layout.data, tier=tier)
    if layout.sharding == "fsdp":
        first = all_gather_time(block_matrix(shape, layout.tensor) * element, cards=layout.data, tier=tier)
        waits = (plan.micro_batches - 1) * (max(0.0, gather - forward) + max(0.0, gather - backward))
        last = max(0.0, gather - forward) + max(0.0, 2 * gather - backward)
        return ends + max(waits + last, 2 * first)
    bucket = min(parameters * element, BUCKET)
    return ends + max(2 * gather - backward, all_reduce_time(bucket, cards=layout.data, tier=tier))


def _update(plan: Plan, machine: Machine, parameters: int) -> float:
    """Return the time of clipping and update, both bound by memory.

    Clipping reads the gradient twice and writes it once; the update reads weights, gradient and moments and writes all
    but the gradient.
    """
    passes = 3 * (plan.job.optimizer.clip > 0) + 3 + 2 * moments(plan)
    local = share(parameters, sharded_by(plan.layout)) * ELEMENT_BYTES[plan.job.precision]
    return passes * local / machine.card.memory_bandwidth


def _overhead(plan: Plan, machine: Machine, busiest: list[StageTime]) -> float:
    """Return what comes on top: launching on a CPU, which cannot compute meanwhile; an accelerator's own step costs."""
    if machine.card.kind != "cpu":
        return card_of(machine).fitted.step
    blocks = sum(t.stage.last - t.stage.first for t in busiest)
    return plan.micro_batches * blocks * BLOCK_OPERATIONS * OPERATION_TIME
