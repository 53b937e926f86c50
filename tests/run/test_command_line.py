"""Runs from a terminal: watched from another one, interrupted, killed without warning, out of disk, taken up again."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from supernode.checkpoint.state import saves_in
from supernode.cli.main import main
from supernode.control.runs import RunFolder
from supernode.control.training import status
from supernode.errors import MachineError

pytestmark = pytest.mark.slow


@pytest.fixture
def job(workshop: Any, tmp_path: Path) -> Path:
    """The job of `undisturbed("t2")` as a file."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(workshop.job("t2")))
    return path


def started(job: Path, folder: Path) -> subprocess.Popen[str]:
    """Start a run from a terminal that shows no live line."""
    command = [sys.executable, "-m", "supernode", "run", str(job), "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """Read what a run says until it says `words`; returns it all."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(f"the run ended without {words!r}: {said}")


def below(pid: int) -> set[int]:
    """Return a process and all that came from it."""
    found, waiting = set(), [pid]
    while waiting:
        process = waiting.pop()
        found.add(process)
        waiting += [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def left_of(processes: set[int], *, within: float) -> set[int]:
    """Return which processes are still alive after a while."""
    deadline = time.monotonic() + within
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return set(filter(is_alive, processes))


def supernode(monkeypatch: pytest.MonkeyPatch, workshop: Any, *words: str) -> int:
    """Run the command line in this process, with ranks from the kept server; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["supernode", *words])
    with pytest.raises(SystemExit) as left:
        main(workshop.server)
    return int(left.value.code or 0)


def test_a_controller_killed_without_warning_leaves_no_rank_and_a_run_to_go_on_with(
    workshop: Any, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with started(job, folder) as process:
        wait_for(process, "step 3/6")
        running, processes = status(folder), below(process.pid)
        process.kill()
        process.wait()
    left, lost = left_of(processes, within=10), status(folder)
    code = supernode(monkeypatch, workshop, "resume", str(folder), "--json")

    assert running.outcome == "running"
    # The controller, its node's keeper, its fork server and two ranks.
    assert len(processes) == 5
    assert left == set()
    assert (lost.outcome, lost.hint) == ("lost", "`supernode resume` goes on.")
    assert code == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == "finished"
    assert err == ""
    workshop.assert_same(folder, workshop.undisturbed("t2"))
    workshop.assert_tidy(folder)


def test_ctrl_c_at_the_terminal_saves_stops_and_can_be_gone_on_from(
    workshop: Any, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with started(job, folder) as process:
        wait_for(process, "step 2/6")
        processes = below(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    stopped = status(folder)

    assert process.returncode == 130, err
    assert "saving, then stopping" in err
    assert "stopped" in out
    assert stopped.outcome == "stopped"
    assert stopped.checkpoints[-1][0] == stopped.step
    assert left_of(processes, within=5) == set()
    assert supernode(monkeypatch, workshop, "resume", str(folder)) == 0
    workshop.assert_same(folder, workshop.undisturbed("t2"))


def test_a_layout_set_at_the_terminal_needs_no_cards_beside_it_and_stays_set(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    workshop.run(workshop.job("1", steps=2), folder)

    code = supernode(monkeypatch, workshop, "resume", str(folder), "--set", "parallelism.data=2", "--set", "steps=3")
    widened = status(folder).plan.ranks
    workshop.resume(folder, cards=1, overrides={"steps": 4})

    assert (code, widened, status(folder).plan.ranks) == (0, 2, 1)
    # What `--cards` fitted was for once, what was set stays.
    job = RunFolder(folder).job()
    assert (job.parallelism.data, job.steps) == (2, 4)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the small model, not for two."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "disk"
    place.mkdir()
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, b"size=1200k"):
        pytest.skip(f"mounting needs root: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(str(place).encode(), 2)


def test_a_disk_that_fills_up_ends_the_run_which_goes_on_once_there_is_room(workshop: Any, small_disk: Path) -> None:
    folder = small_disk / "run"

    with pytest.raises(MachineError, match="is full") as caught:
        workshop.run(workshop.job("t2"), folder)
    failed = status(folder)
    saves = saves_in(folder / "checkpoints")
    kept = saves.all()
    saves.verify(kept[-1][1])
    drafts = list((folder / "checkpoints").glob(".*"))
    ctypes.CDLL(None).mount(b"tmpfs", str(small_disk).encode(), b"tmpfs", 32, b"size=32m")  # 32: MS_REMOUNT
    workshop.resume(folder)

    assert "checkpoint.keep" in caught.value.hint
    assert (failed.outcome, failed.kind) == ("failed", "MachineError")
    assert [step for step, _ in kept] == [2]
    assert drafts == []
    workshop.assert_same(folder, workshop.undisturbed("t2"))


def test_what_ranks_refuse_is_told_at_the_terminal(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def raises(): raise OSError('no weights at hand')\n"
        "def build(): return nn.Linear(2, 2)\n"
        "def text(): return 'model'\n"
        "def data(): return [([1.0, 2.0], 1)] * 8\n"
    )
    cases = [
        ("net.py:raises", "net.py:data", ("raised OSError: no weights at hand (net.py, line 2)", "`model`")),
        ("net.py:biuld", "net.py:data", ("no function `biuld`", "did you mean `build`")),
        ("none.py:build", "net.py:data", ("`model` names", "none.py, which is no file")),
        ("net.py:text", "net.py:data", ("returned a str, not an nn.Module",)),
        ("net.py:build", "net.py:dat", ("no function `dat`", "did you mean `data`")),
        ("net.py:build", "gone.py:data", ("`data.dataset` names", "gone.py, which is no file")),
    ]
    for number, (model, dataset, named) in enumerate(cases):
        job = {"model": model, "data": {"dataset": dataset}, "batch": 4, "steps": 1, "parallelism": {"data": 1}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        folder = str(tmp_path / f"run-{number}")

        code = supernode(monkeypatch, workshop, "run", str(tmp_path / "job.yaml"), "--folder", folder, "--json")

        out, err = capsys.readouterr()
        said = json.loads(out)
        assert code == 2
        assert err == f"error: {said['error']}\nhint: {said['hint']}\n"
        assert "\nhint: " in err
        for words in named:
            assert words in err
