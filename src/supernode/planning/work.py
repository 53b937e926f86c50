"""How much does a stage compute, hold and send? Counts of FLOPs, parameters and elements, before any machine."""

from __future__ import annotations

from dataclasses import replace

from supernode.schema.job import JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Layout, Plan, Stage

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of one element by precision."""


def shape_of(plan: Plan) -> DecoderShape | None:
    """Return the shape that the plan's model is built with; None for the user's own module."""
    return with_vocabulary(plan.job, plan.vocabulary)


def with_vocabulary(job: JobSpec, vocabulary: int) -> DecoderShape | None:
    """Return the job's shape with an open vocabulary filled in."""
    shape = job.shape
    return replace(shape, vocabulary=vocabulary) if shape is not None and not shape.vocabulary else shape


def share(size: int, cards: int) -> int:
    """Return the largest part when `size` is cut as evenly as it goes."""
    return -(-size // cards)


def block_matrix(shape: DecoderShape, tensor: int) -> int:
    """Return the elements of one block's matrices on the card that holds most of them."""
    attention = shape.width * shape.head_width * (2 * shape.heads + 2 * shape.key_heads) // tensor
    return attention + 3 * shape.width * share(shape.inner, tensor)


def head_matrix(shape: DecoderShape, tensor: int) -> int:
    """Return the elements of the head's (or the embedding's) matrix on the card that holds most of them."""
    return shape.width * share(shape.vocabulary, tensor)


def stage_parameters(shape: DecoderShape, stage: Stage, *, tensor: int, alone: bool) -> int:
    """Return the parameters that one card of a stage works with; norms are whole on every card of the tensor axis.

    Args:
        alone: embedding and head are on one rank, so that a tied matrix is kept once; otherwise both ends keep it.
    """
    blocks = (stage.last - stage.first) * (block_matrix(shape, tensor) + 2 * shape.width)
    shared = stage.heads and shape.tied and alone
    ends = int(stage.embeds) + int(stage.heads) - int(shared)
    return blocks + ends * head_matrix(shape, tensor) + (shape.width if stage.heads else 0)


def rank_parameters(plan: Plan, shape: DecoderShape, rank: int) -> int:
    """Return the parameters that one card of a pipeline rank works with, before `fsdp` shards them."""
    mine = [stage for stage in plan.stages if stage.rank == rank]
    alone = any(stage.embeds for stage in mine) and any(stage.heads for stage in mine)
    return sum(stage_parameters(shape, stage, tensor=plan.layout.tensor, alone=alone) for stage in mine)


def block_forward_flops(shape: DecoderShape, sequence: int, *, tensor: int = 1) -> float:
    """Return FLOPs per token of one block's forward on one card; attention is causal, so half of it is computed."""
    return 2.0 * block_matrix(shape, tensor) + 2.0 * shape.width * sequence / tensor


def head_forward_flops(shape: DecoderShape, *, tensor: int = 1) -> float:
    """Return FLOPs per token of the head's forward on one card; the embedding is a look-up and costs none."""
    return 2.0 * head_matrix(shape, tensor)


def block_activations(shape: DecoderShape, tensor: int) -> int:
    """Return elements per token that one block keeps for its backward.

    The whole width on every card: inputs and outputs of both norms. The card's own part: queries, keys, values, the
    attention's result as computed and as the output product reads it; gate, up, SiLU of the gate, and their product.
    The T×T scores are not kept: `scaled_dot_product_attention` computes them again.

    Source: Korthikanti et al., arXiv:2205.05198, section 4, counted anew for RMSNorm, a gated MLP and fused attention.
    """
    own = (3 * shape.width + 2 * shape.key_heads * shape.head_width) // tensor + 4 * share(shape.inner, tensor)
    return 4 * shape.width + own


def micro_batch_tokens(plan: Plan) -> int:
    """Return the tokens of one micro-batch on one card."""
    return plan.micro_batch * plan.job.data.sequence


def sharded_by(layout: Layout) -> int:
    """Return the cards over which `fsdp` shards weights, gradients and optimizer; 1 for replicas."""
    return layout.data if layout.sharding == "fsdp" else 1
