"""What a run's events come to: the fold that `status`, the report and the controller read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from supernode.scheduling.recovery import counted, learned
from supernode.schema.event import (
    CardChecked,
    Diverged,
    Ended,
    Evaluated,
    Event,
    Fenced,
    Kept,
    Noted,
    RankFailed,
    RankLost,
    RankReady,
    RanksEnded,
    Rejected,
    Replanned,
    Restored,
    Saved,
    Slowed,
    Spiked,
    Started,
    StepDone,
    StopAsked,
    Timed,
    Unsaved,
)
from supernode.schema.report import Incident, RunState

SMOOTHING = 0.1
"""Weight of the newest step in the running mean of where time goes."""


_PLACES = {
    "memory": "the nodes' memory", "partner": "a partner node's memory", "disk": "the checkpoint on disk",
    "start": "no checkpoint",
}  # fmt: skip


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
        changes["ready_seconds"] = max(state.ready_seconds, event.seconds)
        if changes["ready"] == state.plan.ranks:
            changes["launch_seconds"] = state.launch_seconds + changes["ready_seconds"]
    elif isinstance(event, Evaluated):
        cast(dict[int, float], state.held_out)[event.step] = event.loss  # Shared, as losses are.
        changes["evaluate_seconds"] = state.evaluate_seconds + event.seconds
    elif isinstance(event, Saved):
        kept = [entry for entry in state.checkpoints if entry[1] != event.checkpoint]
        changes["checkpoints"] = (*kept, (event.step, event.checkpoint))[-state.plan.job.checkpoint.keep :]
        changes |= {"saves": state.saves + 1, "save_seconds": state.save_seconds + event.seconds}
        changes |= _further(state, event.step) | {"unsaved": None}
    elif isinstance(event, Unsaved):
        changes |= {"unsaved": event, "incidents": _told(state, time, f"step {event.step} not saved", event.reason)}
    elif isinstance(event, Kept):
        changes |= _further(state, event.step)
    elif isinstance(event, Restored):
        if event.incarnation == state.incarnation:
            changes |= {"step": event.step, "source": event.source}
            if state.incarnation > 1:
                place = f"step {event.step} in {_PLACES[event.source]}" if event.step else "the start"
                changes["incidents"] = _told(state, time, "going on", f"from {place}")
    elif isinstance(event, Rejected):
        left = tuple(entry for entry in state.checkpoints if entry[1] != event.checkpoint)
        left = left or _known(state, event.others)
        changes |= {"checkpoints": left, "step": left[-1][0] if left else 0}
        changes["incidents"] = _told(state, time, f"checkpoint {event.checkpoint} rejected", event.reason)
    elif isinstance(event, RankLost):
        changes["incidents"] = _told(state, time, f"rank {event.rank} lost", event.reason)
        if event.incarnation == state.incarnation:
            changes |= _failed(state, (event.rank,) if event.blamed else (), time)
    elif isinstance(event, Diverged):
        changes["incidents"] = _told(state, time, f"{_ranks(event.ranks)} differ from their copies", event.what)
        if event.incarnation == state.incarnation:
            changes |= _failed(state, event.ranks, time)
    elif isinstance(event, Fenced):
        changes |= _fenced(state, event, time)
    elif isinstance(event, CardChecked):
        changes |= _checked(state, event, time)
    elif isinstance(event, Spiked):
        detail = f"{event.loss:.4g}, usually {event.usual:.4g} ± {event.deviation:.2g}"
        changes["incidents"] = _told(state, time, f"the loss of step {event.step} is a spike", detail)
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


def _further(state: RunState, step: int) -> dict[str, Any]:
    """Return what changes with new state in memory or on disk; what was there before a restart is not new."""
    return {"furthest": step, "restarts": 0} if step > state.furthest else {}


def _failed(state: RunState, ranks: tuple[int, ...], time: float) -> dict[str, Any]:
    """Return what changes when a launch is over: its ranks' cards count a loss each."""
    cards = [state.plan.cards[rank] for rank in ranks if rank < len(state.plan.cards)]
    losses = counted(state.card_losses, cards, now=time, window=state.plan.job.recovery.window)
    return relaunched(state) | {"failures": state.failures + 1, "card_losses": losses}


def _fenced(state: RunState, event: Fenced, time: float) -> dict[str, Any]:
    if event.plan is None:
        detail = f"{event.reason}; the run waits for it"
        told: dict[str, Any] = {"awaited": event.card}
    else:
        other = str(event.plan.layout)
        taken = [card for card in event.plan.cards if card not in state.plan.cards]
        way = (
            f"card {taken[0]} takes its place" if taken and other == str(state.plan.layout) else f"going on as {other}"
        )
        detail = f"{event.reason}; {way}"
        told = {"plan": event.plan}
    losses = {card: times for card, times in state.card_losses.items() if card != event.card}
    return told | {
        "fenced": (*state.fenced, event.card), "spares": event.spares, "card_losses": losses,
        "incidents": _told(state, time, f"card {event.card} fenced", detail),
    }  # fmt: skip


def _checked(state: RunState, event: CardChecked, time: float) -> dict[str, Any]:
    what = f"card {event.card} {'is back' if event.is_up else 'is not back'}"
    changes: dict[str, Any] = {"awaited": None, "incidents": _told(state, time, what, event.reason)}
    if event.is_up:
        changes["fenced"] = tuple(card for card in state.fenced if card != event.card)
    return changes


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


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
        first = RunState(
            plan=event.plan, incarnation=1, checkpoints=checkpoints, spares=event.spares, started=time, updated=time
        )  # fmt: skip
        return replace(first, incidents=(Incident(time=0.0, what="started", detail=str(event.plan.layout)),))
    # The ranks of the controller before are gone with it.
    changes = relaunched(replace(state, checkpoints=checkpoints)) | {"restarts": 0, "moves": 0, "stopping": False}
    changes |= {"outcome": "running", "message": "", "hint": "", "kind": ""}
    # Who goes on with a run says with it that its cards are in order.
    changes |= {"spares": event.spares, "fenced": (), "awaited": None, "card_losses": {}, "furthest": 0}
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
    deviations = state.plan.job.recovery.spike
    usual = state.usual if is_repeat else learned(state.usual, event.loss, deviations=deviations)
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
        usual=usual, repeat_seconds=state.repeat_seconds + (event.seconds if is_repeat else 0.0),
        drilled=state.drilled or (0 < drill.kill_step == event.step and event.incarnation == state.incarnation),
    )  # fmt: skip


def _told(state: RunState, time: float, what: str, detail: str) -> tuple[Incident, ...]:
    return (*state.incidents, Incident(time=time - state.started, what=what, detail=detail))
