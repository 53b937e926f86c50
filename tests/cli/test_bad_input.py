"""Whatever is wrong with what a person types or points at: it is named, with a remedy, and nothing is harmed."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from supernode.control import runs
from supernode.control.journal import Journal
from supernode.control.supernode import SuperNode, as_job
from supernode.schema.codec import from_json, to_json
from supernode.schema.event import Saved, Started, StepDone, StopAsked
from supernode.schema.job import JobSpec
from supernode.schema.lasting import CheckpointSpec
from supernode.schema.manifest import Manifest
from supernode.storing.chunks import CHUNK
from supernode.storing.part import lay_out
from supernode.storing.saves import name_of, saves_of

Command = Callable[..., tuple[int, str, str]]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 20
JOB = "name: small\nmodel: {layers: 2, width: 32, heads: 4}\ndata: {text: text.txt, sequence: 16}\nbatch: 8\nsteps: 4\n"


@pytest.fixture
def command(tmp_path: Path, terminal: Command) -> Command:
    """Return the command line, in an empty folder with a good job and its text."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "job.yaml").write_text(JOB)

    return terminal


def assert_refused(answer: tuple[int, str, str], *named: str) -> None:
    """Check for exit code 2, nothing on stdout, and an error that names what is wrong with a remedy."""
    code, out, err = answer
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: "), err
    assert "\nhint: " in err, err
    assert "Traceback" not in err
    for words in named:
        assert words in err, err


# What is written in the job file, and the words that must be in the answer.
JOBS: list[tuple[str, tuple[str, ...]]] = [
    ("stepz: 3", ("unknown key `stepz`", "did you mean `steps`")),
    ("parallelism: {tensr: 2}", ("unknown key `parallelism.tensr`", "did you mean `tensor`")),
    ("optimizer: {learning_rte: 1}", ("`optimizer.learning_rte`", "did you mean `learning_rate`")),
    ("checkpoint: {evry: 5}", ("`checkpoint.evry`", "did you mean `every`")),
    ("model: {layer: 3}", ("`model.layer`", "did you mean `layers`")),
    ("Steps: 3", ("unknown key `Steps`", "did you mean `steps`")),
    ("steps: -3", ("`steps` is -3", "choose 1")),
    ("steps: 99999999999999999999999999", ("`steps`",)),
    ("steps: 1.5", ("`steps` is 1.5",)),
    ("optimizer: {learning_rate: .nan}", ("`optimizer.learning_rate` is nan", "finite")),
    ("optimizer: {clip: -1}", ("`optimizer.clip` is -1",)),
    ("optimizer: {learning_rate: 1e400}", ("`optimizer.learning_rate`",)),
    ("batch: 0", ("`batch` is 0",)),
    ("batch: 10\ngradient_accumulation: 4", ("`batch` 10", "gradient_accumulation 4", "set")),
    ("model: {heads: 4}\nparallelism: {tensor: 3, data: 1}", ("`parallelism.tensor` is 3", "4 heads")),
    ("model: {layers: 2}\ngradient_accumulation: 8\nparallelism: {pipeline: 8, data: 1}", ("2 layers for 8 stages",)),
    ("gradient_accumulation: 1\nparallelism: {pipeline: 2, data: 1}", ("`gradient_accumulation` is 1",)),
    ("drill: {kill_step: 2, rank: 8}\nparallelism: {data: 8}", ("`drill.rank` is 8", "8 ranks")),
    ("batch: 8\nparallelism: {data: 3}", ("`batch` 8", "data 3")),
    ("model: gpt-5", ("`model` is 'gpt-5'", "presets")),
    ("model: net.txt:build", ("`model`", "file.py:function")),
    ("precision: float17", ("`precision`", "`float32`")),
    ("precision: float16", ("`precision` is float16", "`optimizer.state`")),
    ("rendezvous: here", ("`rendezvous` is 'here'", "host:port")),
    ("name: 'a/../../b'", ("`name`", "letters")),
    ("name: '<script>'", ("`name`", "letters")),
    ("data: {text: none.txt}", ("`data.text`", "none.txt", "stdlib")),
    ("data: {text: empty.txt}", ("`data.text`", "empty")),
    ("data: {text: binary.txt}", ("`data.text`", "binary.txt", "NUL")),
    ("data: {text: latin.txt}", ("`data.text`", "latin.txt", "UTF-8")),
    ("data: {text: short.txt}", ("`data.text`", "short.txt", "`data.sequence`")),
    ("data: {text: 'nothing/*.txt'}", ("`data.text`", "no file matches")),
    ("data: {text: hollow}", ("`data.text`", "hollow")),
    ("data: {tokens: none.npy}", ("`data.tokens`", "none.npy does not exist")),
    ("data: {tokens: text.txt}", ("`data.tokens`", "neither .npy nor .bin")),
    ("data: {tokens: odd.bin}", ("`data.tokens`", "odd.bin has 3 bytes")),
    ("data: {tokens: garbage.npy}", ("`data.tokens`", "garbage.npy")),
    ("data: {tokens: floats.npy}", ("`data.tokens`", "float64")),
    ("data: {tokens: huge.npy}", ("`data.tokens`", "token 70000")),
    ("data: {tokens: pickled.npy}", ("`data.tokens`", "pickled.npy")),
    ("data: {text: text.txt}\nmodel: {vocabulary: 100}", ("`model.vocabulary` is 100", "256")),
    ("data: {text: text.txt, tokenizer: 'bpe:100'}", ("`data.tokenizer`", "257")),
    ("data: {dataset: none.py}", ("`data.dataset`", "file.py:function")),
    ("a: [1, 2", ("job.yaml",)),
    ("", ("job.yaml", "is empty")),
    ("steps: 1\nsteps: 2", ("`steps` is there twice",)),
    ("a: &x 1", ("anchors",)),
]  # fmt: skip


