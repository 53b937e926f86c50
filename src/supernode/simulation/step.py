"""What happens in one training step, moment by moment? Every pass and transfer of a pipeline, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from supernode.errors import SpecError
from supernode.hardware.machine import Machine
from supernode.planning.cost import stage_times, transfer_time
from supernode.planning.order import Action, rank_order
from supernode.schema.plan import Plan

Kind = Literal["forward", "backward", "send", "data", "optimizer", "overhead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that one pipeline rank does.

    Attributes:
        rank: pipeline coordinate; of the sender, for `send`.
        stage: -1 where it concerns the whole rank.
        kind: `send` runs beside computing, all else in turn.
        micro_batch: -1 where it concerns all.
        start: seconds since the step began.
        end: likewise.
    """

    rank: int
    stage: int
    kind: Kind
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step. `total`: seconds until the last rank is done."""

    spans: tuple[Span, ...]
    total: float


def simulate_step(plan: Plan, machine: Machine) -> Timeline:
    """Return the step of a plan: its pipeline event by event, then synchronisation, update and overhead as predicted.

    Raises:
        SpecError: the model is the user's own, so its times are not known.
    """
    times = stage_times(plan, machine)
    if not times or plan.step is None:
        raise SpecError(
            f"{plan.job.name} trains your own module, whose times are not known before it runs",
            hint="simulate a preset or a shape, or run the job.",
        )
    pipeline = simulate_pipeline(
        [t.forward + t.tensor_forward for t in times],
        [t.backward + t.tensor_backward for t in times],
        schedule=plan.layout.schedule,
        pipeline=plan.layout.pipeline,
        micro_batches=plan.micro_batches,
        transfer=transfer_time(plan, machine),
    )
    spans, now = list(pipeline.spans), pipeline.total
    # Clipping needs the norm over all ranks, so that they go on together from here.
    tail: list[tuple[Kind, float]] = [
        ("data", plan.step.data), ("optimizer", plan.step.optimizer), ("overhead", plan.step.overhead)
    ]  # fmt: skip
    for kind, seconds in tail:
        if seconds:
            ranks = range(plan.layout.pipeline)
            spans += [Span(rank=r, stage=-1, kind=kind, micro_batch=-1, start=now, end=now + seconds) for r in ranks]
        now += seconds
    return Timeline(spans=tuple(spans), total=now)


def simulate_pipeline(
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    schedule: str,
    pipeline: int,
    micro_batches: int,
    transfer: float = 0.0,
) -> Timeline:
    """Return every pass and transfer of one step.

    A rank runs its passes in the schedule's order, each as soon as its input is there; sending does not keep it from
    computing, and messages that one rank sends another go one after the other.

    Args:
        forward: seconds of one micro-batch in each stage; stage s is on rank s % `pipeline`.
        backward: likewise.
        transfer: seconds that a micro-batch takes from a stage to the next.
    """
    interleave = len(forward) // pipeline
    orders = [
        rank_order(schedule, rank=rank, pipeline=pipeline, interleave=interleave, micro_batches=micro_batches)
        for rank in range(pipeline)
    ]
    run = _Run(forward, backward, orders, transfer)
    run.go()
    spans = sorted(run.spans, key=lambda span: (span.start, span.rank, span.end))
    return Timeline(spans=tuple(spans), total=max(run.free))


class _Run:
    """A step under way: how far each rank is, and when each input arrives."""

    def __init__(
        self, forward: Sequence[float], backward: Sequence[float], orders: list[list[Action]], transfer: float
    ) -> None:
        self.seconds = {"forward": forward, "backward": backward}
        self.orders = orders
        self.transfer = transfer
        self.spans: list[Span] = []
        self.free = [0.0] * len(orders)
        self._next = [0] * len(orders)
        self._arrivals = {Action(stage=0, kind="forward", micro_batch=a.micro_batch): 0.0 for a in orders[0]}
        self._wire_free: dict[tuple[int, int], float] = {}

    def go(self) -> None:
        """Let every rank go as far as its inputs allow, until all are done."""
        waking = list(range(len(self.orders)))
        while waking:
            rank = waking.pop()
            while self._next[rank] < len(self.orders[rank]):
                action = self.orders[rank][self._next[rank]]
                if action not in self._arrivals:
                    break
                waking += self._perform(rank, action)
                self._next[rank] += 1
        assert self._next == [len(order) for order in self.orders], "the order deadlocks"

    def _perform(self, rank: int, action: Action) -> list[int]:
        """Run one pass, pass its result on, and return the rank that gets it."""
        start = max(self.free[rank], self._arrivals[action])
        end = self.free[rank] = start + self.seconds[action.kind][action.stage]
        self.spans.append(
            Span(rank=rank, stage=action.stage, kind=action.kind, micro_batch=action.micro_batch, start=start, end=end)
        )
        follower = self._follower(action)
        if follower is None:
            return []
        to = follower.stage % len(self.orders)
        self._arrivals[follower] = end if to == rank else self._send(rank, to, action, end)
        return [to]

    def _follower(self, action: Action) -> Action | None:
        """Return the pass that takes up this one's result."""
        last = len(self.seconds["forward"]) - 1
        if action.kind == "forward":
            if action.stage == last:
                return Action(stage=last, kind="backward", micro_batch=action.micro_batch)
            return Action(stage=action.stage + 1, kind="forward", micro_batch=action.micro_batch)
        if action.stage == 0:
            return None
        return Action(stage=action.stage - 1, kind="backward", micro_batch=action.micro_batch)

    def _send(self, rank: int, to: int, action: Action, ready: float) -> float:
        """Put a result on the wire and return when it arrives."""
        if not self.transfer:
            return ready
        start = max(ready, self._wire_free.get((rank, to), 0.0))
        end = self._wire_free[rank, to] = start + self.transfer
        self.spans.append(
            Span(rank=rank, stage=action.stage, kind="send", micro_batch=action.micro_batch, start=start, end=end)
        )
        return end
