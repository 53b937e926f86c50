"""How will the user's own module run? Cut, memory and time of a plan from what its trace counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from supernode.forecast.axes import BUCKET, exposed_time, host_time, meeting_time
from supernode.forecast.efficiency import CardModel, precision_index
from supernode.forecast.kernels import pass_times
from supernode.forecast.network import gather_time, scatter_time, send_time, sum_time
from supernode.forecast.pipeline import bubble_time, left_open, travel_time
from supernode.forecast.rates import card_of
from supernode.hardware.machine import Machine
from supernode.planning.again import asked_units, kept_bytes
from supernode.planning.cost import TRAINER, StageTime, at_work, software_of
from supernode.planning.cut import cut_stages
from supernode.planning.memory import moment_bytes, moments, product_precision, strategy_of
from supernode.planning.work import ELEMENT_BYTES, sharded_by, share
from supernode.schema.job import JobSpec
from supernode.schema.order import forwards_ahead
from supernode.schema.plan import Layout, MemoryUse, Plan, Stage, StepTime
from supernode.schema.trace import ModelTrace, PassWork, TracedPart
from supernode.workload.shape import as_numbers
from supernode.workload.strategy import make_strategies
from supernode.workload.traced import block_passes, held_parameters, redone_passes, traced_demand

# Modules with parameters in a layer of `models.decoder`: four projections of the attention, three matrices, two norms.
LAYER_MODULES = 9


def pieces_of(trace: ModelTrace, layout: Layout) -> ModelTrace | None:
    """Return a trace with blocks that the layout's stages can be told by.

    Only a sequence is cut between its children. Of another module the graph is cut, in the order of its operations, of
    which the modules in the order in which they are met give an idea; none where they are fewer than stages.
    """
    stages = layout.pipeline * layout.interleave
    if stages == 1 or (trace.children and layout.tensor == 1):
        return trace
    return replace(trace, children=(), is_cut_anywhere=True) if len(trace.parts) >= stages else None


def cut_traced(
    job: JobSpec, layout: Layout, trace: ModelTrace, machine: Machine, *, micro_batch: int
) -> tuple[Stage, ...]:
    """Return the stages, `first` and `last` being places among the trace's blocks; the slowest is least slow.

    Raises:
        SpecError: there are fewer blocks than stages.
    """
    costs = [sum(pair) for pair in _block_times(job, trace, card_of(machine, layout.ranks), micro_batch)]
    return cut_stages(costs, pipeline=layout.pipeline, interleave=layout.interleave)


def traced_stage_times(plan: Plan, machine: Machine) -> tuple[StageTime, ...]:
    """Return the seconds of one micro-batch in every stage, in order; none without a trace."""
    if plan.trace is None:
        return ()
    card, adds = at_work(plan, machine), float(software_of(plan, machine).accumulate_bytes)
    times = _block_times(plan.job, plan.trace, card, plan.micro_batch)
    return tuple(
        StageTime(
            stage=stage,
            forward=sum(ahead for ahead, _ in times[stage.first : stage.last]),
            backward=sum(back for _, back in times[stage.first : stage.last])
            + adds * _held(plan, _of_stage(plan, stage))[1] / (card.memory_bandwidth * card.fitted.memory),
        )
        for stage in plan.stages
    )


def traced_messages(plan: Plan, machine: Machine) -> tuple[float, float]:
    """Return bytes and seconds of the largest message from stage to stage; its gradient is as large."""
    if plan.trace is None or plan.layout.pipeline == 1:
        return 0.0, 0.0
    nbytes = max(_output(plan.trace, stage, plan.micro_batch) for stage in plan.stages[:-1])
    wires, stride = at_work(plan, machine).tuned_wires, as_numbers(plan.layout.tensor * plan.layout.data)
    return nbytes, float(send_time(wires, as_numbers(nbytes), stride=stride))


def traced_sums(plan: Plan, machine: Machine, rank: int) -> tuple[float, float]:
    """Return the seconds of summing a pipeline rank's gradients into shards, and of gathering its weights.

    Whole copies are summed by all-reduces, half of one standing for each way. What is not there costs no message.
    """
    layout, wires = plan.layout, at_work(plan, machine).tuned_wires
    if layout.data == 1:
        return 0.0, 0.0
    held, trained = (as_numbers(n * ELEMENT_BYTES[plan.job.precision]) for n in _held(plan, _parts(plan, rank)))
    cards, stride = as_numbers(layout.data), as_numbers(layout.tensor)
    if layout.sharding == "replicas":
        half = float(sum_time(wires, trained, cards=cards, stride=stride)) / 2 if trained else 0.0
        return half, half
    scatter = float(scatter_time(wires, trained, cards=cards, stride=stride)) if trained else 0.0
    return scatter, float(gather_time(wires, held, cards=cards, stride=stride)) if held else 0.0


def traced_first(plan: Plan, rank: int) -> float:
    """Return the part of a rank's gradients that no backward is left to hide; 0 where nothing is trained."""
    nbytes = _held(plan, _parts(plan, rank))[1] * ELEMENT_BYTES[plan.job.precision]
    return min(1.0, BUCKET / nbytes) if nbytes else 0.0