@pytest.fixture
def strange_files(tmp_path: Path) -> Path:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"text\0more")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1") * 100)
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "garbage.npy").write_bytes(b"\x93NUMPY\x01\x00garbage")
    np.save(tmp_path / "floats.npy", np.ones(100))
    np.save(tmp_path / "huge.npy", np.full(1000, 70_000))
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return tmp_path


@pytest.mark.parametrize(("yaml", "named"), JOBS, ids=[case[0] or "nothing" for case in JOBS])
def test_a_bad_job_is_refused_before_anything_is_written(
    command: Command, strange_files: Path, yaml: str, named: tuple[str, ...]
) -> None:
    job = strange_files / "job.yaml"
    job.write_text(yaml)

    answer = command("run", "job.yaml", "--cards", "8")

    assert_refused(answer, *named)
    assert not (strange_files / "runs").exists() or not list((strange_files / "runs").iterdir())


# The words on the command line, and those that must be in the answer.
FLAGS: list[tuple[str, tuple[str, ...]]] = [
    ("plan none.yaml", ("none.yaml", "does not exist")),
    ("plan .", ("folder",)),
    ("plan job.yaml --cards 0", ("`cards` is 0", "choose 1")),
    ("plan job.yaml --cards -1", ("`cards` is -1",)),
    ("plan job.yaml --cards 99999999999999999999", ("`cards`",)),
    ("plan job.yaml --cards many", ("--cards", "integer")),
    ("plan job.yaml --set", ("--set",)),
    ("plan job.yaml --set steps", ("`--set steps`", "KEY=VALUE")),
    ("plan job.yaml --set =3", ("`--set =3`",)),
    ("plan job.yaml --set stepz=3", ("unknown key `stepz`", "did you mean `steps`")),
    ("plan job.yaml --set steps=[1", ("steps",)),
    ("plan job.yaml --set steps.a=1", ("steps.a",)),
    ("plan job.yaml --set name.a.b=1", ("name",)),
    ("plan job.yaml --set parallelism.data=9", ("data 9",)),
    ("plan job.yaml --set parallelism.data=nan", ("`parallelism.data`",)),
    ("plan job.yaml --card H10", ("unknown card `H10`", "H100")),
    ("plan job.yaml --card H100 --interconnect 3D_Rng", ("3D_Rng", "did you mean `3D_Ring`")),
    ("plan job.yaml --card H100 --cooling oil", ("oil", "liquid")),
    ("plan job.yaml --machine supernode-7", ("supernode-7",)),
    ("plan job.yaml --wrong", ("--wrong",)),
    ("plan", ("FILE",)),
    ("pln job.yaml", ("pln",)),
    ("machine --interconnect Fat_Tree", ("`--interconnect`", "--card H100")),
    ("plan job.yaml --card local --cooling air", ("`--cooling`", "--card H100")),
    ("machine --machine supernode-512 --cards 8 --card H100", ("`--cards` and `--card`", "--machine supernode-512")),
    ("machine --cards 0", ("`cards` is 0",)),
    ("machine --card H100 --cards -5", ("-5",)),
    ("machine --card nothing", ("unknown card `nothing`",)),
    ("simulate job.yaml --mtbf soon", ("`--mtbf` is 'soon'", "90s")),
    ("simulate job.yaml --mtbf -5s", ("`--mtbf`",)),
    ("simulate job.yaml --mtbf nan", ("`--mtbf`",)),
    ("simulate job.yaml --mtbf 0", ("mtbf",)),
    ("simulate job.yaml --mtbf 1e999", ("`--mtbf`",)),
    ("simulate job.yaml --out text.txt", ("text.txt", "--out")),
    ("run job.yaml --cards 0", ("`cards` is 0",)),
    ("run job.yaml --folder text.txt", ("text.txt", "--folder")),
    ("run job.yaml --folder text.txt/below", ("text.txt", "--folder")),
    ("run job.yaml --folder .", ("not empty", "--folder")),
    ("run job.yaml --folder /proc/nowhere", ("/proc/nowhere", "--folder")),
    ("resume none", ("no run in none",)),
    ("resume text.txt", ("no run in text.txt",)),
    ("status none", ("no run in none",)),
    ("status text.txt", ("no run in text.txt",)),
    ("status ''", ("no run",)),
    ("report none", ("no run in none",)),
]


