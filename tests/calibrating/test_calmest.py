"""Which of several tries of the benchmark of calibration counts."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from supernode.hardware.calibration import Sample

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_calm_tries_count_by_their_median_and_disturbed_ones_only_where_none_was_calm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    one = Sample(kind="copy", ranks=1, what={}, seconds=1.0, others=0.0)
    rounds = [
        [replace(one, seconds=seconds, others=others), replace(one, seconds=10 * seconds, others=0.5 + others)]
        for seconds, others in ((1.0, 0.4), (3.0, 0.0), (2.0, 0.01), (4.0, 0.02))
    ]

    calm, disturbed = importlib.import_module("calibrated").calmest(rounds)

    assert calm.seconds == 3.0
    assert disturbed.seconds == 30.0  # the one that others took least of
