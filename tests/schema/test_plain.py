"""What `codec` writes, `plain` reads back, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from supernode.hardware.discover import discover
from supernode.planning.planner import make_plan
from supernode.schema import plain
from supernode.schema.codec import to_json
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.manifest import Manifest
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism

MANIFEST = Manifest(
    step=3, samples=24, seed=0, model="m", data="d", layout="l", optimizer="adamw", files={"a": (3, "00")}
)


@pytest.mark.parametrize("model", ["tiny", DecoderShape(layers=4, width=32, heads=2)])
def test_a_plan_comes_back_as_it_was(model: str | DecoderShape) -> None:
    job = JobSpec(
        model=model,
        data=DataSpec(text=("a", "b")),
        parallelism=Parallelism(tensor=2, pipeline=2),
        gradient_accumulation=2,
    )
    plan = make_plan(job, discover(cards=4, measure=False))

    assert plain.read(Plan, to_json(plan)) == plan
    assert plain.read(Plan, to_json(replace(plan, memory=None, step=None))).memory is None


def test_a_manifest_comes_back_as_it_was() -> None:
    assert plain.read(Manifest, to_json(MANIFEST)) == MANIFEST


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": "3"}, "Manifest.step"),
        ({"step": True}, "Manifest.step"),
        ({"files": []}, "Manifest.files"),
        ({"files": {"a": [1]}}, "Manifest.files.a"),
        ({"files": {"a": ["1", "x"]}}, "Manifest.files.a"),
        ({"more": 1}, "Manifest.more"),
    ],
)
def test_what_is_of_another_kind_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    record = json.loads(to_json(MANIFEST)) | change

    with pytest.raises(ValueError, match=named):
        plain.read(Manifest, json.dumps(record))


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"step": 1}', "\x00"])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        plain.read(Manifest, text)
