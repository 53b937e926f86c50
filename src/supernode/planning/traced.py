"""How will the user's own module run? Cut, memory and time of a plan from what its trace counted."""

from __future__ import annotations

from supernode.errors import ModelError
from supernode.forecast.efficiency import precision_index
from supernode.forecast.kernels import pass_times
from supernode.forecast.network import gather_time, send_time
from supernode.forecast.rates import card_of
from supernode.hardware.machine import Machine
from supernode.planning.cost import BUCKET, TRAINER, StageTime
from supernode.planning.cut import cut_stages
from supernode.planning.memory import moments
from supernode.planning.order import forwards_ahead
from supernode.planning.work import ELEMENT_BYTES, sharded_by, share
from supernode.schema.job import JobSpec
from supernode.schema.plan import Layout, MemoryUse, Plan, Stage, StepTime
from supernode.schema.trace import ModelTrace, TracedPart
from supernode.workload.shape import as_numbers
from supernode.workload.strategy import make_strategies
from supernode.workload.traced import block_passes, held_parameters, traced_demand


def cut_traced(
    job: JobSpec, layout: Layout, trace: ModelTrace, machine: Machine, *, micro_batch: int
) -> tuple[Stage, ...]:
    """Return the stages, `first` and `last` being places among the sequence's children; the slowest is least slow.

    Raises:
        ModelError: the module is no sequence.
        SpecError: it is too short a one.
    """
    if layout.pipeline * layout.interleave > 1 and not trace.children:
        raise ModelError(
            f"{job.module} returns something else than a sequence, and only an nn.Sequential can be cut into "
            f"{layout.pipeline * layout.interleave} stages",
            hint="set `parallelism.pipeline` to 1, or return an nn.Sequential.",
        )
    costs = [sum(pair) for pair in _block_times(job, trace, machine, micro_batch)]
    return cut_stages(costs, pipeline=layout.pipeline, interleave=layout.interleave)


def traced_stage_times(plan: Plan, machine: Machine) -> tuple[StageTime, ...]:
    """Return the seconds of one micro-batch in every stage, in order; none without a trace."""
    if plan.trace is None:
        return ()
    times = _block_times(plan.job, plan.trace, machine, plan.micro_batch)
    return tuple(
        StageTime(
            stage=stage, forward=sum(ahead for ahead, _ in times[stage.first : stage.last]),
            backward=sum(back for _, back in times[stage.first : stage.last]),
        )
        for stage in plan.stages
    )  # fmt: skip


def traced_transfer_time(plan: Plan, machine: Machine) -> float:
    """Return the time of the longest way of one micro-batch from stage to stage; 0 on one stage."""
    if plan.trace is None or plan.layout.pipeline == 1:
        return 0.0
    nbytes = max(_output(plan.trace, stage, plan.micro_batch) for stage in plan.stages[:-1])
    stride = as_numbers(plan.layout.data)
    return float(send_time(card_of(machine).tuned_wires, as_numbers(nbytes), stride=stride))


def traced_step_time(plan: Plan, machine: Machine) -> StepTime | None:
    """Return the prediction, told from the busiest pipeline rank; None without a trace."""
    if plan.trace is None:
        return None
    times = traced_stage_times(plan, machine)
    by_rank = [[t for t in times if t.stage.rank == rank] for rank in range(plan.layout.pipeline)]
    busiest = max(by_rank, key=lambda mine: sum(t.total for t in mine))
    trained = max(held_parameters(_parts(plan, rank))[1] for rank in range(plan.layout.pipeline))
    added = (plan.micro_batches - 1) * 3 * trained * ELEMENT_BYTES[plan.job.precision]  # gradients to their sum
    return StepTime(
        compute=plan.micro_batches * sum(t.computing for t in busiest) + added / machine.card.memory_bandwidth,
        tensor=0.0,
        pipeline=_pipeline_waits(plan, machine, times, busiest),
        data=_data_sync(plan, machine, trained, busiest),
        optimizer=_update(plan, machine, trained),
        overhead=card_of(machine).fitted.step,
    )


def traced_memory(plan: Plan) -> MemoryUse | None:
    """Return the estimate for the fullest card; None without a trace.

    Weights, gradients and moments are all of the job's precision, as for a shape (`planning.memory`).
    """
    if plan.trace is None:
        return None
    uses = [_rank_use(plan, plan.trace, rank) for rank in range(plan.layout.pipeline)]
    return max(uses, key=lambda use: use.total)


def stage_names(plan: Plan) -> str:
    """Return the cut in a line, by the names of the sequence's children."""
    assert plan.trace is not None
    names = plan.trace.children
    pieces = [names[stage.first : stage.last] for stage in plan.stages]
    return " | ".join(piece[0] if len(piece) == 1 else f"{piece[0]}–{piece[-1]}" for piece in pieces if piece)


