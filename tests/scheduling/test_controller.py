"""The controller answers what happens to a run with the commands that carry it on; no process, no clock, no disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supernode.errors import SpecError
from supernode.scheduling.controller import Controller, Verdict
from supernode.scheduling.state import fold
from supernode.schema.event import (
    AskToStop,
    Await,
    CardChecked,
    Command,
    Diverged,
    Ended,
    Evaluated,
    Event,
    Fenced,
    Finish,
    Kept,
    KillRank,
    KillRanks,
    Launch,
    Noted,
    RankFailed,
    RankLost,
    RankReady,
    RanksEnded,
    Rejected,
    Restored,
    Saved,
    Spiked,
    Started,
    StepDone,
    StopAsked,
    Tell,
    Timed,
)
from supernode.schema.job import DrillSpec, JobSpec
from supernode.schema.lasting import CheckpointSpec, RecoverySpec
from supernode.schema.plan import Layout, Plan

JOB = JobSpec(
    steps=10,
    checkpoint=CheckpointSpec(every=2, keep=2),
    recovery=RecoverySpec(most_restarts=2),
    drill=DrillSpec(kill_step=3, rank=1),
)
PLAN = Plan(
    job=JOB, layout=Layout(data=2), machine="m", cards=(0, 1), micro_batch=8, micro_batches=1, stages=()
)  # fmt: skip
QUIET = replace(PLAN, job=replace(JOB, drill=DrillSpec()))


def step(number: int, incarnation: int = 1, loss: float = 1.0) -> StepDone:
    return StepDone(
        step=number, incarnation=incarnation, loss=loss, seconds=1.0, tokens=8, norm=1.0, rate=0.1, parts={"data": 0.5}
    )


def saved(number: int) -> Saved:
    return Saved(step=number, checkpoint=f"step-{number}", nbytes=1, seconds=0.1)


def lost(rank: int = 0, incarnation: int = 1) -> RankLost:
    return RankLost(rank=rank, incarnation=incarnation, reason="killed by signal 9")


def ready(incarnation: int = 1) -> tuple[RankReady, RankReady]:
    return (
        RankReady(rank=0, incarnation=incarnation, seconds=1.0),
        RankReady(rank=1, incarnation=incarnation, seconds=1.5),
    )


def told(*events: Event) -> tuple[Controller, list[Command]]:
    """Return a controller that heard of the events, and its answer to the last."""
    controller = Controller()
    answer: list[Command] = []
    for number, event in enumerate(events):
        answer = controller.handle(event, float(number))
    return controller, answer


def test_a_new_run_is_launched_from_the_start() -> None:
    _, answer = told(Started(plan=QUIET))

    assert answer == [Launch(incarnation=1, plan=QUIET, checkpoint="")]


def test_a_run_with_checkpoints_is_launched_from_the_newest() -> None:
    _, answer = told(Started(plan=QUIET, checkpoints=((2, "step-2"), (4, "step-4"))))

    assert answer == [Launch(incarnation=1, plan=QUIET, checkpoint="step-4")]


def test_after_a_loss_those_who_live_begin_again_from_the_newest_checkpoint() -> None:
    controller, answer = told(
        Started(plan=QUIET), *ready(), step(1), step(2), saved(2), step(3), step(4), saved(4), step(5), lost()
    )

    assert answer == [Launch(incarnation=2, plan=QUIET, checkpoint="step-4", keep=True)]
    assert controller.state is not None
    assert (controller.state.step, controller.state.failures, controller.state.ready) == (4, 1, 0)


def test_a_neighbours_late_loss_of_the_same_launch_is_no_second_failure() -> None:
    controller, answer = told(Started(plan=QUIET), *ready(), step(1), lost(0), lost(1))

    assert answer == []
    assert controller.state is not None
    assert controller.state.failures == 1
    assert controller.state.incarnation == 2


def test_what_ranks_of_an_old_launch_still_say_changes_nothing_of_the_new() -> None:
    controller, _ = told(Started(plan=QUIET), *ready(), step(1), step(2), saved(2), lost())

    answers = [
        controller.handle(event, 9.0)
        for event in (
            ready()[0],
            step(3),
            RanksEnded(incarnation=1, step=10),
            RankFailed(rank=0, incarnation=1, kind="ModelError", message="x"),
        )
    ]

    assert answers == [[], [], [], []]
    assert controller.state is not None
    assert (controller.state.ready, controller.state.step) == (0, 2)


def test_a_rejected_checkpoint_gives_way_to_the_one_before_and_at_last_to_the_start() -> None:
    controller, _ = told(Started(plan=QUIET, checkpoints=((2, "step-2"), (4, "step-4"))))

    second = controller.handle(Rejected(checkpoint="step-4", reason="digest"), 1.0)
    third = controller.handle(Rejected(checkpoint="step-2", reason="digest"), 2.0)

    assert second == [Launch(incarnation=1, plan=QUIET, checkpoint="step-2", keep=True)]
    assert third == [Launch(incarnation=1, plan=QUIET, checkpoint="", keep=True)]
    assert controller.state is not None
    assert controller.state.step == 0


def test_a_save_that_nobody_told_of_is_gone_on_from_once_the_known_checkpoint_is_gone() -> None:
    controller, _ = told(Started(plan=QUIET), *ready(), step(1), step(2), saved(2), step(3), step(4), lost())

    # Rank 0 had saved step 4 and deleted step 2, and died before it could say so.
    gone = Rejected(checkpoint="step-2", reason="not there", others=((4, "step-4"), (8, "step-8")))
    first = controller.handle(gone, 9.0)
    second = controller.handle(Rejected(checkpoint="step-4", reason="digest", others=((8, "step-8"),)), 10.0)
    third = controller.handle(Rejected(checkpoint="step-8", reason="digest"), 11.0)

    # Step 8, of which the journal knows nothing, is better than the start alone.
    assert [answer[0].checkpoint for answer in (first, second, third) if isinstance(answer[0], Launch)] == [
        "step-4", "step-8", "",
    ]  # fmt: skip


def test_a_drill_s_step_that_is_heard_of_after_its_launch_kills_nobody_of_the_next() -> None:
    controller, _ = told(Started(plan=PLAN), *ready(), step(1), step(2), lost())

    late, again = controller.handle(step(3), 9.0), controller.handle(step(3, 2), 10.0)

    assert (late, again) == ([], [KillRank(rank=1)])


def test_too_many_losses_without_a_checkpoint_end_the_run_with_a_remedy() -> None:
    controller, first = told(Started(plan=QUIET), lost(incarnation=1))
    second = controller.handle(lost(incarnation=2), 2.0)
    third = controller.handle(lost(incarnation=3), 3.0)

    assert [type(command) for command in (*first, *second)] == [Launch] * 2
    kill, finish = third
    assert kill == KillRanks(incarnation=3)
    assert isinstance(finish, Finish)
    assert finish.ended.outcome == "failed"
    assert "2 restarts" in finish.ended.message
    assert "recovery.most_restarts" in finish.ended.hint


def test_a_new_checkpoint_starts_the_count_of_restarts_anew() -> None:
    controller, _ = told(Started(plan=QUIET), lost(incarnation=1), lost(incarnation=2), step(2, 3), saved(2))

    answer = controller.handle(lost(incarnation=3), 9.0)

    assert answer == [Launch(incarnation=4, plan=QUIET, checkpoint="step-2", keep=True)]


def test_no_restarts_allowed_means_the_first_loss_ends_the_run() -> None:
    plan = replace(QUIET, job=replace(QUIET.job, recovery=RecoverySpec(most_restarts=0)))

    _, answer = told(Started(plan=plan), lost())

    assert isinstance(answer[1], Finish)


def test_the_drill_kills_its_rank_once_and_not_again_when_the_step_comes_back() -> None:
    controller, answer = told(Started(plan=PLAN), *ready(), step(1), step(2), step(3))

    assert answer == [KillRank(rank=1)]
    controller.handle(lost(1), 9.0)
    again = [controller.handle(step(number, 2), 10.0) for number in (1, 2, 3)]
    assert again == [[], [], []]


def test_one_wish_to_stop_saves_and_a_second_stops_now() -> None:
    controller, first = told(Started(plan=QUIET), *ready(), step(1), StopAsked())

    second = controller.handle(StopAsked(now=True), 9.0)

    assert first == [AskToStop()]
    assert second[0] == KillRanks(incarnation=1)
    assert isinstance(second[1], Finish)
    assert second[1].ended.outcome == "stopped"
    assert "resume" in second[1].ended.hint


def test_a_wish_to_stop_before_the_ranks_are_ready_needs_no_second() -> None:
    _, answer = told(Started(plan=QUIET), ready()[0], StopAsked())

    assert [type(command) for command in answer] == [KillRanks, Finish]
    assert isinstance(answer[1], Finish)
    assert answer[1].ended.message == "stopped at step 0; no step is saved"


def test_a_rank_lost_while_stopping_ends_the_run_as_stopped() -> None:
    _, answer = told(Started(plan=QUIET), *ready(), step(1), StopAsked(), lost())

    assert isinstance(answer[1], Finish)
    assert answer[1].ended.outcome == "stopped"


@pytest.mark.parametrize(("steps", "outcome"), [(10, "finished"), (4, "stopped")])
def test_ranks_that_left_finish_the_run_or_leave_it_stopped(steps: int, outcome: str) -> None:
    _, answer = told(Started(plan=QUIET), *ready(), step(steps), RanksEnded(incarnation=1, step=steps))

    (finish,) = answer
    assert isinstance(finish, Finish)
    assert finish.ended.outcome == outcome


def test_an_error_of_the_users_making_is_not_met_twice() -> None:
    failed = RankFailed(rank=1, incarnation=1, kind="ModelError", message="no", hint="do")

    _, answer = told(Started(plan=QUIET), failed)

    ended = Ended(outcome="failed", message="no", hint="do", kind="ModelError")
    assert answer == [KillRanks(incarnation=1), Finish(ended=ended)]


def test_a_resumed_run_goes_on_with_a_new_launch_and_a_clean_slate() -> None:
    controller, _ = told(
        Started(plan=QUIET), *ready(), step(1), step(2), saved(2), StopAsked(), Ended(outcome="stopped")
    )
    other = replace(QUIET, layout=Layout(data=1), cards=(0,))

    answer = controller.handle(Started(plan=other, checkpoints=((2, "step-2"),)), 20.0)

    assert answer == [Launch(incarnation=2, plan=other, checkpoint="step-2")]
    assert controller.state is not None
    assert controller.state.outcome == "running"
    assert not controller.state.stopping
    assert controller.state.restarts == 0


NAMES = st.integers(1, 5).map(lambda number: number * 2)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(RankReady, rank=st.integers(0, 1), incarnation=st.integers(1, 4), seconds=st.floats(0, 9)),
    st.builds(step, st.integers(1, 10), st.integers(1, 4), st.sampled_from([1.0, 2.0, float("nan")])),
    st.builds(Evaluated, step=st.integers(1, 10), loss=st.floats(0, 9), seconds=st.floats(0, 9)),
    st.builds(saved, NAMES),
    st.builds(lost, st.integers(0, 1), st.integers(1, 4)),
    st.builds(lambda number: RankFailed(rank=0, incarnation=number, kind="RunError", message="m"), st.integers(1, 4)),
    st.builds(RanksEnded, incarnation=st.integers(1, 4), step=st.integers(1, 10)),
    st.builds(StopAsked, now=st.booleans()),
    st.builds(Noted, name=st.just("sample"), value=st.sampled_from(["", "ü"])),
)  # fmt: skip


def played(events: Iterable[Event], *, whole: set[int]) -> tuple[list[tuple[float, Event]], list[Command], Controller]:
    """Drive a controller with events as the drive loop would; checkpoints outside `whole` are rejected at launch."""
    controller = Controller()
    heard: list[tuple[float, Event]] = []
    carried: list[Command] = []
    waiting = [Started(plan=PLAN, checkpoints=((2, "step-2"), (4, "step-4"))), *events]
    while waiting:
        event = waiting.pop(0)
        heard.append((float(len(heard)), event))
        for command in controller.handle(event, heard[-1][0]):
            loads = isinstance(command, Launch) and command.checkpoint
            if isinstance(command, Launch) and loads and int(command.checkpoint.removeprefix("step-")) not in whole:
                waiting.insert(0, Rejected(checkpoint=command.checkpoint, reason="bytes differ"))
                continue
            if isinstance(command, Finish):
                waiting.insert(0, command.ended)
            carried.append(command)
    return heard, carried, controller


@settings(max_examples=50, deadline=None)
@given(st.lists(EVENTS, max_size=25), st.sets(NAMES))
def test_whatever_happens_ranks_are_ended_before_others_start_and_an_ended_run_is_left_alone(
    events: list[Event], whole: set[int]
) -> None:
    heard, carried, controller = played(events, whole=whole)

    up = False
    for command in carried:
        assert not (isinstance(command, Launch) and up and not command.keep)
        up = isinstance(command, Launch) or (up and not isinstance(command, KillRanks))
    assert sum(isinstance(command, Finish) for command in carried) <= 1
    if any(isinstance(command, Finish) for command in carried):
        assert isinstance(carried[-1], Finish)
    launches = [command.incarnation for command in carried if isinstance(command, Launch)]
    assert launches == sorted(set(launches))
    # The journal alone leads a second controller to the same state.
    assert repr(fold(heard)) == repr(controller.state)


def timed(number: int, *busy: float, incarnation: int = 1) -> Timed:
    return Timed(step=number, incarnation=incarnation, busy=busy)


def moving(plan: Plan, busy: tuple[float, ...]) -> Verdict:
    """Call the second rank slow, and move work off it, from twice the first one's time on."""
    if busy[1] < 2 * busy[0]:
        return Verdict()
    return Verdict(slow={1: busy[1] / busy[0]}, plan=replace(plan, shares=(3, 1)), reason="work moves")


