"""Who decides what a run does next: events in, commands out. The same for simulated, local and Ray backends."""

from __future__ import annotations

from supernode.scheduling.state import advance
from supernode.schema.event import (
    AskToStop,
    Command,
    Ended,
    Event,
    Finish,
    KillRank,
    KillRanks,
    Launch,
    RankFailed,
    RankLost,
    RanksEnded,
    Rejected,
    Started,
    StepDone,
    StopAsked,
)
from supernode.schema.report import RunState


class Controller:
    """Decides for one run.

    Attributes:
        state: what the events so far come to; None before the first.
    """

    def __init__(self, state: RunState | None = None) -> None:
        self.state = state

    def handle(self, event: Event, time: float) -> list[Command]:
        """Take one event; return the commands it calls for."""
        before = self.state
        self.state = advance(before, event, time)
        if isinstance(event, Started):
            return [self._launch()]
        assert before is not None
        if before.outcome != "running":
            return []
        if isinstance(event, RankLost):
            return self._lost(event, before)
        if isinstance(event, Rejected):
            return [self._launch()]
        if isinstance(event, RankFailed) and event.incarnation == before.incarnation:
            ended = Ended(outcome="failed", message=event.message, hint=event.hint, kind=event.kind)
            return [KillRanks(incarnation=event.incarnation), Finish(ended=ended)]
        if isinstance(event, RanksEnded) and event.incarnation == before.incarnation:
            return [Finish(ended=_ending(self.state, event.step))]
        if isinstance(event, StopAsked):
            return self._stop(now=event.now or self.state.ready < self.state.plan.ranks)
        if isinstance(event, StepDone) and self.state.drilled and not before.drilled:
            return [KillRank(rank=self.state.plan.job.drill.rank)]
        return []

    def _launch(self) -> Launch:
        assert self.state is not None
        newest = self.state.checkpoints[-1][1] if self.state.checkpoints else ""
        return Launch(incarnation=self.state.incarnation, plan=self.state.plan, checkpoint=newest)

    def _lost(self, event: RankLost, before: RunState) -> list[Command]:
        assert self.state is not None
        if event.incarnation != before.incarnation:
            return []  # A neighbour of one that is known to be lost.
        kill = KillRanks(incarnation=event.incarnation)
        most = self.state.plan.job.recovery.most_restarts
        if before.stopping:
            return [kill, Finish(ended=_stopped(self.state))]
        if self.state.restarts > most:
            ended = Ended(
                outcome="failed", kind="RunError",
                message=f"rank {event.rank} was lost ({event.reason}) after {most} restarts without a new checkpoint",
                hint="see logs/; then `supernode resume`, or raise `recovery.most_restarts`.",
            )  # fmt: skip
            return [kill, Finish(ended=ended)]
        return [kill, self._launch()]

    def _stop(self, *, now: bool) -> list[Command]:
        assert self.state is not None
        if not now:
            return [AskToStop()]
        return [KillRanks(incarnation=self.state.incarnation), Finish(ended=_stopped(self.state))]


def _ending(state: RunState, step: int) -> Ended:
    if step >= state.plan.job.steps:
        return Ended(outcome="finished")
    return _stopped(state)


def _stopped(state: RunState) -> Ended:
    kept = f"step {state.checkpoints[-1][0]} is saved" if state.checkpoints else "no step is saved"
    return Ended(
        outcome="stopped",
        message=f"stopped at step {state.step}; {kept}",
        hint="`supernode resume` goes on.",
    )