def traced_step_time(plan: Plan, machine: Machine) -> StepTime | None:
    """Return the prediction, told from the busiest pipeline rank; None without a trace."""
    if plan.trace is None:
        return None
    times, ranks = traced_stage_times(plan, machine), range(plan.layout.pipeline)
    by_rank = [[t for t in times if t.stage.rank == rank] for rank in ranks]
    busy = [sum(t.total for t in mine) for mine in by_rank]
    waits = [
        _data_waits(plan, machine, rank, backward=sum(t.backward for t in mine)) for rank, mine in enumerate(by_rank)
    ]
    busiest = busy.index(max(busy))
    # Weights that are gathered for every pass make every rank's passes longer, so that others wait for those, too.
    longer = [wait / plan.micro_batches * (plan.layout.sharding == "fsdp") for wait in waits]
    passing = [own + more for own, more in zip(busy, longer, strict=True)]
    left, travel = _pipeline_waits(plan, machine, whole=sum(passing), slow=passing[busiest])
    return StepTime(
        compute=plan.micro_batches * busy[busiest] + min(left, 0.0),
        tensor=0.0,
        pipeline=max(left, 0.0) + travel,
        data=waits[busiest],
        optimizer=max(traced_update(plan, machine, rank) for rank in ranks),
        overhead=traced_overhead(plan, machine),
    )


def traced_overhead(plan: Plan, machine: Machine) -> float:
    """Return the seconds around a step: loader, scalars, and what keeping the axes going costs the busiest host."""
    card, ways, trace = at_work(plan, machine), strategy_of(plan), plan.trace
    assert trace is not None
    ranks = range(plan.layout.pipeline)
    by_rank = [[t.computing for t in traced_stage_times(plan, machine) if t.stage.rank == rank] for rank in ranks]
    host = [
        float(
            host_time(ways, card, layers=as_numbers(_layers(plan, rank)), busy=as_numbers(ways.micro_batches * sum(t)))
        )
        for rank, t in enumerate(by_rank)
    ]
    return float(card.fitted.step + meeting_time(ways, card)) + max(host)


def _layers(plan: Plan, rank: int) -> float:
    """Return how many of a decoder's layers cost a host as much as what a rank holds.

    Hooks go with modules that have parameters, and with the units of `fsdp`: a stage is one.
    """
    if plan.layout.sharding == "fsdp":
        return float(plan.layout.interleave)
    return sum(part.trained > 0 for part in _parts(plan, rank)) / LAYER_MODULES


def traced_update(plan: Plan, machine: Machine, rank: int) -> float:
    """Return the time of clipping and update on a pipeline rank, both bound by memory."""
    card = at_work(plan, machine)
    mine = share(_held(plan, _parts(plan, rank))[1], sharded_by(plan.layout))
    return mine * float(software_of(plan, machine).update_bytes) / (card.memory_bandwidth * card.fitted.memory)


def traced_memory(plan: Plan) -> MemoryUse | None:
    """Return the estimate for the fullest card; None without a trace.

    Over the tensor axis all parameters and products are taken to be split, and activations to be whole.

    Weights, gradients and moments are all of the job's precision, as for a shape (`planning.memory`).
    """
    if plan.trace is None:
        return None
    uses = [_rank_use(plan, plan.trace, rank) for rank in range(plan.layout.pipeline)]
    return max(uses, key=lambda use: use.total)


def stage_names(plan: Plan) -> str:
    """Return the cut in a line, by the names of the sequence's children, or of modules in the order they are met."""
    assert plan.trace is not None
    names = plan.trace.children or tuple(part.name or "(root)" for part in plan.trace.parts)
    pieces = [names[stage.first : stage.last] for stage in plan.stages]
    return " | ".join(piece[0] if len(piece) == 1 else f"{piece[0]}–{piece[-1]}" for piece in pieces if piece)


def _block_times(job: JobSpec, trace: ModelTrace, card: CardModel, samples: int) -> list[tuple[float, float]]:
    element = ELEMENT_BYTES[job.precision]
    ways = make_strategies(micro_batch=samples, precision=precision_index(product_precision(job)))

    def seconds(passes: Sequence[PassWork]) -> list[float]:
        demand = traced_demand(passes, samples=samples, element=element)
        times: list[float] = (pass_times(demand, ways, card, TRAINER).forward / job.parallelism.tensor).tolist()
        return times

    ahead, back = map(seconds, zip(*block_passes(trace), strict=True))
    if units := asked_units(job, trace):
        names = frozenset(name for unit in units for name in unit.names)
        again = seconds(redone_passes(trace, names))
        back = [own + more for own, more in zip(back, again, strict=True)]
    return list(zip(ahead, back, strict=True))


def _held(plan: Plan, parts: Sequence[TracedPart]) -> tuple[int, int]:
    """Return elements that one card holds of parts, and those that it trains, before `fsdp` shards them."""
    held, trained = held_parameters(parts)
    return share(held, plan.layout.tensor), share(trained, plan.layout.tensor)