def relayed(controller: Controller, *events: Event) -> list[Command]:
    """Hand events over as the drive loop does, told ones before later ones; returns all commands."""
    found: list[Command] = []
    waiting = list(events)
    while waiting:
        commands = controller.handle(waiting.pop(0), 1.0)
        waiting[:0] = [command.event for command in commands if isinstance(command, Tell)]
        found += commands
    return found


def test_work_moves_when_two_looks_in_a_row_agree() -> None:
    controller = Controller(judge=moving)

    assert relayed(controller, Started(plan=QUIET), timed(1, 1, 3))[1:] == []
    assert relayed(controller, timed(2, 1, 1), timed(3, 1, 3)) == []
    commands = relayed(controller, timed(4, 1, 3))
    assert [type(command) for command in commands] == [Tell, Tell, AskToStop]
    assert controller.state is not None
    assert controller.state.slow == {1: 3.0}
    assert controller.state.plan.shares == ()
    # Nothing more is asked for until the ranks have left.
    assert relayed(controller, timed(5, 1, 3)) == []
    (launch,) = relayed(controller, saved(5), RanksEnded(incarnation=1, step=5))
    assert isinstance(launch, Launch)
    assert (launch.incarnation, launch.plan.shares, launch.checkpoint) == (2, (3, 1), "step-5")
    assert controller.state.restarts == 0
    assert [incident.what for incident in controller.state.incidents] == ["started", "rank 1 is slow", "work moves"]


