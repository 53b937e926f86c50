"""What commands write is whole or not there, and what cannot be written is told before anything is computed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from supernode.files import alone

Command = Callable[..., tuple[int, str, str]]
CLAIMS, CALIBRATE = ("claims", "S3.1", "--out"), ("calibrate", "--cards", "2", "--out")


@pytest.fixture
def command(terminal: Command) -> Command:
    return terminal


@pytest.mark.parametrize("words", [CLAIMS, CALIBRATE])
def test_a_pipe_is_refused_before_anything_is_computed(command: Command, words: tuple[str, ...]) -> None:
    os.mkfifo("pipe")
    os.symlink("pipe", "link")

    for name in ("pipe", "link"):
        code, out, err = command(*words, name)
        assert (code, out) == (2, "")
        assert f"{name}, which is a FIFO" in err
        assert "hint:" in err

    assert stat.S_ISFIFO(os.lstat("pipe").st_mode)
    assert sorted(os.listdir()) == ["link", "pipe"]


@pytest.mark.parametrize("words", [CLAIMS, CALIBRATE])
def test_a_place_that_takes_no_file_is_refused_before_anything_is_computed(
    command: Command, words: tuple[str, ...]
) -> None:
    Path("file").write_text("no folder")

    code, out, err = command(*words, "file/below")

    assert (code, out) == (2, "")
    assert "cannot" in err
    assert "hint:" in err
    assert Path("file").read_text() == "no folder"


def test_a_second_calibration_of_one_file_is_refused(command: Command, tmp_path: Path) -> None:
    with alone(tmp_path / "mine.yaml", hint=""):
        code, out, err = command("calibrate", "--out", "mine.yaml")

    assert (code, out) == (2, "")
    assert "another process is making mine.yaml" in err
    assert "wait for it" in err


def test_a_page_goes_where_its_link_leads(command: Command) -> None:
    os.symlink("page.html", "link")

    code, _, _ = command("claims", "S3.1", "--out", "link")

    assert code == 0
    assert os.readlink("link") == "page.html"
    assert Path("page.html").read_text().endswith("</html>\n")


def test_a_job_is_written_once(command: Command) -> None:
    words = ("plan", "--model", "llama3-8b", "--batch", "64", "--sequence", "512", "--machine", "8xH100", "--write")

    code, _, _ = command(*words, "job.yaml")
    written = Path("job.yaml").read_text()
    again, _, err = command(*words, "job.yaml")

    assert (code, again) == (0, 2)
    assert "job.yaml exists" in err
    assert Path("job.yaml").read_text() == written
    assert os.listdir() == ["job.yaml"]
