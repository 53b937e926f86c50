"""Who decides what a run does next: events in, commands out. The same for simulated, local and Ray backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from supernode.errors import SupernodeError
from supernode.scheduling.recovery import Fit, fence, is_flapping, spike
from supernode.scheduling.state import advance
from supernode.schema.event import (
    AskToStop,
    Await,
    CardChecked,
    Command,
    Diverged,
    Ended,
    Event,
    Fenced,
    Finish,
    KillRank,
    KillRanks,
    Launch,
    RankFailed,
    RankLost,
    RanksEnded,
    Rejected,
    Replanned,
    Slowed,
    Started,
    StepDone,
    StopAsked,
    Tell,
    Timed,
)
from supernode.schema.plan import WAYS, Plan, WayTaken
from supernode.schema.report import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the times of a plan's ranks tell.

    Attributes:
        slow: slow ranks, and how many times their peers' time they take.
        plan: one with which the busiest rank would have less to do; None for none that is worth it.
        reason: what it changes.
    """

    slow: dict[int, float] = field(default_factory=dict)
    plan: Plan | None = None
    reason: str = ""


MOST_MOVES = 3
"""Moves of work for one start or resume: cards that are slow in turns would have the run begin again for ever."""
Judge = Callable[[Plan, tuple[float, ...]], Verdict]
"""Takes a plan and the seconds of its ranks' passes."""


