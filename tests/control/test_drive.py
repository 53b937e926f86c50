"""The drive loop carries out what the controller decides, here on a cluster in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from supernode.control.drive import check_in, drive, others_in
from supernode.errors import CheckpointError, MachineError
from supernode.hardware.assemble import build_machine
from supernode.planning.planner import make_plan
from supernode.scheduling.controller import Controller
from supernode.scheduling.state import fold
from supernode.schema.event import Event, KillRanks, Launch, Rejected, Saved, Started, StepDone, StopAsked
from supernode.schema.job import DrillSpec, JobSpec
from supernode.schema.lasting import CheckpointSpec, RecoverySpec
from supernode.schema.manifest import Manifest
from supernode.schema.report import RunState
from supernode.simulation.cluster import SimulatedBackend
from supernode.storing.chunks import CHUNK
from supernode.storing.part import lay_out
from supernode.storing.saves import Saves, name_of, saves_of

JOB = JobSpec(
    steps=20, checkpoint=CheckpointSpec(every=5, keep=2), drill=DrillSpec(kill_step=8, rank=1),
    recovery=RecoverySpec(most_restarts=3),
)  # fmt: skip
PLAN = make_plan(JOB, build_machine(card_count=2, card="H100"))
QUIET = replace(PLAN, job=replace(JOB, drill=DrillSpec()))


@dataclass
class Notebook:
    """A record in memory; with `room`, one that is full after so many events."""

    room: int = 10**9
    events: list[tuple[float, Event]] = field(default_factory=list)

    def append(self, event: Event, time: float) -> None:
        if len(self.events) >= self.room:
            raise MachineError("full", hint="free some space")
        self.events.append((time, event))


class Cluster(SimulatedBackend):
    """A simulated backend that remembers what it was told."""

    def __init__(self, **numbers: float) -> None:
        super().__init__(PLAN, **{"step_seconds": 1.0, "save_seconds": 0.5, "launch_seconds": 2.0, **numbers})  # type: ignore[arg-type]
        self.orders: list[Launch | KillRanks] = []

    def launch(self, command: Launch) -> None:
        self.orders.append(command)
        super().launch(command)

    def kill_ranks(self, command: KillRanks) -> None:
        self.orders.append(command)
        super().kill_ranks(command)


def whole(folder: Path, *, step: int) -> None:
    """Write a checkpoint of made-up bytes that passes the check."""
    saves, piece = saves_in(folder), lay_out([("x", "uint8", (1,), (0,), (1,))])
    stored, _ = saves.store(step, 0, memoryview(bytes([step]) + bytes(CHUNK - 1)), piece)
    manifest = Manifest(step=step, samples=0, seed=0, model="", data="", layout="", optimizer="adamw")
    saves.commit(manifest, [stored])


def saves_in(folder: Path) -> Saves:
    return saves_of(CheckpointSpec(), folder)


def steps_in(notebook: Notebook) -> list[int]:
    return [event.step for _, event in notebook.events if isinstance(event, StepDone)]


def test_a_drill_is_survived_and_the_steps_since_the_checkpoint_are_done_again() -> None:
    cluster, notebook, controller = Cluster(), Notebook(), Controller()

    ended = drive(Started(plan=PLAN), controller=controller, backend=cluster, record=notebook)

    assert ended.outcome == "finished"
    assert steps_in(notebook) == [*range(1, 9), *range(6, 21)]
    assert [type(order).__name__ for order in cluster.orders] == ["Launch", "Launch"]
    assert cluster.orders[-1] == Launch(incarnation=2, plan=PLAN, checkpoint="step-00000005", keep=True)
    assert controller.state is not None
    assert (controller.state.failures, controller.state.outcome) == (1, "finished")
    assert fold(notebook.events) == controller.state


def test_every_event_is_recorded_before_it_is_watched() -> None:
    notebook = Notebook()
    behind: list[int] = []

    def watch(event: Event, state: RunState) -> None:
        behind.append(len(notebook.events) - len(behind) - 1)
        assert notebook.events[-1][1] == event

    drive(Started(plan=QUIET), controller=Controller(), backend=Cluster(), record=notebook, watch=watch)

    assert set(behind) == {0}


def test_checkpoints_that_fail_the_check_give_way_to_older_ones() -> None:
    cluster, notebook = Cluster(), Notebook()
    asked: list[str] = []

    def check(name: str) -> None:
        asked.append(name)
        if name != "step-00000005":
            raise CheckpointError(f"{name}/__0_0.distcp is not what was written", hint="")

    first = Started(plan=QUIET, checkpoints=((5, "step-00000005"), (10, "step-00000010"), (15, "step-00000015")))
    ended = drive(first, controller=Controller(), backend=cluster, record=notebook, check=check)

    assert asked == ["step-00000015", "step-00000010", "step-00000005"]
    assert [event for _, event in notebook.events if isinstance(event, Rejected)] == [
        Rejected(checkpoint=name, reason=f"{name}/__0_0.distcp is not what was written") for name in asked[:2]
    ]
    # Only what passed the check was launched.
    assert [order.checkpoint for order in cluster.orders if isinstance(order, Launch)] == ["step-00000005"]
    assert (ended.outcome, steps_in(notebook)) == ("finished", list(range(6, 21)))


def test_without_any_whole_checkpoint_the_run_begins_again(tmp_path: Path) -> None:
    (tmp_path / "step-00000005").mkdir()
    notebook = Notebook()

    first = Started(plan=QUIET, checkpoints=((5, "step-00000005"),))
    drive(first, controller=Controller(), backend=Cluster(), record=notebook, check=check_in(saves_in(tmp_path)))

    assert steps_in(notebook) == list(range(1, 21))
    (reason,) = [event.reason for _, event in notebook.events if isinstance(event, Rejected)]
    assert "no manifest" in reason


def test_a_damaged_checkpoint_is_set_aside_and_one_that_only_the_disk_knows_is_gone_on_from(tmp_path: Path) -> None:
    (tmp_path / "step-00000005").mkdir()
    whole(tmp_path, step=10)
    cluster, notebook = Cluster(), Notebook()

    first = Started(plan=QUIET, checkpoints=((5, "step-00000005"),))
    drive(
        first, controller=Controller(), backend=cluster, record=notebook, check=check_in(saves_in(tmp_path)),
        others=others_in(saves_in(tmp_path)),
    )  # fmt: skip

    assert steps_in(notebook) == list(range(11, 21))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["aside-step-00000005", "packs", "step-00000010"]


def test_a_checkpoint_of_unchanged_bytes_passes_the_check(tmp_path: Path) -> None:
    whole(tmp_path, step=5)

    check_in(saves_in(tmp_path))(name_of(5))


def test_asked_to_stop_the_run_saves_where_it_stands_and_can_go_on() -> None:
    cluster, notebook, controller = Cluster(), Notebook(), Controller()

    def asked() -> Event | None:
        return StopAsked() if steps_in(notebook)[-1:] == [7] and not controller_stops() else None

    def controller_stops() -> bool:
        return controller.state is not None and controller.state.stopping

    ended = drive(Started(plan=QUIET), controller=controller, backend=cluster, record=notebook, asked=asked)

    assert ended.outcome == "stopped"
    # The step under way when the wish came is done and saved.
    last = steps_in(notebook)[-1]
    assert last in (7, 8)
    assert [event.step for _, event in notebook.events if isinstance(event, Saved)][-1] == last

    again = Controller(fold(notebook.events))
    first = Started(plan=QUIET, checkpoints=((last, name_of(last)),))
    ended = drive(first, controller=again, backend=Cluster(), record=notebook)

    assert ended.outcome == "finished"
    assert sorted(steps_in(notebook)) == list(range(1, 21))


def test_asked_to_stop_now_no_rank_outlives_it() -> None:
    cluster, notebook = Cluster(), Notebook()
    wishes = iter([None] * 12 + [StopAsked(now=True)])

    ended = drive(
        Started(plan=QUIET), controller=Controller(), backend=cluster, record=notebook, asked=lambda: next(wishes, None)
    )

    assert ended.outcome == "stopped"
    assert isinstance(cluster.orders[-1], KillRanks)
    assert cluster.poll(0.0) == []


def test_cards_that_fail_faster_than_checkpoints_come_end_the_run() -> None:
    cluster, notebook = Cluster(mtbf=2.0, seed=3), Notebook()

    ended = drive(Started(plan=QUIET), controller=Controller(), backend=cluster, record=notebook)

    assert (ended.outcome, ended.kind) == ("failed", "RunError")
    assert isinstance(cluster.orders[-1], KillRanks)


def test_a_record_that_is_full_stops_the_run_at_once() -> None:
    notebook = Notebook(room=6)

    with pytest.raises(MachineError, match="full"):
        drive(Started(plan=QUIET), controller=Controller(), backend=Cluster(), record=notebook)
