"""What does a step of the user's own module consist of? The same seconds as its plan's, pass by pass."""

from __future__ import annotations

from supernode.hardware.machine import Machine
from supernode.planning.cost import at_work, software_of
from supernode.planning.traced import (
    traced_first,
    traced_messages,
    traced_overhead,
    traced_stage_times,
    traced_sums,
    traced_update,
)
from supernode.schema.plan import Plan
from supernode.simulation.events.work import StageWork, StepWork, Sync


def traced_work(plan: Plan, machine: Machine) -> StepWork:
    """Return the step of a plan that has a trace."""
    software, ranks = software_of(plan, machine), range(plan.layout.pipeline)
    nbytes, seconds = traced_messages(plan, machine)
    return StepWork(
        stages=tuple(
            StageWork(layers=t.stage.last - t.stage.first, forward=t.forward, backward=t.backward)
            for t in traced_stage_times(plan, machine)
        ),
        schedule=plan.layout.schedule,
        pipeline=plan.layout.pipeline,
        micro_batches=plan.micro_batches,
        message=nbytes,
        message_back=nbytes,
        transfer=seconds,
        transfer_back=seconds,
        blocks=not software.overlaps_pipeline,
        sharing=at_work(plan, machine).sharing,
        sync=_sync(plan, machine),
        optimizer=max(traced_update(plan, machine, rank) for rank in ranks),
        fixed=traced_overhead(plan, machine),
    )


def _sync(plan: Plan, machine: Machine) -> Sync | None:
    layout, software = plan.layout, software_of(plan, machine)
    if layout.data == 1:
        return None
    scatter, gather = zip(*(traced_sums(plan, machine, rank) for rank in range(layout.pipeline)), strict=True)
    if layout.sharding == "fsdp":  # a stage is one unit: nothing runs beside its gathering
        return Sync(scatter=scatter, gather=gather, each=True, once=software.scatters_once, overlaps=False)
    return Sync(
        scatter=tuple(2 * seconds for seconds in scatter),
        gather=(0.0,) * layout.pipeline,
        first=tuple(traced_first(plan, rank) for rank in range(layout.pipeline)),
        overlaps=software.overlaps_data,
        contention=at_work(plan, machine).fitted.contention,
    )
