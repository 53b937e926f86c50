"""`supernode calibrate` and what plans make of its file: refusals with a remedy, and notes of what times rest on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from supernode.hardware.calibration import VERSION, Calibration, Compute, this_host, write_calibration
from supernode.hardware.discover import usable_cores

Command = Callable[..., tuple[int, str, str]]
GOOD = Calibration(
    version=VERSION, date="2026-01-31", host=this_host(usable_cores()), device="cpu", curves=(), axes=(),
    compute=(
        Compute(
            processes=1, products=1e11, products_half=1e9, operands=1e10, scores=1e10, memory=1e10, operation=1e-5,
            step=1e-3, copy=1e10,
        ),
    ),
)  # fmt: skip

SUMS = "{kind: all_reduce, ranks: 2, cards: 2, nbytes: [4.0, 1000000.0], seconds: [0.0001, 0.001]}"


@pytest.fixture
def command(terminal: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return the command line in an empty folder with a job, whose calibration would be `calibration.yaml`."""
    monkeypatch.setenv("SUPERNODE_CALIBRATION", str(tmp_path / "calibration.yaml"))
    (tmp_path / "job.yaml").write_text("model: {layers: 2, width: 32, heads: 4}\ndata: {sequence: 16}\nbatch: 8\n")
    return terminal


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not YAML"),
        ("version: 1\n", "compute"),
        (write_calibration(GOOD).replace("version: 1", "version: 2"), "`version` is 2"),
        (write_calibration(GOOD).replace("memory: ", "memory: -"), "`compute.memory` is -"),
        (write_calibration(GOOD).replace("device:", "divice:"), "divice"),
        (write_calibration(GOOD).replace("curves: []", f"curves: [{SUMS}]"), "`curves` has no all_g"),
    ],
)
def test_a_bad_file_is_refused_with_key_and_remedy(command: Command, text: str, named: str) -> None:
    Path("calibration.yaml").write_text(text)

    code, out, err = command("plan", "job.yaml")

    assert code == 2
    assert out == ""
    assert named in err
    assert "calibration.yaml" in err
    assert "supernode calibrate" in err
    assert "Traceback" not in err


def test_a_plan_says_what_its_times_rest_on(command: Command) -> None:
    _, before, _ = command("plan", "job.yaml", "--json")
    Path("calibration.yaml").write_text(write_calibration(GOOD))
    _, after, _ = command("plan", "job.yaml", "--json")

    assert "quick estimates" in json.loads(before)["notes"][0]
    assert "calibration of 2026-01-31" in json.loads(after)["notes"][0]


@pytest.mark.parametrize(
    ("words", "named"), [
        (("--cards", "1"), "`cards` is 1"), (("--out", "."), "is a folder"), (("--device", "tpu"), "`device` is 'tpu'"),
        (("--device", "cuda"), "NVML shows 0"),
    ],
)  # fmt: skip
def test_flags_out_of_reach_are_refused(
    command: Command, words: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # no GPUs
    code, out, err = command("calibrate", *words)

    assert (code, out) == (2, "")
    assert named in err
    assert "hint:" in err
