"""A name never stands for half a file, and what is no file keeps its kind."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from supernode.errors import RunError, SpecError
from supernode.files import alone, check_writable, write_all, write_new, write_whole

TOO_LONG = "x" * 100_000


def in_a_fork(act: Callable[[], None]) -> int:
    """Run something in a process of its own whose files hold no more than 50 kB, as on a full disk."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            act()
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("write", [write_whole, lambda path, text: write_all({path.with_name("a"): "", path: text})])
def test_a_full_disk_leaves_the_older_file_and_nothing_else(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    page = tmp_path / "page.html"
    page.write_text("older")

    code = in_a_fork(lambda: write(page, TOO_LONG))

    assert os.strerror(code) == "File too large"
    assert page.read_text() == "older"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_full_disk_leaves_a_new_name_free(tmp_path: Path) -> None:
    code = in_a_fork(lambda: write_new(tmp_path / "job.yaml", TOO_LONG))

    assert os.strerror(code) == "File too large"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("write", [write_whole, lambda path, text: check_writable(path)])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)

    for path, kind in ((fifo, "FIFO"), (link, "FIFO"), (tmp_path, "folder")):
        with pytest.raises(SpecError, match=f"is a {kind}") as caught:
            write(path, "text")
        assert caught.value.hint

    assert stat.S_ISFIFO(os.lstat(fifo).st_mode)
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_leads_to_the_file_that_is_written(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far/target", tmp_path / "link"
    link.symlink_to("far/target")
    if is_there:
        target.write_text("old")

    write_whole(link, "new")

    assert os.readlink(link) == "far/target"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path / "far") == ["target"]


def test_rights_are_those_of_the_older_file_or_of_any_new_one(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "old").chmod(0o640)
    (tmp_path / "usual").write_text("made by the system")

    write_whole(tmp_path / "old", "new")
    write_whole(tmp_path / "new", "new")

    assert stat.S_IMODE(os.stat(tmp_path / "old").st_mode) == 0o640
    assert os.stat(tmp_path / "new").st_mode == os.stat(tmp_path / "usual").st_mode


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to("absent")

    for name in ("file", "nowhere"):
        with pytest.raises(FileExistsError):
            write_new(tmp_path / name, "ours")
    write_new(tmp_path / "free", "ours")

    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "free").read_text() == "ours"
    assert sorted(os.listdir(tmp_path)) == ["file", "free", "nowhere"]


def test_the_longest_name_can_be_written_and_locked(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)

    with alone(path, hint="wait"):
        write_whole(path, "text")

    assert path.read_text() == "text"
    assert os.listdir(tmp_path) == [path.name]


def test_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path) -> None:
    path, texts = tmp_path / "file", {letter * 200_000 for letter in "abc"}
    code = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from supernode.files import write_whole
        for _ in range(60):
            write_whole(Path(sys.argv[1]), sys.argv[2] * 200_000)
        """
    )

    writers = [subprocess.Popen([sys.executable, "-c", code, path, letter]) for letter in "abc"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            seen.add(path.read_text())

    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert seen <= texts
    assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["file"]


def test_the_second_to_make_a_file_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    path = tmp_path / "file"

    with alone(path, hint="wait for it."), pytest.raises(RunError, match="another process") as caught:  # noqa: SIM117
        with alone(path, hint="wait for it."):
            pass
    with alone(path, hint="wait for it."):
        pass

    assert caught.value.hint == "wait for it."
    assert os.listdir(tmp_path) == []


def test_the_lock_of_a_process_that_was_killed_binds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "file"
    pid = os.fork()
    if pid == 0:
        with alone(path, hint=""):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert os.listdir(tmp_path) == [".lock-file"]

    with alone(path, hint=""):
        pass

    assert os.listdir(tmp_path) == []