def test_a_move_that_a_loss_interrupts_is_made_with_the_relaunch() -> None:
    controller = Controller(judge=moving)
    relayed(controller, Started(plan=QUIET), saved(2), timed(3, 1, 3), timed(4, 1, 3))

    (launch,) = relayed(controller, lost(1))
    assert isinstance(launch, Launch)
    assert launch.plan.shares == (3, 1)


def test_a_person_who_stops_the_run_comes_before_a_move() -> None:
    controller = Controller(judge=moving)
    relayed(controller, Started(plan=QUIET), saved(2), RankReady(rank=0, incarnation=1, seconds=1.0))
    relayed(controller, RankReady(rank=1, incarnation=1, seconds=1.0), timed(3, 1, 3), timed(4, 1, 3), StopAsked())

    (finish,) = relayed(controller, RanksEnded(incarnation=1, step=5))
    assert isinstance(finish, Finish)
    assert finish.ended.outcome == "stopped"


def test_a_rank_that_keeps_up_again_is_told_of_once() -> None:
    controller = Controller(judge=lambda plan, busy: replace(moving(plan, busy), plan=None))
    relayed(
        controller, Started(plan=QUIET), *(timed(n, 1, 3) for n in range(1, 5)), *(timed(n, 1, 1) for n in range(5, 9))
    )

    assert controller.state is not None
    whats = [incident.what for incident in controller.state.incidents]
    assert whats == ["started", "rank 1 is slow", "rank 1 keeps up again"]


