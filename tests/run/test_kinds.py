"""Each kind of data, optimizer and precision trains, and comes back from a failure as it was."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from supernode.control.training import status
from supernode.errors import RunError
from supernode.schema.event import Event, StepDone
from supernode.schema.report import RunState

pytestmark = pytest.mark.slow


def test_byte_pairs_sgd_evaluation_and_a_sample_of_text(workshop: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)

    def strike(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 3 and state.incarnation == 1:
            workshop.kill(0, signal=signal.SIGKILL)

    job = workshop.job(
        {"tensor": 2, "data": 1},
        data={"text": str(text), "sequence": 16, "tokenizer": "bpe:270"},
        optimizer={"name": "sgd", "learning_rate": 0.05, "warmup": 0, "decay": "linear"},
        evaluate={"every": 2, "batches": 2},
        sample={"prompt": "the ", "tokens": 5},
    )
    workshop.run(job, tmp_path / "quiet")
    workshop.run(job, tmp_path / "struck", watch=strike)

    state = status(tmp_path / "quiet")
    assert sorted(state.held_out) == [2, 4, 6]
    assert state.held_out[6] < state.held_out[2]
    assert state.notes["sample"].startswith("the ")
    assert state.plan.vocabulary == 270
    assert status(tmp_path / "struck").failures == 1
    workshop.assert_same(tmp_path / "quiet", tmp_path / "struck")
    assert status(tmp_path / "struck").notes["sample"] == state.notes["sample"]


@pytest.mark.parametrize("sharding", ["replicas", "fsdp"])
def test_token_files_in_bfloat16_come_back_exactly(workshop: Any, tmp_path: Path, sharding: str) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(3000) % 37)

    def strike(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 3 and state.incarnation == 1:
            workshop.kill(1, signal=signal.SIGKILL)

    job = workshop.job(
        {"pipeline": 2, "data": 2, "sharding": sharding},
        data={"tokens": str(tmp_path / "tokens.npy"), "sequence": 16},
        model={"layers": 3, "width": 16, "heads": 2, "dropout": 0.1, "tied": False},
        precision="bfloat16",
        steps=4,
    )
    workshop.run(job, tmp_path / "quiet")
    report = workshop.run(job, tmp_path / "struck", watch=strike)

    assert report.failures == 1
    assert status(tmp_path / "quiet").plan.vocabulary == 37
    assert workshop.losses(tmp_path / "quiet") == workshop.losses(tmp_path / "struck")
    first, second = (workshop.tensors(tmp_path / name, 4) for name in ("quiet", "struck"))
    assert all(first[name].equal(second[name]) for name in first)
    assert str(first["model.embedding.weight"].dtype) == "torch.bfloat16"


def test_an_interleaved_pipeline_learns_what_one_process_learns(workshop: Any, tmp_path: Path) -> None:
    degrees = {"pipeline": 2, "data": 1, "schedule": "interleaved", "interleave": 2}

    workshop.run(workshop.job(degrees), tmp_path / "run")

    workshop.assert_close(workshop.undisturbed("1"), tmp_path / "run")


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(workshop: Any, tmp_path: Path) -> None:
    job = workshop.job(
        {"data": 2}, optimizer={"name": "sgd", "learning_rate": 1e4, "warmup": 4, "clip": 0}, checkpoint={"every": 1}
    )

    with pytest.raises(RunError, match=r"step .* the loss is") as caught:
        workshop.run(job, tmp_path / "run")

    assert "learning_rate" in caught.value.hint
    state = status(tmp_path / "run")
    assert state.outcome == "failed"
    plain = json.loads((tmp_path / "run" / "report.json").read_text())
    assert plain["outcome"] == "failed"
    assert workshop.server.children == []