def _block_times(job: JobSpec, trace: ModelTrace, machine: Machine, samples: int) -> list[tuple[float, float]]:
    card = card_of(machine)
    element = ELEMENT_BYTES[job.precision]
    ways = make_strategies(micro_batch=samples, precision=precision_index(job.precision))
    both = []
    for passes in zip(*block_passes(trace), strict=True):
        demand = traced_demand(passes, samples=samples, element=element)
        both.append(pass_times(demand, ways, card, TRAINER).forward.tolist())
    return list(zip(*both, strict=True))


def _parts(plan: Plan, rank: int) -> tuple[TracedPart, ...]:
    """Return the parts that a pipeline rank holds."""
    assert plan.trace is not None
    mine = [stage for stage in plan.stages if stage.rank == rank]
    return tuple(part for s in mine for block in range(s.first, s.last) for part in plan.trace.block(block))


def _output(trace: ModelTrace, stage: Stage, samples: int) -> float:
    """Return the bytes that a stage hands on."""
    last = trace.children[stage.last - 1]
    return next(part.output.of(samples) for part in trace.parts if part.name == last)


def _rank_use(plan: Plan, trace: ModelTrace, rank: int) -> MemoryUse:
    element, cards = ELEMENT_BYTES[plan.job.precision], sharded_by(plan.layout)
    parts = _parts(plan, rank)
    held, trained = held_parameters(parts)
    weights = share(held, cards) * element + sum(part.buffers for part in parts)
    gradients = share(trained, cards) * element
    activations = _activations(plan, trace, rank)
    # What `fsdp` holds whole: a stage is one unit, with its gradients.
    gathered = (held + trained) * element if cards > 1 else 0
    ends = any(stage.rank == rank and stage.index == len(plan.stages) - 1 for stage in plan.stages)
    passing = int(trace.workspace.of(plan.micro_batch)) if ends else 0
    # The update makes one temporary as large as the weights (torch.optim, foreach); by then activations are free.
    return MemoryUse(
        weights=weights, gradients=gradients, optimizer=moments(plan) * gradients, activations=activations,
        workspace=max(gathered + passing, gradients - activations),
    )  # fmt: skip


def _activations(plan: Plan, trace: ModelTrace, rank: int) -> int:
    layout = plan.layout
    held = forwards_ahead(
        layout.schedule, rank=rank, pipeline=layout.pipeline, interleave=layout.interleave,
        micro_batches=plan.micro_batches if layout.pipeline > 1 else 1,
    )  # fmt: skip
    sizes = []
    for stage in (stage for stage in plan.stages if stage.rank == rank):
        parts = [part for block in range(stage.first, stage.last) for part in trace.block(block)]
        is_sent = stage.index < len(plan.stages) - 1  # the output is kept until its gradient is back
        sent = _output(trace, stage, plan.micro_batch) if is_sent else 0.0
        sizes.append(sum(part.kept.of(plan.micro_batch) for part in parts) + sent)
    whole, rest = divmod(held, len(sizes))
    return int(whole * sum(sizes) + rest * max(sizes))


def _pipeline_waits(plan: Plan, machine: Machine, times: tuple[StageTime, ...], busiest: list[StageTime]) -> float:
    """Return the bubble and the transfers that nothing hides, as `planning.cost` counts them for a shape."""
    layout = plan.layout
    if layout.pipeline == 1:
        return 0.0
    others = [t.total for t in times if t not in busiest]
    if layout.schedule == "1f1b":
        ways = 2 * (layout.pipeline - 1) * plan.micro_batches / layout.pipeline + 2 * (layout.pipeline - 2)
    else:
        ways = 2.0 * (layout.pipeline * layout.interleave - 1)
    return (layout.pipeline - 1) * sum(others) / len(others) + ways * traced_transfer_time(plan, machine)


def _data_sync(plan: Plan, machine: Machine, trained: int, busiest: list[StageTime]) -> float:
    """Return the gradients' synchronisation that computing does not hide.

    A stage is one unit of `fsdp`, so that its weights are gathered before anything is computed.
    """
    layout, element = plan.layout, ELEMENT_BYTES[plan.job.precision]
    if layout.data == 1:
        return 0.0
    wires, cards = card_of(machine).tuned_wires, as_numbers(layout.data)

    def gather(nbytes: float) -> float:
        return float(gather_time(wires, as_numbers(nbytes), cards=cards, stride=as_numbers(1)))

    if layout.sharding == "fsdp":
        return (2 * plan.micro_batches + 1) * gather(trained * element)
    # A CPU that sends does not compute meanwhile.
    backward = sum(t.backward for t in busiest) if machine.card.kind != "cpu" else 0.0
    bucket = min(trained * element, BUCKET)
    return max(2 * gather(trained * element) - backward, 2 * gather(bucket))


def _update(plan: Plan, machine: Machine, trained: int) -> float:
    """Return the time of clipping and update, both bound by memory; passes as `planning.cost` counts them."""
    passes = 3 * (plan.job.optimizer.clip > 0) + 3 + 2 * moments(plan)
    local = share(trained, sharded_by(plan.layout)) * ELEMENT_BYTES[plan.job.precision]
    return passes * local / machine.card.memory_bandwidth
