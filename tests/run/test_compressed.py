"""A run whose gradients travel compressed goes on from a checkpoint as if nothing had happened, feedback included."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from supernode.checkpoint import state
from supernode.checkpoint.source import on_disk
from supernode.control.journal import read
from supernode.schema.event import Event, Noted, StepDone
from supernode.schema.report import RunState
from supernode.storing.saves import name_of

pytestmark = pytest.mark.slow

SAID = {"where": "all", "warmup": 1, "density": 0.1, "rank": 2, "bucket": 16_384}


def job(workshop: Any, kind: str, **degrees: Any) -> dict[str, Any]:
    made: dict[str, Any] = workshop.job({"data": 2, **degrees}, communication={"compress": kind, **SAID})
    return made


def interrupted(workshop: Any, made: dict[str, Any], folder: Path) -> Path:
    """Return the folder of a run that was stopped after three or four of six steps."""

    def interrupt(event: Event, seen: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    assert workshop.run(made, folder, watch=interrupt).outcome == "stopped"
    return folder


@pytest.mark.parametrize("kind", ["powersgd", "onebit"])
def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(workshop: Any, tmp_path: Path, kind: str) -> None:
    made = job(workshop, kind)
    assert workshop.run(made, tmp_path / "unbroken").outcome == "finished"
    stopped = interrupted(workshop, made, tmp_path / "stopped")
    other = Path(shutil.copytree(stopped, tmp_path / "other"))

    assert workshop.resume(stopped).outcome == "finished"

    workshop.assert_same(stopped, tmp_path / "unbroken")
    last = on_disk(stopped / "checkpoints" / name_of(6))
    for rank in (0, 1):
        kept = state.find(last, f"compressor.{rank}.")
        assert any(bool(tensor.any()) for name, tensor in kept.items() if name.endswith(".feedback"))

    # In other buckets or on other ranks the feedback means nothing: it starts from zero, and the reader is told.
    overrides = (
        {"parallelism.data": 4, "gradient_accumulation": 2} if kind == "onebit" else {"communication.bucket": 4096}
    )
    assert workshop.resume(other, overrides=overrides).outcome == "finished"
    notes = [event.value for _, event in read(other / "journal.db") if isinstance(event, Noted)]
    assert any("starts from zero" in str(note) for note in notes)


def test_where_all_ranks_share_a_host_only_slow_links_means_none(workshop: Any, tmp_path: Path) -> None:
    made = workshop.job({"data": 2}, communication={"compress": "onebit"})

    workshop.run(made, tmp_path / "run")
    workshop.run(workshop.job({"data": 2}), tmp_path / "plain")

    assert workshop.losses(tmp_path / "run") == workshop.losses(tmp_path / "plain")
    notes = [event.value for _, event in read(tmp_path / "run" / "journal.db") if isinstance(event, Noted)]
    assert any("communication.where" in str(note) for note in notes)


def test_tensor_ranks_keep_their_copies_alike(workshop: Any, tmp_path: Path) -> None:
    """Norms lie whole on both tensor ranks; checkpoints hold one copy, and loss would part from the truth."""
    workshop.run(job(workshop, "int8", tensor=2), tmp_path / "split")
    workshop.run(job(workshop, "none", tensor=2), tmp_path / "plain")

    workshop.assert_close(tmp_path / "split", tmp_path / "plain", tolerance=5e-2)
