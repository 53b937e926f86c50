from __future__ import annotations

from pathlib import Path

import pytest

from supernode.intake.jobfile import load_job
from supernode.schema.spread import Parallelism

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_is_a_job(file: Path) -> None:
    job = load_job(file)

    cut = job.gradient_accumulation * max(1, job.parallelism.data)
    assert job.batch % cut == 0


def test_the_example_of_the_specification_asks_for_512_cards() -> None:
    job = load_job(Path(__file__).parents[2] / "examples" / "s6.yaml")

    assert job.parallelism == Parallelism(tensor=8, pipeline=4, data=16)
    assert job.gradient_accumulation == 8
