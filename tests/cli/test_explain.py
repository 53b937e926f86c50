"""`plan --explain` says where the step's time goes, of a plan and of what a search found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supernode.cli.main import app

JOB = """
model: gpt3-13b
batch: 64
gradient_accumulation: 8
precision: bfloat16
parallelism: {tensor: 2, pipeline: 2, data: 2, sharding: fsdp}
"""


def told(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words, "--cards", "8", "--card", "H100", "--explain"])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_plan_is_explained_part_by_part(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)

    words, plain = told(str(file)), json.loads(told(str(file), "--json"))

    assert "where the step's time goes" in words
    assert "all products at the card's peak" in words
    assert sum(plain["waterfall"].values()) == pytest.approx(
        sum(value for name, value in plain["step"].items() if name != "total")
    )


def test_the_best_of_a_search_is_explained(tmp_path: Path) -> None:
    plain = json.loads(told("--model", "llama3-8b", "--batch", "32", "--sequence", "4096", "--json"))

    assert plain["waterfall"]["arithmetic"] > 0
    assert plain["waterfall"]["offload"] >= 0
