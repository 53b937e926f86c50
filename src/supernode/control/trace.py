"""What does the user's own module ask of a card? Traced on the side, at the micro-batch that the job's layout gives."""

from __future__ import annotations

from dataclasses import replace

from supernode.backends.tracing import can_trace, trace
from supernode.hardware.machine import Machine
from supernode.planning.layout import resolve_layout
from supernode.planning.planner import make_plan
from supernode.schema.job import JobSpec
from supernode.schema.plan import Plan
from supernode.schema.trace import ModelTrace, TraceRequest


def plan_with_trace(job: JobSpec, machine: Machine) -> Plan:
    """Return the plan of a job on a machine; where its own module could not be counted, a note says why.

    Raises:
        SupernodeError: the job cannot be laid out or does not fit, or the user's code fails.
    """
    trace = trace_of(job, machine.card_count)
    if trace is None or trace.parts:
        return make_plan(job, machine, trace=trace)
    plan = make_plan(job, machine)
    return replace(plan, notes=(*trace.notes, *plan.notes))


def trace_of(job: JobSpec, cards: int) -> ModelTrace | None:
    """Return the trace of the job's own module on so many cards; None for a shape, or where torch is not installed.

    It has no parts where the module could not be counted.

    Raises:
        SupernodeError: the job cannot be laid out, or the user's code fails.
    """
    if not job.module or not can_trace():
        return None
    layout = resolve_layout(job, cards)
    return trace(TraceRequest(job=job, micro_batch=job.micro_batch_of // layout.data))
