"""A simulation leaves pictures and a trace that agree with it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from supernode.control.supernode import SuperNode


def test_a_simulation_writes_timeline_trace_and_waterfall(tmp_path: Path) -> None:
    node = SuperNode(card_count=8, card="H100")
    job = {
        "model": "gpt3-13b", "batch": 64, "gradient_accumulation": 8, "precision": "bfloat16", "steps": 3,
        "parallelism": {"tensor": 2, "pipeline": 2, "data": 2, "sharding": "fsdp"},
    }  # fmt: skip
    result = node.simulate(job)

    files = result.write(tmp_path)

    assert [file.name for file in files] == ["timeline.svg", "trace.json", "waterfall.svg"]
    boxes = [event for event in json.loads(files[1].read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(box["ts"] + box["dur"] for box in boxes) == pytest.approx(result.timeline.total * 1e6, abs=0.01)
    assert {ElementTree.parse(file).getroot().tag for file in (files[0], files[2])} == {
        "{http://www.w3.org/2000/svg}svg"
    }
    assert result.plan.step is not None
    assert sum(bar.seconds for bar in result.bars) == pytest.approx(result.plan.step.total)