def test_a_card_that_is_slow_in_turns_moves_work_three_times_and_a_person_three_more() -> None:
    controller = Controller(judge=moving)

    def moves(incarnation: int) -> bool:
        found = relayed(controller, *(timed(n, 1, 3, incarnation=incarnation) for n in (1, 2)))
        if AskToStop() not in found:
            return False
        relayed(controller, saved(2), RanksEnded(incarnation=incarnation, step=2))
        return True

    relayed(controller, Started(plan=QUIET))
    assert [moves(incarnation) for incarnation in range(1, 6)] == [True, True, True, False, False]
    assert controller.state is not None
    assert controller.state.slow == {1: 3.0}  # still told of
    relayed(controller, Started(plan=QUIET, checkpoints=((2, "step-2"),)))
    assert moves(controller.state.incarnation)


def spec(**keys: object) -> Plan:
    """Return a plan on two cards whose job recovers as told."""
    return replace(QUIET, job=replace(JOB, drill=DrillSpec(), recovery=RecoverySpec(most_restarts=9, **keys)))  # type: ignore[arg-type]


def on_one(plan: Plan, cards: tuple[int, ...]) -> Plan:
    """Lay two copies out on one card."""
    if not cards:
        raise SpecError("no cards are left")
    return replace(plan, layout=Layout(data=1), cards=cards[:1])


