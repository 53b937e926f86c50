"""A run's state is what its events add up to, whoever adds them up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from supernode.scheduling.state import SMOOTHING, advance, fold
from supernode.schema.codec import from_json, to_json
from supernode.schema.event import (
    KINDS,
    Ended,
    Evaluated,
    Event,
    Noted,
    RankLost,
    RankReady,
    Rejected,
    Saved,
    Started,
    StepDone,
)
from supernode.schema.job import JobSpec
from supernode.schema.lasting import CheckpointSpec
from supernode.schema.plan import Layout, Plan
from supernode.schema.report import RunState

PLAN = Plan(
    job=JobSpec(steps=10, checkpoint=CheckpointSpec(every=2, keep=2)), layout=Layout(data=2), machine="m", cards=(0, 1),
    micro_batch=8, micro_batches=1, stages=(),
)  # fmt: skip


def step(number: int, *, loss: float = 1.0, seconds: float = 2.0, data: float = 0.5, incarnation: int = 1) -> StepDone:
    return StepDone(
        step=number, incarnation=incarnation, loss=loss, seconds=seconds, tokens=8, norm=3.0, rate=0.1,
        parts={"data": data},
    )  # fmt: skip


def saved(number: int) -> Saved:
    return Saved(step=number, checkpoint=f"step-{number}", nbytes=1, seconds=0.25)


def state_after(*events: Event) -> RunState:
    state = fold((100.0 + number, event) for number, event in enumerate((Started(plan=PLAN), *events)))
    assert state is not None
    return state


def test_no_events_make_no_state() -> None:
    assert fold([]) is None


def test_steps_saves_and_evaluations_add_up() -> None:
    state = state_after(
        RankReady(rank=0, incarnation=1, seconds=1.0),
        RankReady(rank=1, incarnation=1, seconds=4.0),
        step(1, loss=5.0),
        step(2, loss=4.0, seconds=3.0),
        saved(2),
        Evaluated(step=2, loss=4.5, seconds=0.5),
        Noted(name="bigram_loss", value=2.5),
    )

    assert (state.step, state.losses, state.held_out) == (2, {1: 5.0, 2: 4.0}, {2: 4.5})
    assert (state.spent_seconds, state.save_seconds, state.evaluate_seconds) == (5.0, 0.25, 0.5)
    # All are ready when the last one is.
    assert (state.ready, state.launch_seconds) == (2, 4.0)
    assert state.notes == {"bigram_loss": 2.5}
    assert (state.started, state.updated) == (100.0, 107.0)


def test_where_time_goes_is_a_running_mean() -> None:
    state = state_after(step(1, data=1.0), step(2, data=2.0))

    assert state.parts["data"] == pytest.approx((1 - SMOOTHING) * 1.0 + SMOOTHING * 2.0)


def test_losses_come_back_identical_or_not_and_both_are_counted() -> None:
    nan = float("nan")
    state = state_after(
        step(1, loss=5.0), step(2, loss=4.0), step(3, loss=nan), RankLost(rank=0, incarnation=1, reason="x"),
        step(1, loss=5.0, incarnation=2), step(2, loss=4.5, incarnation=2), step(3, loss=nan, incarnation=2),
    )  # fmt: skip

    assert state.repeats == [(1, True), (2, False), (3, True)]
    assert state.losses[2] == 4.5
    assert (state.spent_seconds, state.repeat_seconds) == (12.0, 6.0)


def test_only_as_many_checkpoints_are_thought_whole_as_the_job_keeps() -> None:
    assert state_after(saved(2), saved(4), saved(6)).checkpoints == ((4, "step-4"), (6, "step-6"))
    assert state_after(saved(2), saved(4), saved(2)).checkpoints == ((4, "step-4"), (2, "step-2"))


def test_a_rejected_checkpoint_is_forgotten_and_told() -> None:
    state = state_after(saved(2), saved(4), Rejected(checkpoint="step-4", reason="digest differs"))

    assert (state.checkpoints, state.step) == (((2, "step-2"),), 2)
    assert state.incidents[-1].what == "checkpoint step-4 rejected"
    assert state.incidents[-1].detail == "digest differs"


def test_incidents_bear_the_seconds_since_the_start() -> None:
    state = state_after(step(1), RankLost(rank=1, incarnation=1, reason="killed"))

    assert [(incident.time, incident.what) for incident in state.incidents] == [(0.0, "started"), (2.0, "rank 1 lost")]


def test_what_grows_with_every_step_is_not_copied_for_the_next_state() -> None:
    state = state_after(step(1), Evaluated(step=1, loss=4.5, seconds=0.5), step(1))

    later = advance(advance(state, step(1), 200.0), Evaluated(step=2, loss=4.0, seconds=0.5), 201.0)

    assert later.losses is state.losses
    assert later.held_out is state.held_out
    assert later.repeats is state.repeats
    assert (len(later.repeats), later.held_out) == (2, {1: 4.5, 2: 4.0})


def test_an_end_is_kept_with_its_remedy_until_the_run_is_taken_up_again() -> None:
    ended = state_after(step(1), Ended(outcome="failed", message="no", hint="do", kind="DataError"))

    resumed = advance(ended, Started(plan=replace(PLAN, layout=Layout())), 200.0)

    assert (ended.outcome, ended.message, ended.hint, ended.kind) == ("failed", "no", "do", "DataError")
    assert (resumed.outcome, resumed.message, resumed.hint, resumed.kind) == ("running", "", "", "")
    assert resumed.plan.layout == Layout()
    assert resumed.started == 100.0


def test_every_event_survives_the_journals_codec() -> None:
    events = [
        Started(plan=PLAN, checkpoints=((2, "step-2"),)),
        step(1, loss=float("inf")),
        saved(2),
        Noted(name="sample", value="ü\n\x00"),
        Rejected(checkpoint="a", reason="b", others=((2, "step-2"),)),
    ]

    assert [from_json(KINDS[type(event).__name__], to_json(event)) for event in events] == events


def test_steps_that_overflowed_are_counted() -> None:
    skipped = replace(step(2, loss=math.inf), skipped=True)

    state = state_after(step(1), skipped, step(3))

    assert state.skipped == 1
    assert state.step == 3
    assert from_json(StepDone, to_json(skipped)) == skipped
