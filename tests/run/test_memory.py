"""A rank whose memory is at its end says so, and names a key that helps."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from one_step import plan_of
from supernode.schema.model import DecoderShape
from supernode.training.telling import out_of_memory

SEQUENCE = 7168
LIMIT = 512 * 2**20
"""Bytes of data a process may have; torch takes 250 MiB of it, and this model's activations 40 KiB a token."""


def bound() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


def run(tmp_path: Path, *, context: int) -> subprocess.CompletedProcess[str]:
    job = {
        "model": {"layers": 4, "width": 128, "heads": 4, "vocabulary": 32}, "batch": 1, "steps": 1, "threads": 1,
        "data": {"tokens": str(tmp_path / "tokens.npy"), "sequence": SEQUENCE, "held_out": 0.0},
        "parallelism": {"data": 1, "context": context},
    }  # fmt: skip
    np.save(tmp_path / "tokens.npy", np.arange(2 * SEQUENCE + 2, dtype=np.uint16) % 32)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return subprocess.run(
        [sys.executable, "-m", "supernode", "run", str(tmp_path / "job.yaml"), "--folder", str(tmp_path / str(context)),
         "--cards", str(context)],
        capture_output=True, text=True, check=False, timeout=200,
        # Freed blocks go back to the kernel, and stacks are small: else it would count what is not in use.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}, preexec_fn=bound,
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_hold_a_sequence_that_one_refuses_for_want_of_memory(tmp_path: Path) -> None:
    alone, shared = run(tmp_path, context=1), run(tmp_path, context=2)

    assert alone.returncode == 2
    assert f"rank 0 has no memory left for a micro-batch of 1 × {SEQUENCE} tokens" in alone.stderr
    assert "set `parallelism.recompute` to full" in alone.stderr
    assert "Traceback" not in alone.stderr
    assert shared.returncode == 0, shared.stderr


def test_the_remedy_that_costs_least_speed_is_named_first() -> None:
    shape = DecoderShape(layers=2, width=16, heads=2, vocabulary=11)
    says = []
    for degrees, micro_batches in (({}, 4), ({}, 8), ({"context": 2, "recompute": "full"}, 8)):
        plan = plan_of(shape, dict(degrees), batch=8, micro_batches=micro_batches)
        says.append(out_of_memory(plan, 1, "can't allocate memory: you tried to allocate 8388608 bytes"))

    assert says[0]["message"] == (
        "rank 1 has no memory left for a micro-batch of 2 × 8 tokens, when it asked for 8 MiB more"
    )
    assert [text["hint"].partition(",")[0] for text in says] == [
        "set `gradient_accumulation` to 8", "set `parallelism.recompute` to full", "set `parallelism.context` to 4",
    ]  # fmt: skip
    assert "1 × 4 tokens" in says[2]["message"]