def test_a_card_that_fails_again_and_again_gives_way_to_a_spare_and_then_to_a_smaller_layout() -> None:
    controller = Controller(fit=on_one)
    plan = spec(fence_after=2, spares=1)

    relayed(controller, Started(plan=plan, spares=(7,)), lost(1, 1))
    (told, launch) = relayed(controller, lost(1, 2))
    assert isinstance(told, Tell)
    assert isinstance(told.event, Fenced)
    assert isinstance(launch, Launch)
    assert (launch.incarnation, launch.keep, launch.plan.cards, launch.plan.layout) == (3, True, (0, 7), plan.layout)
    assert controller.state is not None
    assert (controller.state.fenced, controller.state.spares) == ((1,), ())

    # The spare has a clean slate, and no other takes its place in turn.
    relayed(controller, lost(1, 3))
    (_, launch) = relayed(controller, lost(1, 4))
    assert isinstance(launch, Launch)
    assert (launch.plan.cards, launch.plan.layout.data) == ((0,), 1)
    assert controller.state.fenced == (1, 7)

    # Nothing is left: the run says why, and can be resumed.
    relayed(controller, lost(0, 5))
    (kill, finish) = relayed(controller, lost(0, 6))
    assert isinstance(kill, KillRanks)
    assert isinstance(finish, Finish)
    assert "card 0" in finish.ended.message
    assert "no cards are left" in finish.ended.message
    assert "resume" in finish.ended.hint


