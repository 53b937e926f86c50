"""What does the user's own module ask of a card? Traced on the side, at the micro-batch that the job's layout gives."""

from __future__ import annotations

from supernode.backends.tracing import can_trace, trace
from supernode.planning.layout import resolve_layout
from supernode.schema.job import JobSpec
from supernode.schema.trace import ModelTrace, TraceRequest


def trace_of(job: JobSpec, cards: int) -> ModelTrace | None:
    """Return the trace of the job's own module on so many cards; None for a shape, or where torch is not installed.

    Raises:
        SupernodeError: the job cannot be laid out, or the user's code fails.
    """
    if not job.module or not can_trace():
        return None
    layout = resolve_layout(job, cards)
    return trace(TraceRequest(job=job, micro_batch=job.micro_batch_of // layout.data))