@pytest.mark.parametrize(("words", "named"), FLAGS, ids=[case[0] for case in FLAGS])
def test_bad_words_on_the_command_line_are_refused(command: Command, words: str, named: tuple[str, ...]) -> None:
    answer = command(*(word.strip("'") for word in words.split()))

    assert_refused(answer, *named)


def test_with_json_an_error_is_json_too(command: Command) -> None:
    code, out, err = command("status", "none", "--json")

    said = json.loads(out)
    assert code == 2
    assert err == f"error: {said['error']}\nhint: {said['hint']}\n"


@pytest.mark.parametrize("words", ["plan job.yaml", "plan job.yaml --json"])
def test_what_cannot_be_written_to_stdout_is_an_error(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)

        code, _, err = command(*words.split())

        with suppress(OSError):
            full.close()
    assert code == 2
    assert err.startswith("error: cannot write to stdout: No space left")


@pytest.fixture
def stopped_run(command: Command, tmp_path: Path) -> Path:
    """A run that stopped after two steps, with two checkpoints of made-up bytes."""
    del command
    job = as_job(tmp_path / "job.yaml")
    run = runs.create(tmp_path / "runs" / "small", job)
    plan = SuperNode.discover(cards=1).plan(job)
    journal = Journal(run.path / runs.JOURNAL)
    journal.append(Started(plan=plan), 1.0)
    for step in (1, 2):
        done = StepDone(step=step, incarnation=1, loss=5.0, seconds=1, tokens=128, norm=1, rate=0.1, parts={})
        journal.append(done, 1.0 + step)
        journal.append(Saved(step=step, checkpoint=name_of(step), nbytes=7, seconds=0.1), 1.5 + step)
        saves, pieces = saves_of(job.checkpoint, run.checkpoints), lay_out([("w", "uint8", (7,), (0,), (7,))])
        stored, _ = saves.store(step, 0, memoryview(f"weight{step}".encode().ljust(CHUNK, b"\0")), pieces)
        saves.commit(Manifest(step=step, samples=8, seed=0, model="", data="", layout="", optimizer="adamw"), [stored])
    journal.append(StopAsked(), 4.0)
    journal.close()
    run.release()
    return run.path


def test_a_stopped_run_is_shown_as_it_stands(command: Command, stopped_run: Path) -> None:
    code, out, _ = command("status", "small", "--json")
    again, _, _ = command("report", str(stopped_run))

    assert (code, again) == (0, 0)
    # Its controller is not at work, and has not said that it ended.
    assert json.loads(out)["outcome"] == "lost"
    assert (stopped_run / "report.html").exists()


def test_a_second_controller_in_a_folder_is_refused(command: Command, stopped_run: Path) -> None:
    held = runs.RunFolder(stopped_run).hold()

    resumed = command("resume", "small")
    started = command("run", "job.yaml", "--folder", str(stopped_run))
    held.release()
    after = command("run", "job.yaml", "--folder", str(stopped_run))

    assert_refused(resumed, "another controller", "supernode status")
    assert_refused(started, "another controller")
    assert_refused(after, "already holds a run", "supernode resume")
    assert len(saves_of(CheckpointSpec(), stopped_run / "checkpoints").all()) == 2


