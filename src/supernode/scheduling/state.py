"""What a run's events come to: the fold that `status`, the report and the controller read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from supernode.schema.event import (
    Ended,
    Evaluated,
    Event,
    Noted,
    RankFailed,
    RankLost,
    RankReady,
    RanksEnded,
    Rejected,
    Replanned,
    Saved,
    Slowed,
    Started,
    StepDone,
    StopAsked,
    Timed,
)
from supernode.schema.report import Incident, RunState

SMOOTHING = 0.1
"""Weight of the newest step in the running mean of where time goes."""


def fold(events: Iterable[tuple[float, Event]]) -> RunState | None:
    """Return the state that (time, event) pairs lead to; None before the first `Started`."""
    state: RunState | None = None
    for time, event in events:
        state = advance(state, event, time)
    return state


def advance(state: RunState | None, event: Event, time: float) -> RunState:
    """Return the state after one more event."""
    if isinstance(event, Started):
        return _started(state, event, time)
    assert state is not None, "a run's first event is Started"
    if isinstance(event, StepDone):
        return _stepped(state, event, time)
    changes: dict[str, Any] = {"updated": time}
    if isinstance(event, RankReady):
        if event.incarnation != state.incarnation:
            return state  # Said before its launch was ended; the new one counts its own.
        changes["ready"] = state.ready + 1
        if not state.ready and state.incarnation > 1:
            newest = state.checkpoints[-1][1] if state.checkpoints else "the start"
            changes["incidents"] = _told(state, time, "going on", f"from {newest}")
        changes["ready_seconds"] = max(state.ready_seconds, event.seconds)
        if changes["ready"] == state.plan.ranks:
            changes["launch_seconds"] = state.launch_seconds + changes["ready_seconds"]
    elif isinstance(event, Evaluated):
        cast(dict[int, float], state.held_out)[event.step] = event.loss  # Shared, as losses are.
        changes["evaluate_seconds"] = state.evaluate_seconds + event.seconds
    elif isinstance(event, Saved):
        kept = [entry for entry in state.checkpoints if entry[1] != event.checkpoint]
        changes["checkpoints"] = (*kept, (event.step, event.checkpoint))[-state.plan.job.checkpoint.keep :]
        changes |= {"saves": state.saves + 1, "save_seconds": state.save_seconds + event.seconds, "restarts": 0}
    elif isinstance(event, Rejected):
        left = tuple(entry for entry in state.checkpoints if entry[1] != event.checkpoint)
        left = left or _known(state, event.others)
        changes |= {"checkpoints": left, "step": left[-1][0] if left else 0}
        changes["incidents"] = _told(state, time, f"checkpoint {event.checkpoint} rejected", event.reason)
    elif isinstance(event, RankLost):
        changes["incidents"] = _told(state, time, f"rank {event.rank} lost", event.reason)
        if event.incarnation == state.incarnation:
            changes |= relaunched(state) | {"failures": state.failures + 1}
    elif isinstance(event, Timed):
        changes["busy"] = event.busy
    elif isinstance(event, Slowed):
        changes |= {"slow": dict(event.ranks), "incidents": _slowed(state, event, time)}
    elif isinstance(event, Replanned):
        changes |= {"moving": event.plan, "moves": state.moves + 1}
        changes["incidents"] = _told(state, time, "work moves", event.reason)
    elif isinstance(event, RanksEnded) and state.moving is not None and event.incarnation == state.incarnation:
        changes |= relaunched(state) | {"restarts": 0}
    elif isinstance(event, StopAsked):
        changes["stopping"] = True
        changes["incidents"] = _told(state, time, "stop asked", "now" if event.now else "after a checkpoint")
    elif isinstance(event, Noted):
        changes["notes"] = {**state.notes, event.name: event.value}
    elif isinstance(event, Ended):
        changes |= {"outcome": event.outcome, "message": event.message, "hint": event.hint, "kind": event.kind}
        changes["incidents"] = _told(state, time, event.outcome, event.message)
    elif isinstance(event, RankFailed):
        changes["incidents"] = _told(state, time, f"rank {event.rank} failed", event.message)
    else:
        assert isinstance(event, RanksEnded)
    return replace(state, **changes)


def _known(state: RunState, found: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
    """Return those of the checkpoints whose steps the journal knows; all of them where it knows none."""
    last = max(state.losses, default=0)
    return tuple(entry for entry in found if entry[0] <= last) or found


def relaunched(state: RunState) -> dict[str, Any]:
    """Return what changes when the ranks are launched once more."""
    kept = state.checkpoints[-1][0] if state.checkpoints else 0
    return {
        "incarnation": state.incarnation + 1, "restarts": state.restarts + 1, "step": kept, "ready": 0,
        "ready_seconds": 0.0, "plan": state.moving or state.plan, "moving": None, "busy": (), "slow": {},
    }  # fmt: skip


def _slowed(state: RunState, event: Slowed, time: float) -> tuple[Incident, ...]:
    told = state
    for rank, ratio in event.ranks.items():
        if rank not in state.slow:
            detail = f"its passes take {ratio:.1f} times what its peers' take"
            told = replace(told, incidents=_told(told, time, f"rank {rank} is slow", detail))
    for rank in state.slow:
        if rank not in event.ranks:
            told = replace(told, incidents=_told(told, time, f"rank {rank} keeps up again", ""))
    return told.incidents


def _started(state: RunState | None, event: Started, time: float) -> RunState:
    checkpoints = tuple(event.checkpoints)
    if state is None:
        first = RunState(plan=event.plan, incarnation=1, checkpoints=checkpoints, started=time, updated=time)
        return replace(first, incidents=(Incident(time=0.0, what="started", detail=str(event.plan.layout)),))
    # The ranks of the controller before are gone with it.
    changes = relaunched(replace(state, checkpoints=checkpoints)) | {"restarts": 0, "moves": 0, "stopping": False}
    changes |= {"outcome": "running", "message": "", "hint": "", "kind": ""}
    changes |= {"plan": event.plan, "checkpoints": checkpoints, "updated": time}
    return replace(state, incidents=_told(state, time, "resumed", str(event.plan.layout)), **changes)


def _stepped(state: RunState, event: StepDone, time: float) -> RunState:
    # These are the fold's own: later states share and extend them, else a long run would copy them every step.
    losses, seconds = cast(dict[int, float], state.losses), cast(dict[int, float], state.step_seconds)
    is_repeat = event.step in losses
    if is_repeat:
        before = losses[event.step]
        same = before == event.loss or (math.isnan(before) and math.isnan(event.loss))
        cast(list[tuple[int, bool]], state.repeats).append((event.step, same))
    losses[event.step], seconds[event.step] = event.loss, event.seconds
    weight = SMOOTHING if state.parts else 1.0
    parts = {
        part: (1 - weight) * state.parts.get(part, 0.0) + weight * value for part, value in dict(event.parts).items()
    }
    drill = state.plan.job.drill
    # What an ended launch still had to say is a fact about its loss, but not where the run stands.
    step = event.step if event.incarnation == state.incarnation else state.step
    return replace(
        state, step=step, losses=losses, step_seconds=seconds, parts=parts, rate=event.rate, norm=event.norm,
        updated=time, spent_seconds=state.spent_seconds + event.seconds,
        spent_tokens=state.spent_tokens + event.tokens, skipped=state.skipped + event.skipped,
        repeat_seconds=state.repeat_seconds + (event.seconds if is_repeat else 0.0),
        drilled=state.drilled or (0 < drill.kill_step == event.step and event.incarnation == state.incarnation),
    )  # fmt: skip


def _told(state: RunState, time: float, what: str, detail: str) -> tuple[Incident, ...]:
    return (*state.incidents, Incident(time=time - state.started, what=what, detail=detail))
