"""What do the measured times of a plan's ranks tell? Which ranks are slow, and how work would better be shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from statistics import mean, median

from supernode.hardware.machine import Machine
from supernode.planning.cost import step_time
from supernode.planning.cut import cut_stages
from supernode.planning.memory import memory_use, wall
from supernode.planning.traced import traced_memory, traced_step_time
from supernode.planning.work import block_forward_flops, head_forward_flops, shape_of
from supernode.scheduling.controller import Verdict
from supernode.schema.plan import Plan, Stage


def judge(plan: Plan, busy: Sequence[float], *, machine: Machine | None = None) -> Verdict:
    """Return what the ranks' times tell.

    A rank's pace is its time over the work that it has: micro-batches times what its stages cost, counted in FLOPs.
    Layers of the user's own module have no such count; its ranks are compared with those of the same stages alone, and
    its stages stay as they are.

    Args:
        busy: seconds that each rank's passes took in a step.
        machine: whose cards must hold what moves to them, and for which the moved plan is predicted; None for neither.
    """
    settings = plan.job.balance
    pace = [seconds / work for seconds, work in zip(busy, _work(plan, plan.stages, _shares(plan)), strict=True)]
    slow = {}
    for rank, own in enumerate(pace):
        usual = _usual(plan, pace, rank)
        if usual and own >= settings.slow * usual:
            slow[rank] = own / usual
    if not settings.move:
        return Verdict(slow=slow)
    before = _busiest(plan, pace, plan.stages, _shares(plan))
    ways = product((plan.stages, _cut(plan, pace)), (_shares(plan), _shared(plan, pace)))
    for after, stages, share in sorted(((_busiest(plan, pace, *way), *way) for way in ways), key=itemgetter(0)):
        if after > (1 - settings.gain) * before:
            break
        moved = _moved(plan, stages, share, machine)
        if moved is not None:
            return Verdict(slow=slow, plan=moved, reason=_reason(plan, moved, saved=1 - after / before))
    return Verdict(slow=slow)


def _moved(plan: Plan, stages: tuple[Stage, ...], share: tuple[int, ...], machine: Machine | None) -> Plan | None:
    """Return the plan with other stages and shares; None where its fullest card could not hold its part."""
    moved = replace(plan, stages=stages, shares=() if len(set(share)) == 1 else share)
    if machine is None:
        return moved
    # What the copy that takes most micro-batches needs; its cards are taken to be as quick as the machine's.
    fullest = replace(moved, micro_batches=max(share))
    memory = memory_use(fullest) or traced_memory(fullest)
    if memory is not None and memory.total > wall(machine):
        return None
    return replace(moved, memory=memory, step=step_time(fullest, machine) or traced_step_time(fullest, machine))


def _shares(plan: Plan) -> tuple[int, ...]:
    return plan.shares or (plan.micro_batches,) * plan.layout.data


def _weight(plan: Plan, stage: Stage) -> float:
    """Return what one micro-batch costs in a stage, in blocks of the decoder; 1 for the user's own."""
    shape = shape_of(plan)
    if shape is None:
        return 1.0
    return stage.last - stage.first + stage.heads * _head(plan)


def _head(plan: Plan) -> float:
    """Return what the head costs, in blocks."""
    shape = shape_of(plan)
    return 0.0 if shape is None else head_forward_flops(shape) / block_forward_flops(shape, plan.job.data.sequence)


def _work(plan: Plan, stages: Sequence[Stage], shares: Sequence[int]) -> list[float]:
    """Return what each rank has to do in a step."""
    held = [sum(_weight(plan, s) for s in stages if s.rank == p) for p in range(plan.layout.pipeline)]
    places = (plan.layout.place(rank) for rank in range(plan.ranks))
    return [held[pipeline] * shares[data] for pipeline, data, _, _ in places]


def _busiest(plan: Plan, pace: Sequence[float], stages: Sequence[Stage], shares: Sequence[int]) -> float:
    return max(own * work for own, work in zip(pace, _work(plan, stages, shares), strict=True))


def _usual(plan: Plan, pace: Sequence[float], rank: int) -> float:
    """Return the pace of a rank's peers: of those with the same stages, else of all others; 0 for none."""
    mine = plan.layout.place(rank)[0]
    others = [other for other in range(plan.ranks) if other != rank]
    alike = [other for other in others if plan.layout.place(other)[0] == mine]
    if not alike and shape_of(plan) is None:
        return 0.0
    chosen = [pace[other] for other in alike or others]
    return median(chosen) if chosen else 0.0


def _cut(plan: Plan, pace: Sequence[float]) -> tuple[Stage, ...]:
    """Return the cut for ranks of that pace."""
    shape, layout = shape_of(plan), plan.layout
    if shape is None or layout.pipeline == 1:
        return plan.stages
    by_stage = [
        mean(own for rank, own in enumerate(pace) if layout.place(rank)[0] == stage) for stage in range(layout.pipeline)
    ]
    if min(by_stage) <= 0:
        return plan.stages
    return cut_stages(
        [1.0] * shape.layers, pipeline=layout.pipeline, interleave=layout.interleave, head=_head(plan),
        slowness=by_stage,
    )  # fmt: skip


def _shared(plan: Plan, pace: Sequence[float]) -> tuple[int, ...]:
    """Return the micro-batches of each data coordinate with which the busiest has least to do."""
    layout = plan.layout
    can_part = layout.data > 1 and layout.sharding == "replicas" and layout.expert == 1
    if not can_part or layout.schedule == "interleaved":
        return _shares(plan)  # All of an axis that meets in every pass take as many passes.
    one = _work(plan, plan.stages, [1] * layout.data)
    each = [
        max(own * work for rank, (own, work) in enumerate(zip(pace, one, strict=True)) if layout.place(rank)[1] == data)
        for data in range(layout.data)
    ]
    least = layout.pipeline  # PyTorch's 1F1B wants a micro-batch a stage.
    shares = [least] * layout.data
    for _ in range(plan.micro_batches * layout.data - sum(shares)):
        next_ = min(range(layout.data), key=lambda data: (shares[data] + 1) * each[data])
        shares[next_] += 1
    return tuple(shares)


def _reason(plan: Plan, moved: Plan, *, saved: float) -> str:
    told = []
    if moved.stages != plan.stages:
        before, after = ([stage.last - stage.first for stage in one.stages] for one in (plan, moved))
        told.append(f"layers a stage {before} → {after}")
    if moved.shares != plan.shares:
        told.append(f"micro-batches a copy {list(_shares(plan))} → {list(_shares(moved))}")
    return f"{', '.join(told)}: the busiest rank should take {saved:.0%} less"