def test_a_corrupt_shard_is_named_with_the_older_checkpoint(command: Command, stopped_run: Path) -> None:
    pack = next((stopped_run / "checkpoints" / "packs").glob("00000002-*"))
    pack.write_bytes(pack.read_bytes()[:-1] + b"z")

    answer = command("resume", "small")

    assert_refused(answer, pack.name, "not what was written", f"--checkpoint {name_of(1)}")
    assert_refused(command("resume", "small", "--checkpoint", name_of(2)), pack.name)
    saves_of(CheckpointSpec(), stopped_run / "checkpoints").verify(name_of(1))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--checkpoint step-00000009", ("step-00000009",)),
        ("--checkpoint ../../etc", ("../../etc",)),
        ("--checkpoint .", ("`.`",)),
        ("--cards 0", ("`cards` is 0",)),
        ("--cards -1", ("`cards` is -1",)),
        ("--set data.sequence=8", ("`data.sequence` cannot change", "these can")),
        ("--set stepz=8", ("stepz",)),
        ("--set steps=0", ("`steps` is 0",)),
        ("--set parallelism.tensor=3", ("`parallelism.tensor` is 3", "4 heads")),
        ("--checkpoint step-00000001 --set parallelism.data=3", ("`batch` 8", "data 3")),
        ("--set drill.kill_step=3 --set drill.rank=9", ("`drill.rank` is 9", "leave `drill` out")),
        ("--set checkpoint=5", ("`checkpoint`",)),
        ("--set threads.a=5", ("threads",)),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused(
    command: Command, stopped_run: Path, words: str, named: tuple[str, ...]
) -> None:
    before = sorted(entry.name for entry in (stopped_run / "checkpoints").iterdir())
    job = (stopped_run / runs.JOB).read_text()

    answer = command("resume", "small", *words.split())

    assert_refused(answer, *named)
    assert sorted(entry.name for entry in (stopped_run / "checkpoints").iterdir()) == before
    assert (stopped_run / runs.JOB).read_text() == job


