"""A stopped run goes on as if it had not been, on the cards that there are, from a checkpoint that is whole."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from supernode.checkpoint.state import saves_in
from supernode.control.training import status
from supernode.errors import CheckpointError, DataError, RunError, SpecError
from supernode.schema.event import Event, StepDone
from supernode.schema.report import RunState
from supernode.storing.saves import name_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stopped(workshop: Any) -> Path:
    """A run on eight cards, stopped by Ctrl-C after three of six steps: checkpoints of steps 2 and 3."""
    folder: Path = workshop.folder / "stopped"

    def interrupt(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    report = workshop.run(workshop.job("t2p2d2"), folder, watch=interrupt)
    assert report.outcome == "stopped"
    return folder


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    """The stopped run, to do with as one likes."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def test_ctrl_c_saves_the_step_under_way_and_stops(workshop: Any, stopped: Path) -> None:
    state = status(stopped)

    assert state.outcome == "stopped"
    assert state.step in (3, 4)
    assert state.checkpoints[-1] == (state.step, name_of(state.step))
    assert "resume" in state.hint
    saves_in(stopped / "checkpoints").verify(state.checkpoints[-1][1])
    assert workshop.server.children == []
    workshop.assert_tidy(stopped)


def test_resumed_on_the_same_layout_it_is_as_if_it_had_not_stopped(workshop: Any, copy: Path) -> None:
    report = workshop.resume(copy)

    assert report.outcome == "finished"
    assert workshop.steps_taken(copy) == [1, 2, 3, 4, 5, 6]
    workshop.assert_same(copy, workshop.undisturbed("t2p2d2"))
    with pytest.raises(RunError, match="is finished") as caught:
        workshop.resume(copy)
    assert "steps=N" in caught.value.hint


@pytest.mark.parametrize("cards", [4, 1])
def test_resumed_on_fewer_cards_the_curve_goes_on(workshop: Any, copy: Path, cards: int) -> None:
    report = workshop.resume(copy, cards=cards)

    assert report.outcome == "finished"
    assert status(copy).plan.ranks == cards
    assert workshop.steps_taken(copy) == [1, 2, 3, 4, 5, 6]
    workshop.assert_close(copy, workshop.undisturbed("1"))


def test_resumed_with_other_degrees_it_goes_on_too(workshop: Any, copy: Path) -> None:
    degrees = {"tensor": 1, "pipeline": 2, "data": 2, "sharding": "fsdp"}

    workshop.resume(copy, overrides={f"parallelism.{axis}": degree for axis, degree in degrees.items()})

    assert status(copy).plan.ranks == 4
    workshop.assert_close(copy, workshop.undisturbed("1"))


def test_more_steps_can_be_asked_for_and_other_data_cannot(workshop: Any, copy: Path) -> None:
    with pytest.raises(SpecError, match=r"`data\.sequence` cannot change"):
        workshop.resume(copy, overrides={"data.sequence": 8})
    with pytest.raises(SpecError, match="model"):
        workshop.resume(copy, overrides={"model.layers": 2})

    assert status(copy).outcome == "stopped"


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_changed_byte_is_found_and_an_older_checkpoint_goes_on(workshop: Any, copy: Path) -> None:
    (_, older), (_, newest) = status(copy).checkpoints
    shard = max((copy / "checkpoints" / "packs").glob(f"{newest.removeprefix('step-')}-*"))
    flip_a_byte(shard)

    with pytest.raises(CheckpointError, match=shard.name) as caught:
        workshop.resume(copy)
    assert f"--checkpoint {older}" in caught.value.hint
    with pytest.raises(CheckpointError, match=shard.name):
        workshop.resume(copy, checkpoint=newest)
    with pytest.raises(CheckpointError, match="step-00000001"):
        workshop.resume(copy, checkpoint="step-00000001")
    workshop.resume(copy, checkpoint=older)

    assert workshop.losses(copy) == workshop.losses(workshop.undisturbed("t2p2d2"))
    assert all(same for _, same in status(copy).repeats)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_lost(
    workshop: Any, copy: Path, tmp_path: Path
) -> None:
    other = workshop.job("1", model={"layers": 2, "width": 16, "heads": 2}, steps=2)
    workshop.run(other, tmp_path / "other")
    older = status(copy).checkpoints[0][1]
    foreign = copy / "checkpoints" / older
    shutil.rmtree(foreign)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000002", foreign)

    with pytest.raises(CheckpointError, match="model") as caught:
        workshop.resume(copy, checkpoint=older)

    assert caught.value.hint
    assert workshop.server.children == []


def test_an_optimizer_of_another_kind_cannot_take_over(workshop: Any, copy: Path) -> None:
    with pytest.raises(SpecError, match=r"`optimizer\.name` cannot change"):
        workshop.resume(copy, overrides={"optimizer.name": "sgd"})


def test_a_run_goes_on_with_the_data_that_it_began_with(workshop: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(workshop.folder / "text.txt", text)
    job = workshop.job("1", data={"text": str(text), "sequence": 16}, steps=2)
    workshop.run(job, tmp_path / "run")
    text.write_text(text.read_text()[::-1])

    workshop.resume(tmp_path / "run", overrides={"steps": 4})
    shutil.rmtree(tmp_path / "run" / "data")
    with pytest.raises(CheckpointError, match="other data") as caught:
        workshop.resume(tmp_path / "run", overrides={"steps": 6})
    text.unlink()
    shutil.rmtree(tmp_path / "run" / "data")
    with pytest.raises(DataError, match=r"text\.txt"):
        workshop.resume(tmp_path / "run", overrides={"steps": 6})

    assert workshop.steps_taken(tmp_path / "run") == [1, 2, 3, 4]
    assert "put the data back" in caught.value.hint


def test_ctrl_c_twice_stops_now_and_the_run_can_go_on(workshop: Any, tmp_path: Path) -> None:
    def interrupt(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 3 and state.incarnation == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    report = workshop.run(workshop.job("t2"), tmp_path / "run", watch=interrupt)
    left = workshop.server.children
    state = status(tmp_path / "run")
    workshop.resume(tmp_path / "run")

    assert (report.outcome, left) == ("stopped", [])
    assert state.checkpoints == ((2, "step-00000002"),)
    workshop.assert_same(tmp_path / "run", workshop.undisturbed("t2"))
