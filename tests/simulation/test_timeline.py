"""Drawing and trace say what the spans say."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from supernode.simulation.step import simulate_pipeline
from supernode.simulation.timeline import chrome_trace, nice_ticks, timeline_svg

STEP = simulate_pipeline([1.0] * 2, [2.0] * 2, schedule="1f1b", pipeline=2, micro_batches=4, transfer=0.1)
SVG = "{http://www.w3.org/2000/svg}"


def test_the_drawing_has_a_box_for_each_span_and_one_for_each_kind() -> None:
    root = ElementTree.fromstring(timeline_svg(STEP.spans))

    assert len(root.findall(f"{SVG}rect")) == len(STEP.spans) + 3
    assert root.find(f"{SVG}title") is not None
    assert root.find(f"{SVG}desc") is not None


def test_labels_tell_forward_from_backward_without_colour() -> None:
    words = [text.text for text in ElementTree.fromstring(timeline_svg(STEP.spans)).iter(f"{SVG}text")]

    assert {"F0", "B0", "F3", "B3", "rank 0", "rank 1"} <= set(words)


def test_nothing_simulated_is_drawn_as_an_empty_row() -> None:
    assert ElementTree.fromstring(timeline_svg([])).tag == f"{SVG}svg"


def test_the_trace_is_in_microseconds_and_plain_json() -> None:
    trace = json.loads(json.dumps(chrome_trace(STEP.spans)))

    boxes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(boxes) == len(STEP.spans)
    assert max(box["ts"] + box["dur"] for box in boxes) == pytest.approx(STEP.total * 1e6)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"rank 0", "rank 0 sends to 1", "rank 1", "rank 1 sends to 0"}


@pytest.mark.parametrize("top", [1e-9, 0.3, 0.99, 1.0, 7.0, 12_345.0])
def test_ticks_are_few_round_and_within(top: float) -> None:
    ticks = nice_ticks(top)

    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] <= top * (1 + 1e-9)


@pytest.mark.parametrize("top", [0.0, -1.0, float("nan"), float("inf")])
def test_no_span_has_one_tick(top: float) -> None:
    assert nice_ticks(top) == [0.0]
