"""How much does a stage compute, hold and send? Counts of FLOPs, parameters and elements, before any machine."""

from __future__ import annotations

from dataclasses import replace

from supernode.schema.job import JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Layout, Plan

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
    """Return the elements of those of one block's matrices that a token meets, on the card that holds most of them."""
    attention = shape.width * shape.head_width * (2 * shape.heads + 2 * shape.key_heads) // tensor
    visited = shape.experts_per_token if shape.experts else 1
    return attention + 3 * shape.width * share(shape.inner, tensor) * visited + shape.width * shape.experts


def head_matrix(shape: DecoderShape, tensor: int) -> int:
    """Return the elements of the head's (or the embedding's) matrix on the card that holds most of them."""
    return shape.width * share(shape.vocabulary, tensor)


def block_forward_flops(shape: DecoderShape, sequence: int, *, tensor: int = 1) -> float:
    """Return FLOPs per token of one block's forward on one card; attention is causal, so half of it is computed."""
    return 2.0 * block_matrix(shape, tensor) + 2.0 * shape.width * sequence / tensor


def head_forward_flops(shape: DecoderShape, *, tensor: int = 1) -> float:
    """Return FLOPs per token of the head's forward on one card; the embedding is a look-up and costs none."""
    return 2.0 * head_matrix(shape, tensor)


def sharded_by(layout: Layout) -> int:
    """Return the cards over which `fsdp` shards weights, gradients and optimizer; 1 for replicas."""
    return layout.copies if layout.sharding == "fsdp" else 1
