"""A cluster in virtual time: what it reports, when, and how often it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from supernode.errors import RunError, SpecError
from supernode.hardware.assemble import build_machine
from supernode.planning.planner import make_plan
from supernode.schema.event import Event, KillRanks, Launch, RankLost, RankReady, RanksEnded, Saved, StepDone
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.lasting import CheckpointSpec
from supernode.simulation.cluster import SimulatedBackend

MACHINE = build_machine(card_count=4, card="H100")
PLAN = make_plan(JobSpec(steps=25, checkpoint=CheckpointSpec(every=10)), MACHINE)


def backend(**numbers: float) -> SimulatedBackend:
    settings = {"save_seconds": 2.0, "load_seconds": 3.0, "launch_seconds": 4.0, "step_seconds": 1.0}
    return SimulatedBackend(PLAN, **{"seed": 1, **settings, **numbers})  # type: ignore[arg-type]


def launch(number: int = 1, checkpoint: str = "") -> Launch:
    return Launch(incarnation=number, plan=PLAN, checkpoint=checkpoint)


def until_quiet(cluster: SimulatedBackend) -> list[tuple[float, Event]]:
    seen: list[tuple[float, Event]] = []
    while events := cluster.poll(0.0):
        seen += [(cluster.now(), event) for event in events]
    return seen


def test_an_undisturbed_run_takes_launch_steps_and_saves() -> None:
    cluster = backend()
    cluster.launch(launch())

    seen = until_quiet(cluster)

    assert [time for time, event in seen if isinstance(event, RankReady)] == [7.0] * 4
    assert [event.step for _, event in seen if isinstance(event, StepDone)] == list(range(1, 26))
    assert [(time, e.step) for time, e in seen if isinstance(e, Saved)] == [(19.0, 10), (31.0, 20), (38.0, 25)]
    assert seen[-1] == (38.0, RanksEnded(incarnation=1, step=25))
    # 4 launching + 3 loading + 25 steps + 3 saves of 2.
    assert cluster.now() == 38.0


def test_a_step_takes_what_the_plan_predicts() -> None:
    cluster = SimulatedBackend(PLAN, seed=0)
    cluster.launch(launch())

    until_quiet(cluster)

    assert PLAN.step is not None
    assert cluster.now() == pytest.approx(25 * PLAN.step.total)


def test_a_launch_goes_on_from_its_checkpoint() -> None:
    cluster = backend()
    cluster.launch(launch(checkpoint="step-00000020"))

    steps = [event.step for _, event in until_quiet(cluster) if isinstance(event, StepDone)]

    assert steps == [21, 22, 23, 24, 25]


def test_a_finished_run_ends_at_once() -> None:
    cluster = backend()
    cluster.launch(launch(checkpoint="step-00000025"))

    assert [type(event) for _, event in until_quiet(cluster)] == [RankReady] * 4 + [RanksEnded]


def test_a_killed_rank_is_lost_now_and_the_others_fall_silent() -> None:
    cluster = backend()
    cluster.launch(launch())
    cluster.poll(0)
    cluster.poll(0)

    cluster.kill_rank(2)

    assert until_quiet(cluster) == [(8.0, RankLost(rank=2, incarnation=1, reason="killed on purpose"))]


def test_asked_to_stop_it_ends_the_step_saves_and_leaves() -> None:
    cluster = backend()
    cluster.launch(launch())
    cluster.poll(0)
    cluster.poll(0)

    cluster.ask_to_stop()

    steps, saves, ends = until_quiet(cluster)
    assert steps[1].step == 2  # type: ignore[union-attr]
    assert saves[1].step == 2  # type: ignore[union-attr]
    assert ends == (11.0, RanksEnded(incarnation=1, step=2))


def test_nothing_is_heard_of_killed_ranks() -> None:
    cluster = backend()
    cluster.launch(launch())
    cluster.poll(0)

    cluster.kill_ranks(KillRanks(incarnation=1))

    assert cluster.poll(5.0) == []
    assert cluster.now() == 12.0


def test_a_late_order_to_kill_does_not_reach_the_next_launch() -> None:
    cluster = backend()
    cluster.launch(launch(2))

    cluster.kill_ranks(KillRanks(incarnation=1))

    assert cluster.poll(0)


def failures(seed: int, *, mtbf: float, count: int) -> list[float]:
    cluster = backend(seed=seed, mtbf=mtbf, step_seconds=1e9)
    times = []
    for number in range(count):
        began = cluster.now()
        cluster.launch(launch(number + 1))
        while not any(isinstance(event, RankLost) for event in cluster.poll(0)):
            pass
        times.append(cluster.now() - began)
    return times


def test_four_cards_fail_four_times_as_often_as_one() -> None:
    times = failures(3, mtbf=4000.0, count=2000)

    # The mean of 2000 exponential times scatters by 1 / √2000 = 2.2 %; four of those are allowed.
    assert sum(times) / len(times) == pytest.approx(1000.0, rel=0.09)


def test_one_seed_gives_one_history() -> None:
    assert failures(5, mtbf=100.0, count=20) == failures(5, mtbf=100.0, count=20)
    assert failures(5, mtbf=100.0, count=20) != failures(6, mtbf=100.0, count=20)


@pytest.mark.parametrize("numbers", [{"mtbf": 0.0}, {"save_seconds": -1.0}, {"step_seconds": 0.0}])
def test_impossible_numbers_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(SpecError, match=next(iter(numbers))):
        backend(**numbers)


def test_an_own_module_needs_the_seconds_of_a_step() -> None:
    own = make_plan(JobSpec(model="net.py:build", data=DataSpec(dataset="net.py:data")), MACHINE)

    with pytest.raises(SpecError, match="own module"):
        SimulatedBackend(own, seed=0)


def test_a_checkpoint_without_a_number_is_refused() -> None:
    with pytest.raises(RunError, match="'latest'"):
        backend().launch(replace(launch(), checkpoint="latest"))


@pytest.mark.parametrize(("state", "each"), [("same", 4), ("float32", 4), ("float8", 2)])
def test_a_checkpoint_has_the_moments_as_they_are_saved(state: Literal["same", "float32", "float8"], each: int) -> None:
    plan = make_plan(JobSpec(steps=1, optimizer=OptimizerSpec(state=state)), MACHINE)
    cluster = SimulatedBackend(plan, step_seconds=1.0)
    cluster.launch(Launch(incarnation=1, plan=plan, checkpoint=""))

    (saved,) = [event for _, event in until_quiet(cluster) if isinstance(event, Saved)]

    # Moments of 8 bits are saved in bfloat16.
    assert saved.nbytes == plan.parameters * (4 + 2 * each)