def alter(statement: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(bytes(9000)),
        lambda path: path.write_text("not a journal\n" * 500),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        alter("DELETE FROM events WHERE id = 1"),
        alter("UPDATE events SET record = 'null' WHERE id = 1"),
        alter("UPDATE events SET kind = 'Vanished'"),
        alter("DROP TABLE events"),
    ],
    ids=["zeros", "text", "empty", "truncated", "headless", "null", "unknown", "no table"],
)
def test_a_garbage_journal_is_refused_by_every_verb(
    command: Command, stopped_run: Path, damage: Callable[[Path], object]
) -> None:
    damage(stopped_run / runs.JOURNAL)

    for verb in ("status", "report", "resume"):
        assert_refused(command(verb, "small"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}garbage", b"[]", b'{"steps": 0}', b'{"model": "gpt-9"}'])
def test_a_garbage_job_in_a_run_is_refused(command: Command, stopped_run: Path, content: bytes) -> None:
    (stopped_run / runs.JOB).write_bytes(content)

    assert_refused(command("resume", "small"), "job.json")


def test_a_port_in_use_is_named(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"

        answer = command("run", "job.yaml", "--set", f"rendezvous='{place}'")

    assert_refused(answer, f"`rendezvous` {place}", "free port")
    assert not Path("runs").exists()


@pytest.mark.parametrize("place", ["nowhere.invalid:80", "127.0.0.1:99999", "127.0.0.1:0", ":80", "203.0.113.1:80"])
def test_a_place_where_nobody_can_meet_is_named(command: Command, place: str) -> None:
    assert_refused(command("run", "job.yaml", "--set", f"rendezvous='{place}'"), "`rendezvous`")


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of as many KiB as the test wants."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "disk"
    place.mkdir()
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, f"size={request.param}k".encode()):
        pytest.skip(f"mounting needs root: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(str(place).encode(), 2)


@pytest.mark.parametrize("small_disk", [16], indirect=True)
def test_a_disk_too_small_for_the_data_is_named(command: Command, small_disk: Path) -> None:
    Path("text.txt").write_text(TEXT * 100)

    answer = command("run", "job.yaml", "--folder", str(small_disk / "run"))

    assert_refused(answer, str(small_disk), "disk space")
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("small_disk", [32], indirect=True)
def test_a_disk_too_small_for_the_journal_is_named(command: Command, small_disk: Path) -> None:
    answer = command("run", "job.yaml", "--folder", str(small_disk / "run"))

    assert_refused(answer, "journal.db cannot be written", "free some space")


def test_a_report_on_a_disk_that_takes_nothing_is_named(
    command: Command, stopped_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)

    assert_refused(command("report", str(stopped_run)), "report.html cannot be written: Read-only file system")


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_unasked(command: Command, stopped_run: Path) -> None:
    shutil.rmtree(stopped_run / "checkpoints")

    assert_refused(command("resume", "small"), "every checkpoint is gone", name_of(2), "start a new run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_data_is_prepared_leaves_nothing_behind(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def prepare(job: JobSpec, folder: Path, *, progress: Any) -> None:
        (folder / ".draft-x").mkdir(parents=True)
        os.kill(os.getpid(), number)
        time.sleep(1.0)

    monkeypatch.setattr("supernode.control.training.prepare", prepare)

    code, out, err = command("run", "job.yaml", "--cards", "1", "--folder", "run")

    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert not (tmp_path / "run").exists()


def test_a_report_that_cannot_be_written_is_named(command: Command, stopped_run: Path) -> None:
    (stopped_run / "report.html").mkdir()

    assert_refused(command("report", "small"), "report.html, which is a folder")
    assert not list(stopped_run.glob(".draft-*"))


WITHOUT_TORCH = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def test_without_torch_training_says_what_to_install_and_planning_works(command: Command, tmp_path: Path) -> None:
    del command
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_TORCH)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def supernode(*words: str) -> Any:
        command = [sys.executable, "-m", "supernode", *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    planned, ran = supernode("plan", "job.yaml"), supernode("run", "job.yaml")

    assert planned.returncode == 0, planned.stderr
    assert_refused((ran.returncode, ran.stdout, ran.stderr), "torch is not installed", "supernode-sdk[train]")
    assert not (tmp_path / "runs").exists()


def test_names_with_quotes_markup_and_spaces_are_only_names(command: Command, stopped_run: Path) -> None:
    evil = "a 'quoted' \"<b>name\" & more"
    folder = stopped_run.parent / evil
    stopped_run.rename(folder)
    job = from_json(JobSpec, (folder / runs.JOB).read_bytes())
    (folder / runs.JOB).write_text(to_json(job))

    shown, _, _ = command("status", evil)
    code, _, said = command("report", f"runs/{evil}")
    absolute, _, _ = command("status", str(folder.resolve()))

    assert (shown, code, absolute) == (0, 0, 0)
    assert "report.html" in said
    assert "<b>name" not in (folder / "report.html").read_text()


def test_a_job_in_a_folder_with_spaces_is_found_from_anywhere(command: Command, tmp_path: Path) -> None:
    place = tmp_path / "my jobs" / "ümlaut's"
    place.mkdir(parents=True)
    (place / "text.txt").write_text(TEXT)
    (place / "the job.yaml").write_text(JOB)

    absolute = command("plan", str(place / "the job.yaml"), "--json")
    relative = command("plan", "my jobs/ümlaut's/the job.yaml", "--json")

    assert absolute[0] == relative[0] == 0
    assert json.loads(absolute[1])["job"]["data"]["text"] == str(place / "text.txt")
    assert json.loads(absolute[1])["job"] == json.loads(relative[1])["job"]


def test_more_ranks_than_this_computer_bears_are_refused(command: Command, tmp_path: Path) -> None:
    job = tmp_path / "crowd.yaml"
    job.write_text("{name: crowd, batch: 4096, parallelism: {data: 4096}}")

    refused = command("run", str(job))

    assert_refused(refused, "4096 ranks are too many", "--cards")
    assert not (tmp_path / "runs").exists()


def test_a_terminal_that_knows_no_such_character_is_shown_the_others(command: Command, tmp_path: Path) -> None:
    del command
    answer = subprocess.run(
        [sys.executable, "-m", "supernode", "plan", "job.yaml", "--set", "name=naïve", "--json"],
        cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert json.loads(answer.stdout)["job"]["name"] == "na?ve"


def test_streams_that_the_shell_closed_lend_their_numbers_to_nothing_else() -> None:
    code = "import os, sys; from supernode.cli.entry import _open_standard_streams as f; f()\n" + (
        "open(sys.argv[1], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (1, 2)))"
    )
    read, write = os.pipe()
    words = ["sh", "-c", 'exec "$0" -c "$1" "$2" >&- 2>&-', sys.executable, code, f"/dev/fd/{write}"]
    subprocess.run(words, check=True, pass_fds=[write])
    os.close(write)

    with os.fdopen(read) as said:
        assert said.read() == "/dev/null /dev/null"
