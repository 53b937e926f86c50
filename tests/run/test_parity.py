"""However a run is laid out, and whatever it meets on the way, it is the run of one process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from supernode.control.journal import read
from supernode.control.training import status
from supernode.schema.event import Event, Saved, StepDone
from supernode.schema.report import RunState

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["t2", "t2p2d2", "t2p2d2-fsdp"])
def test_every_layout_learns_what_one_process_learns(workshop: Any, layout: str) -> None:
    one, many = workshop.undisturbed("1"), workshop.undisturbed(layout)

    workshop.assert_close(one, many)
    held_out = [status(folder).held_out[6] for folder in (one, many)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-4)
    # The epoch's last batch is short: four micro-batches hold 6 samples of 16 tokens.
    tokens = [event.tokens for _, event in read(many / "journal.db") if isinstance(event, StepDone)]
    assert tokens == [128] * 5 + [96]


def test_a_finished_run_leaves_its_checkpoints_its_journal_and_a_report(workshop: Any) -> None:
    folder = workshop.undisturbed("t2p2d2")

    state = status(folder)
    assert (state.outcome, state.step, state.ready, state.failures) == ("finished", 6, 8, 0)
    assert [step for step, _ in state.checkpoints] == [4, 6]
    workshop.assert_tidy(folder)
    plain = json.loads((folder / "report.json").read_text())
    assert plain["outcome"] == "finished"
    assert list(plain["losses"]) == ["1", "2", "3", "4", "5", "6"]
    assert plain["bigram_loss"] > 0
    page = (folder / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert page.count("<svg") == page.count("</svg>") == 3


@pytest.mark.parametrize("layout", ["t2p2d2", "t2p2d2-fsdp"])
def test_a_rank_killed_between_steps_changes_nothing(workshop: Any, tmp_path: Path, layout: str) -> None:
    def strike(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 3 and state.incarnation == 1:
            workshop.kill(5, signal=signal.SIGKILL)

    workshop.run(workshop.job(layout), tmp_path / "run", watch=strike)

    workshop.assert_same(tmp_path / "run", workshop.undisturbed(layout))
    state = status(tmp_path / "run")
    assert state.failures == 1
    assert all(same for _, same in state.repeats)
    assert state.repeats[0][0] == 3
    assert state.incidents[1].what == "rank 5 lost"
    assert "signal 9" in state.incidents[1].detail
    workshop.assert_tidy(tmp_path / "run")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_saving_leaves_no_half_checkpoint(workshop: Any, tmp_path: Path, victim: int) -> None:
    folder = tmp_path / "run"
    struck = threading.Event()

    def strike() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (folder / "checkpoints" / ".draft-step-00000004").exists():
                workshop.kill(victim, signal=signal.SIGKILL)
                struck.set()
                return
            time.sleep(0.0005)

    striker = threading.Thread(target=strike)
    striker.start()
    workshop.run(workshop.job("t2"), folder)
    striker.join()

    assert struck.is_set()
    assert status(folder).failures == 1
    workshop.assert_same(folder, workshop.undisturbed("t2"))
    workshop.assert_tidy(folder)


def test_a_checkpoint_that_rots_on_the_way_gives_way_to_the_one_before(workshop: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def strike(event: Event, state: RunState) -> None:
        if isinstance(event, Saved) and event.step == 4 and state.incarnation == 1:
            shard = max((folder / "checkpoints" / "packs").glob("00000004-*"))
            shard.write_bytes(shard.read_bytes()[:-1])
            workshop.kill_nodes(0)  # Else its memory has the step.
            workshop.kill(0, signal=signal.SIGKILL)

    workshop.run(workshop.job("t2"), folder, watch=strike)

    assert workshop.rejections(folder) == ["step-00000004"]
    assert [step for step, _ in status(folder).repeats][:2] == [3, 4]
    workshop.assert_same(folder, workshop.undisturbed("t2"))


def test_a_frozen_rank_is_missed_and_replaced(workshop: Any, tmp_path: Path) -> None:
    def freeze(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 3 and state.incarnation == 1:
            workshop.kill(1, signal=signal.SIGSTOP)

    job = workshop.job("t2", recovery={"silence": 2.0})
    workshop.run(job, tmp_path / "run", watch=freeze)

    state = status(tmp_path / "run")
    assert state.failures == 1
    workshop.assert_same(tmp_path / "run", workshop.undisturbed("t2"))


def test_a_keeper_that_freezes_is_replaced_and_ranks_do_not_notice(workshop: Any, tmp_path: Path) -> None:
    first: list[int] = []

    def freeze(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 3 and not first:
            first.extend(workshop.keepers())
            os.kill(first[0], signal.SIGSTOP)

    workshop.run(workshop.job("t2", recovery={"frozen": 1.0}), tmp_path / "run", watch=freeze)

    state = status(tmp_path / "run")
    assert (state.failures, state.checkpoints[-1][0]) == (0, 6)
    assert not Path(f"/proc/{first[0]}").exists()
    workshop.assert_same(tmp_path / "run", workshop.undisturbed("t2"))


def test_the_drill_of_the_job_is_a_failure_like_any_other(workshop: Any, tmp_path: Path) -> None:
    job = workshop.job("t2", drill={"kill_step": 5, "rank": 1})

    report = workshop.run(job, tmp_path / "run")

    assert (report.failures, report.repeats, report.repeats_identical) == (1, 1, 1)
    workshop.assert_same(tmp_path / "run", workshop.undisturbed("t2"))