def test_losses_long_ago_or_of_nobody_s_card_fence_no_card() -> None:
    controller = Controller(fit=on_one)
    controller.handle(Started(plan=spec(fence_after=2, window=100.0)), 0.0)

    controller.handle(lost(1, 1), 1.0)
    controller.handle(replace(lost(1, 2), blamed=False), 2.0)
    (late,) = controller.handle(lost(1, 3), 102.0)

    assert isinstance(late, Launch)
    assert isinstance(controller.handle(lost(1, 4), 103.0)[0], Tell)


def test_a_run_that_waits_goes_on_once_its_card_is_back_and_says_so_where_it_is_not() -> None:
    controller = Controller(fit=on_one)
    plan = spec(policy="wait", fence_after=1, patience=30.0)

    assert relayed(controller, Started(plan=plan), lost(1, 1))[-1] == Await(card=1, seconds=30.0)
    (launch,) = relayed(controller, CardChecked(card=1, is_up=True))
    assert isinstance(launch, Launch)
    assert launch.plan.cards == (0, 1)
    assert controller.state is not None
    assert controller.state.fenced == ()
    relayed(controller, lost(1, 2))
    finish = relayed(controller, CardChecked(card=1, is_up=False, reason="no answer"))[-1]
    assert isinstance(finish, Finish)
    assert "card 1 did not come back: no answer" in finish.ended.message


def test_a_copy_that_differs_from_the_most_is_fenced_at_once_and_two_that_differ_count_a_loss_each() -> None:
    controller = Controller(fit=on_one)
    relayed(controller, Started(plan=spec(), spares=(5,)))

    both = relayed(controller, Diverged(step=4, incarnation=1, ranks=(0, 1), what="weights"))
    one = relayed(controller, Diverged(step=4, incarnation=2, ranks=(1,), what="weights"))

    assert [type(command) for command in both] == [Launch]
    assert isinstance(one[-1], Launch)
    assert one[-1].plan.cards == (0, 5)


def test_state_that_is_kept_a_second_time_is_no_progress() -> None:
    controller, _ = told(Started(plan=QUIET), lost(0, 1), Kept(step=4), lost(0, 2), lost(0, 3))

    # Thrown back behind step 4 each time, the run would come to it for ever.
    controller.handle(Kept(step=4), 9.0)
    answer = controller.handle(lost(0, 4), 10.0)

    assert isinstance(answer[-1], Finish)
    assert controller.state is not None
    controller.handle(Restored(incarnation=5, step=4, source="memory"), 11.0)
    assert (controller.state.step, controller.state.source) == (4, "memory")


def test_a_loss_far_above_the_usual_is_told_once() -> None:
    plan = replace(spec(spike=6.0), job=replace(spec(spike=6.0).job, steps=100))
    controller = Controller()
    usual = [step(number, loss=2.0 + 0.01 * (number % 3)) for number in range(1, 31)]

    before = relayed(controller, Started(plan=plan), *usual)
    (tell,) = relayed(controller, step(31, loss=3.0), step(32, loss=3.0), step(33, loss=2.0))

    assert [type(command) for command in before] == [Launch]
    assert isinstance(tell, Tell)
    assert isinstance(tell.event, Spiked)
    assert (tell.event.step, tell.event.loss) == (31, 3.0)
    assert abs(tell.event.usual - 2.01) < 0.01