def _parts(plan: Plan, rank: int) -> tuple[TracedPart, ...]:
    """Return the parts that a pipeline rank holds."""
    mine = [stage for stage in plan.stages if stage.rank == rank]
    return tuple(part for stage in mine for part in _of_stage(plan, stage))


def _of_stage(plan: Plan, stage: Stage) -> tuple[TracedPart, ...]:
    assert plan.trace is not None
    return tuple(part for block in range(stage.first, stage.last) for part in plan.trace.block(block))


def _output(trace: ModelTrace, stage: Stage, samples: int) -> float:
    """Return the bytes that a stage hands on."""
    if trace.is_cut_anywhere:
        return trace.parts[stage.last - 1].output.of(samples)
    last = trace.children[stage.last - 1]
    return next(part.output.of(samples) for part in trace.parts if part.name == last)


def _rank_use(plan: Plan, trace: ModelTrace, rank: int) -> MemoryUse:
    element, cards = ELEMENT_BYTES[plan.job.precision], sharded_by(plan.layout)
    parts = _parts(plan, rank)
    held, trained = _held(plan, parts)
    weights = share(held, cards) * element + sum(part.buffers for part in parts)
    gradients = share(trained, cards) * element
    job = plan.job
    kept = round(share(trained, cards) * moments(job) * moment_bytes(job))
    is_early = job.optimizer.in_backward and plan.micro_batches == 1
    activations = _activations(plan, trace, rank)
    # What `fsdp` holds whole: a stage is one unit, with its gradients.
    gathered = (held + trained) * element if cards > 1 else 0
    ends = any(stage.rank == rank and stage.index == len(plan.stages) - 1 for stage in plan.stages)
    # Before the last stage, a gradient goes through the largest output while the next one is made.
    passing = 2 * max((part.output.of(plan.micro_batch) for part in parts), default=0.0)
    passing = trace.workspace.of(plan.micro_batch) if ends else passing
    # The update makes one temporary as large as the weights (torch.optim, foreach); by then activations are free.
    return MemoryUse(
        weights=weights, gradients=0 if is_early else gradients, optimizer=kept, activations=activations,
        workspace=max(gathered + int(passing), gradients - activations),
    )  # fmt: skip


def _activations(plan: Plan, trace: ModelTrace, rank: int) -> int:
    layout = plan.layout
    held = forwards_ahead(
        layout.schedule, rank=rank, pipeline=layout.pipeline, interleave=layout.interleave,
        micro_batches=plan.micro_batches if layout.pipeline > 1 else 1,
    )  # fmt: skip
    sizes, largest, units = [], 0.0, asked_units(plan.job, trace)
    for stage in (stage for stage in plan.stages if stage.rank == rank):
        is_sent = stage.index < len(plan.stages) - 1  # the output is kept until its gradient is back
        sent = _output(trace, stage, plan.micro_batch) if is_sent else 0.0
        given = _output(trace, plan.stages[stage.index - 1], plan.micro_batch) if stage.index else 0.0
        kept, again = kept_bytes(_of_stage(plan, stage), units, plan.micro_batch, given=given)
        sizes.append(kept + sent)
        largest = max(largest, again)
    whole, rest = divmod(held, len(sizes))
    return int(whole * sum(sizes) + rest * max(sizes) + largest)


def _pipeline_waits(plan: Plan, machine: Machine, *, whole: float, slow: float) -> tuple[float, float]:
    """Return the bubble and the transfers that nothing hides, as `forecast.pipeline` has them for a shape."""
    ways, software, (_, message) = strategy_of(plan), software_of(plan, machine), traced_messages(plan, machine)
    none, both, many = as_numbers(0), {"whole": as_numbers(whole), "slow": as_numbers(slow)}, plan.micro_batches
    left = left_open(
        ways, bubble_time(ways, **both, forward=none, weights=none), sharing=at_work(plan, machine).sharing,
        busy=many * both["slow"], even=many * both["whole"] / ways.pipeline,
    )  # fmt: skip
    hop = as_numbers(message)
    travel = travel_time(ways, software, ahead=hop, back=hop, landing=none, **both, weights=none)
    return float(left), float(travel)


def _data_waits(plan: Plan, machine: Machine, rank: int, *, backward: float) -> float:
    """Return the gradients' synchronisation that computing does not hide.

    A stage is one unit of `fsdp`, so that its weights are gathered before anything is computed.
    """
    scatter, gather = traced_sums(plan, machine, rank)
    if plan.layout.sharding == "fsdp":
        return 2 * plan.micro_batches * gather + scatter
    if not software_of(plan, machine).overlaps_data:
        return scatter + gather
    return float(
        exposed_time(
            as_numbers(scatter + gather), as_numbers(backward), first=as_numbers(traced_first(plan, rank)),
            contention=as_numbers(at_work(plan, machine).fitted.contention),
        )
    )  # fmt: skip