class Controller:
    """Decides for one run.

    Args:
        judge: asked whether two looks at the ranks' times in a row call for something; None for never.
        fit: lays the job out on other cards once one is fenced; None: no card ever is.

    Attributes:
        state: what the events so far come to; None before the first.
    """

    def __init__(self, state: RunState | None = None, *, judge: Judge | None = None, fit: Fit | None = None) -> None:
        self.state = state
        self._judge, self._fit = judge, fit

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
            return self._lost(event, before, (event.rank,) if event.blamed else (), f"rank {event.rank} was lost")
        if isinstance(event, Diverged):
            return self._lost(event, before, event.ranks, "copies that must be alike were not")
        if isinstance(event, Fenced):
            seconds = self.state.plan.job.recovery.patience
            return [self._launch(keep=True) if event.plan is not None else Await(card=event.card, seconds=seconds)]
        if isinstance(event, CardChecked) and before.awaited == event.card:
            return self._checked(event)
        if isinstance(event, Rejected):
            return [self._launch(keep=True)]  # After a loss some still live.
        if isinstance(event, RankFailed) and event.incarnation == before.incarnation:
            ended = Ended(outcome="failed", message=event.message, hint=event.hint, kind=event.kind)
            return [KillRanks(incarnation=event.incarnation), Finish(ended=ended)]
        if isinstance(event, Timed) and event.incarnation == before.incarnation:
            return self._timed(event, before)
        if isinstance(event, Replanned):
            return [AskToStop()]
        if isinstance(event, RanksEnded) and event.incarnation == before.incarnation:
            if before.moving is not None and not before.stopping and event.step < before.plan.job.steps:
                return [self._launch()]
            return [Finish(ended=_ending(self.state, event.step))]
        if isinstance(event, StopAsked):
            return self._stop(now=event.now or self.state.ready < self.state.plan.ranks)
        if isinstance(event, StepDone):
            return self._stepped(event, before)
        return []

    def _stepped(self, event: StepDone, before: RunState) -> list[Command]:
        assert self.state is not None
        commands: list[Command] = []
        found = spike(before.usual, event.step, event.loss, deviations=before.plan.job.recovery.spike)
        if found is not None and self.state.usual is not before.usual:  # Not a step done again.
            commands.append(Tell(event=found))
        if self.state.drilled and not before.drilled:
            commands.append(KillRank(rank=self.state.plan.job.drill.rank))
        return commands

    def _launch(self, *, keep: bool = False) -> Launch:
        assert self.state is not None
        newest = self.state.checkpoints[-1][1] if self.state.checkpoints else ""
        # Gradients go on meeting as they did: another order of sums would be another last bit.
        told: dict[str, WayTaken] = {
            name: WayTaken(**{key: tuple(value) for key, value in way.items()})
            for name, way in self.state.notes.get(WAYS, {}).items()
        }
        plan = replace(self.state.plan, ways=told) if told else self.state.plan
        return Launch(incarnation=self.state.incarnation, plan=plan, checkpoint=newest, keep=keep)

    def _timed(self, event: Timed, before: RunState) -> list[Command]:
        """Conclude what two looks in a row agree on."""
        if self._judge is None or not before.busy or before.moving is not None or before.stopping:
            return []
        first, second = (self._judge(before.plan, busy) for busy in (before.busy, event.busy))
        commands: list[Command] = []
        slow = {rank: ratio for rank, ratio in second.slow.items() if rank in first.slow or rank in before.slow}
        if set(slow) != set(before.slow):
            commands.append(Tell(event=Slowed(step=event.step, ranks=slow)))
        if before.moves >= MOST_MOVES:
            return commands
        mean = tuple((a + b) / 2 for a, b in zip(before.busy, event.busy, strict=True))
        both = self._judge(before.plan, mean)
        if first.plan is not None and second.plan is not None and both.plan is not None:
            commands.append(Tell(event=Replanned(step=event.step, plan=both.plan, reason=both.reason)))
        return commands

    def _lost(self, event: RankLost | Diverged, before: RunState, ranks: tuple[int, ...], what: str) -> list[Command]:
        """Start again, on other cards where one fails too often, or give up.

        Args:
            ranks: whose cards are to blame.
        """
        assert self.state is not None
        if event.incarnation != before.incarnation:
            return []  # A neighbour of one that is known to be lost.
        kill = KillRanks(incarnation=event.incarnation)
        spec = self.state.plan.job.recovery
        reason = event.reason if isinstance(event, RankLost) else event.what
        if before.stopping:
            return [kill, Finish(ended=_stopped(self.state))]
        if self.state.restarts > spec.most_restarts:
            ended = Ended(
                outcome="failed", kind="RunError",
                message=f"{what} ({reason}) after {spec.most_restarts} restarts without a new checkpoint",
                hint="see logs/; then `supernode resume`, or raise `recovery.most_restarts`.",
            )  # fmt: skip
            return [kill, Finish(ended=ended)]
        # Who computes wrongly without a word is not asked a second time; of two that differ it is not known which does.
        is_known = isinstance(event, Diverged) and len(ranks) == 1 and spec.fence_after > 0
        for card in (before.plan.cards[rank] for rank in ranks):
            times = self.state.card_losses.get(card, ())
            if self._fit is not None and (is_known or is_flapping(times, spec)):
                return self._fence(card, kill, reason if is_known else f"lost {len(times)} times, last: {reason}")
        return [self._launch(keep=True)]

    def _fence(self, card: int, kill: KillRanks, reason: str) -> list[Command]:
        assert self.state is not None
        assert self._fit is not None
        try:
            fenced = fence(self.state.plan, card, spares=self.state.spares, reason=reason, fit=self._fit)
        except SupernodeError as error:
            ended = Ended(
                outcome="failed", kind="RunError",
                message=f"card {card} is not used any more ({reason}), and the run cannot go on without it: "
                f"{error.message}",
                hint="`supernode resume` goes on once the card is in order, or on others.",
            )  # fmt: skip
            return [kill, Finish(ended=ended)]
        return [Tell(event=fenced)]

    def _checked(self, event: CardChecked) -> list[Command]:
        assert self.state is not None
        if event.is_up:
            return [self._launch(keep=True)]
        ended = Ended(
            outcome="failed", kind="RunError", message=f"card {event.card} did not come back: {event.reason}",
            hint="`supernode resume` goes on once it is in order; `recovery.policy` says what else may follow.",
        )  # fmt: skip
        return [KillRanks(incarnation=self.state.incarnation), Finish(ended=ended)]

    def _stop(self, *, now: bool) -> list[Command]:
        assert self.state is not None
        if not now:
            return [AskToStop()]
        return [KillRanks(incarnation=self.state.incarnation), Finish(ended=_stopped(self.state))]


def _ending(state: RunState, step: int) -> Ended:
    lost = state.unsaved
    if lost is not None and lost.step == step:
        return Ended(outcome="failed", message=lost.reason, hint=lost.hint, kind=lost.kind)
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
