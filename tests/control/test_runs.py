"""A run's folder belongs to one controller at a time, and is found by its path or its name."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from supernode.control import runs
from supernode.control.journal import Journal
from supernode.control.training import changed
from supernode.errors import CheckpointError, MachineError, RunError, SpecError
from supernode.schema.codec import to_json
from supernode.schema.event import Started, StopAsked
from supernode.schema.job import JobSpec
from supernode.schema.lasting import CheckpointSpec
from supernode.schema.plan import Layout, Plan
from supernode.schema.report import RunState
from supernode.storing.saves import saves_of

JOB = JobSpec(name="small", steps=3)
PLAN = Plan(job=JOB, layout=Layout(), machine="m", cards=(0,), micro_batch=16, micro_batches=1, stages=())


def begun(folder: Path) -> runs.RunFolder:
    """Return a run that has started; held."""
    run = runs.create(folder, JOB)
    journal = Journal(run.path / runs.JOURNAL)
    journal.append(Started(plan=PLAN), 1.0)
    journal.close()
    return run


def test_a_new_run_is_held_and_bears_its_job(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "a" / "b", JOB)

    assert run.is_held
    assert run.job() == JOB
    run.release()
    assert not run.is_held
    run.release()


def test_a_second_controller_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")

    with pytest.raises(RunError, match="another controller") as caught:
        runs.RunFolder(run.path).hold()
    with pytest.raises(RunError, match="another controller"):
        runs.create(run.path, JOB)

    assert "supernode status" in caught.value.hint
    run.release()
    runs.RunFolder(run.path).hold().release()


def test_one_who_looks_whether_a_folder_is_held_keeps_nobody_out(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.release()
    look = os.open(run.path, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)  # as `is_held` does for a moment
    timer = threading.Timer(0.1, os.close, [look])
    timer.start()

    held = runs.RunFolder(run.path).hold()

    assert held.is_held
    held.release()
    timer.join()


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from supernode.control.runs import RunFolder\n"
        "RunFolder(Path(sys.argv[1])).hold(); print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        held = runs.RunFolder(tmp_path).is_held
        other.kill()
        other.wait()

        assert held
        assert not runs.RunFolder(tmp_path).is_held


def test_a_controller_waits_for_the_ranks_of_the_one_before(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    (run.path / "logs").mkdir()
    run.release()
    code = (
        "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)\n"
        "print('held', flush=True); time.sleep(0.3); open(sys.argv[2], 'w').close()"
    )
    command = [sys.executable, "-c", code, str(run.path / "logs"), str(tmp_path / "gone")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "held\n"

        runs.RunFolder(run.path).hold().release()

        assert (tmp_path / "gone").exists()


def test_a_folder_with_a_run_or_with_something_else_is_refused(tmp_path: Path) -> None:
    begun(tmp_path / "run").release()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()

    with pytest.raises(RunError, match="already holds a run") as first:
        runs.create(tmp_path / "run", JOB)
    with pytest.raises(RunError, match=r"thesis\.tex") as second:
        runs.create(tmp_path / "other", JOB)

    assert "supernode resume" in first.value.hint
    assert "--folder" in second.value.hint
    # The refusal lets go of the folder again.
    assert not runs.RunFolder(tmp_path / "run").is_held
    assert [entry.name for entry in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made_is_the_machines_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/run")):
        with pytest.raises(MachineError, match="cannot make"):
            runs.create(folder, JOB)


def test_a_run_is_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begun(Path("runs/small")).release()

    for name in ("small", "runs/small", str(tmp_path / "runs" / "small")):
        assert runs.find(Path(name)).path == tmp_path / "runs" / "small"
    with pytest.raises(RunError, match="no run in smal") as caught:
        runs.find(Path("smal"))
    assert "Runs here: small" in caught.value.hint


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "", "runs/none"])
def test_a_name_that_no_folder_has_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RunError, match="no run"):
        runs.find(Path(name))


def test_the_next_free_name_is_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert runs.next_free("small") == Path("runs/small")
    begun(Path("runs/small")).release()
    assert runs.next_free("small") == Path("runs/small-2")
    begun(Path("runs/small-2")).release()
    assert runs.next_free("small") == Path("runs/small-3")


def test_a_run_that_was_killed_while_it_prepared_gives_its_name_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    preparing = runs.create(runs.next_free("small"), JOB)

    meanwhile = runs.next_free("small")
    preparing.release()  # as the kernel does when it is killed

    assert meanwhile == Path("runs/small-2")
    assert runs.next_free("small") == Path("runs/small")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("job.json", '{"steps": 100}'),
        ("job.json", "{}"),
        ("job.json", "not JSON"),
        ("data/text.txt", "mine"),
        ("data", "mine"),
        ("notes.txt", "mine"),
    ],
)
def test_what_a_person_keeps_in_a_folder_is_neither_taken_over_nor_deleted(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "job.json").write_text(to_json(JOB), encoding="utf-8")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)

    with pytest.raises(RunError, match="not empty"):
        runs.create(tmp_path, JobSpec(name="other"))

    assert (tmp_path / name).read_text() == content


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_cannot_start_leaves_the_place_as_it_found_it(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "run"
    if is_there:
        folder.mkdir()
    run = runs.create(folder, JOB)
    (folder / "data").mkdir()
    (folder / "data" / "train.bin").touch()

    run.forget_unstarted()
    run.release()

    assert folder.exists() == is_there
    assert not is_there or list(folder.iterdir()) == []


def test_of_a_run_that_has_started_nothing_is_removed_even_if_its_journal_is(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.keep()
    (run.path / runs.JOURNAL).unlink()

    run.forget_unstarted()
    run.release()

    assert run.job() == JOB


def test_a_run_that_took_a_folder_over_and_cannot_start_leaves_what_was_there(tmp_path: Path) -> None:
    runs.create(tmp_path / "run", JOB).release()
    (tmp_path / "run" / "data").mkdir()

    run = runs.create(tmp_path / "run", JOB)
    run.forget_unstarted()
    run.release()

    assert {entry.name for entry in run.path.iterdir()} == {"job.json", "data"}


def test_a_run_that_never_started_says_so(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", JOB)
    Journal(run.path / runs.JOURNAL).close()
    run.release()

    with pytest.raises(RunError, match="never started"):
        run.state()


def test_a_journal_without_its_beginning_is_refused(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", JOB)
    journal = Journal(run.path / runs.JOURNAL)
    journal.append(StopAsked(), 1.0)
    journal.close()
    run.release()

    with pytest.raises(RunError, match="lost its beginning"):
        run.state()


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"[]", b'{"steps": "many"}', b'{"stepz": 1}', b'{"steps": -1}']
)
def test_a_damaged_job_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    run = begun(tmp_path / "run")
    run.release()
    (run.path / runs.JOB).write_bytes(content)

    with pytest.raises(RunError) as caught:
        run.job()

    assert "job.json" in caught.value.message
    assert caught.value.hint


def with_checkpoints(run: runs.RunFolder, *steps: int) -> runs.RunFolder:
    for name in [f"step-{step:08d}" for step in steps] + [".draft-step-00000009", "step-x", "notes"]:
        (run.checkpoints / name).mkdir(parents=True)
    return run


def state_with(run: runs.RunFolder, *, steps: int) -> RunState:
    return replace(run.state(), losses=dict.fromkeys(range(1, steps + 1), 1.0))


def test_a_run_goes_on_from_all_checkpoints_whose_steps_it_knows(tmp_path: Path) -> None:
    run = with_checkpoints(begun(tmp_path / "run"), 2, 4, 6)

    known = runs.checkpoints_to_go_on_from(saves_of(CheckpointSpec(), run.checkpoints), state_with(run, steps=5))
    nothing_known = runs.checkpoints_to_go_on_from(
        saves_of(CheckpointSpec(), run.checkpoints), state_with(run, steps=0)
    )

    # The controller died before it read what its ranks said of step 6.
    assert known == ((2, "step-00000002"), (4, "step-00000004"))
    # Better than to begin again.
    assert nothing_known == ((2, "step-00000002"), (4, "step-00000004"), (6, "step-00000006"))
    # Looking for them has cleared away what an interrupted save left.
    assert not (run.checkpoints / ".draft-step-00000009").exists()
    run.release()


def test_newer_checkpoints_are_set_aside_for_the_one_that_is_wanted(tmp_path: Path) -> None:
    run = with_checkpoints(begun(tmp_path / "run"), 2, 4, 6)
    state = state_with(run, steps=6)

    found = runs.checkpoints_to_go_on_from(saves_of(CheckpointSpec(), run.checkpoints), state, wanted="step-00000002")
    untouched = [name for _, name in saves_of(CheckpointSpec(), run.checkpoints).all()]
    runs.set_newer_aside(saves_of(CheckpointSpec(), run.checkpoints), "step-00000002")

    assert found == ((2, "step-00000002"),)
    assert untouched == ["step-00000002", "step-00000004", "step-00000006"]
    kept = {entry.name for entry in run.checkpoints.iterdir()}
    assert kept == {"step-00000002", "aside-step-00000004", "aside-step-00000006", "step-x", "notes"}
    with pytest.raises(CheckpointError, match="step-00000004") as caught:
        runs.checkpoints_to_go_on_from(saves_of(CheckpointSpec(), run.checkpoints), state, wanted="step-00000004")
    assert "there are: step-00000002" in caught.value.hint
    run.release()


def test_what_a_failed_run_is_told_to_change_can_be_changed() -> None:
    assert changed(JOB, {"optimizer.most_skips": 50}).optimizer.most_skips == 50
    with pytest.raises(SpecError, match="cannot change in a run that has begun"):
        changed(JOB, {"optimizer.learning_rate": 1e-4})


def test_a_run_that_was_killed_before_its_first_event_is_begun_anew(tmp_path: Path) -> None:
    killed = runs.create(tmp_path / "run", JOB)
    (killed.path / "data").mkdir()
    killed.release()
    with pytest.raises(RunError, match="never started") as caught:
        runs.find(tmp_path / "run").state()
    Journal(killed.path / runs.JOURNAL).close()

    run = runs.create(tmp_path / "run", JOB)

    assert run.is_held
    assert f"supernode run FILE --folder {run.path}" in caught.value.hint


def test_a_disk_of_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    spec = CheckpointSpec(disks=(str(tmp_path / "disk"),))
    first, second = begun(tmp_path / "first"), begun(tmp_path / "second")
    saves = saves_of(spec, first.checkpoints)
    runs.claim(first, saves)
    (tmp_path / "disk" / "step-00000001").mkdir()

    runs.claim(first, saves)
    with pytest.raises(CheckpointError, match="another run") as caught:
        runs.claim(second, saves_of(spec, second.checkpoints))

    assert "checkpoint.disks" in caught.value.hint
    assert not second.checkpoints.exists()
    first.path.rename(tmp_path / "moved")  # It is the same run elsewhere.
    runs.claim(runs.RunFolder(tmp_path / "moved"), saves)
    first.release()
    second.release()
