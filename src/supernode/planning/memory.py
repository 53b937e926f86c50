"""How full does the fullest card get? Weights, gradients, optimizer and activations by closed form."""

from __future__ import annotations

from supernode.planning.order import forwards_ahead
from supernode.planning.work import (
    ELEMENT_BYTES,
    block_activations,
    block_matrix,
    head_matrix,
    micro_batch_tokens,
    rank_parameters,
    shape_of,
    sharded_by,
    share,
)
from supernode.schema.model import DecoderShape
from supernode.schema.plan import MemoryUse, Plan, Stage


def memory_use(plan: Plan) -> MemoryUse | None:
    """Return the estimate for the fullest card; None for the user's own module.

    Weights, gradients and moments are all of the job's precision, as PyTorch's optimizers keep them. The driver's own
    memory and what the allocator loses to fragments are not counted.

    Source: Korthikanti et al., arXiv:2205.05198; Rajbhandari et al., arXiv:1910.02054, section 3 (sharding).
    """
    shape = shape_of(plan)
    if shape is None:
        return None
    uses = (_rank_use(plan, shape, rank) for rank in range(plan.layout.pipeline))
    return max(uses, key=lambda use: use.total)


def moments(plan: Plan) -> int:
    """Return how many numbers per parameter the optimizer keeps."""
    spec = plan.job.optimizer
    return 2 if spec.name == "adamw" else int(spec.momentum > 0)


def _rank_use(plan: Plan, shape: DecoderShape, rank: int) -> MemoryUse:
    layout, element = plan.layout, ELEMENT_BYTES[plan.job.precision]
    weights = share(rank_parameters(plan, shape, rank), sharded_by(layout)) * element
    activations = _activations(plan, shape, rank)
    workspace = _logits(plan, shape, rank) + _gathered(plan, shape, rank)
    # The update makes one temporary as large as the weights (torch.optim, foreach); by then activations are free.
    return MemoryUse(
        weights=weights,
        gradients=weights,
        optimizer=moments(plan) * weights,
        activations=activations,
        workspace=max(workspace, weights - activations),
    )


def _activations(plan: Plan, shape: DecoderShape, rank: int) -> int:
    layout = plan.layout
    held = forwards_ahead(
        layout.schedule,
        rank=rank,
        pipeline=layout.pipeline,
        interleave=layout.interleave,
        micro_batches=plan.micro_batches if layout.pipeline > 1 else 1,
    )
    mine = [stage for stage in plan.stages if stage.rank == rank]
    # Passes in flight spread over the rank's stages; an uneven rest is put on its largest.
    whole, rest = divmod(held, len(mine))
    sizes = [_stage_activations(plan, shape, stage) for stage in mine]
    return whole * sum(sizes) + rest * max(sizes)


def _stage_activations(plan: Plan, shape: DecoderShape, stage: Stage) -> int:
    """Return bytes that one micro-batch leaves in one stage until its backward."""
    layout, element = plan.layout, ELEMENT_BYTES[plan.job.precision]
    blocks = stage.last - stage.first
    per_token = blocks * block_activations(shape, layout.tensor) * element
    if shape.dropout:
        per_token += blocks * 2 * shape.width  # one byte of mask for each element
    if stage.heads:
        per_token += 2 * shape.width * element
    elif layout.pipeline > 1:
        per_token += shape.width * element  # the output, kept until it is sent and its gradient is back
    return micro_batch_tokens(plan) * per_token


def _logits(plan: Plan, shape: DecoderShape, rank: int) -> int:
    """Return bytes of the logits, their log-probabilities and their gradient, the latter two in float32."""
    if not any(stage.heads and stage.rank == rank for stage in plan.stages):
        return 0
    per_logit = ELEMENT_BYTES[plan.job.precision] + 4 + 4
    return micro_batch_tokens(plan) * share(shape.vocabulary, plan.layout.tensor) * per_logit


def _gathered(plan: Plan, shape: DecoderShape, rank: int) -> int:
    """Return bytes of what `fsdp` holds whole: a unit in use, the next one, and one unit's gradients."""
    if sharded_by(plan.layout) == 1:
        return 0
    tensor = plan.layout.tensor
    at_an_end = any((stage.embeds or stage.heads) and stage.rank == rank for stage in plan.stages)
    unit = max(block_matrix(shape, tensor), head_matrix(shape, tensor) if at_an_end else 0)
    return 3 * unit * ELEMENT_BYTES[plan.job.precision]
