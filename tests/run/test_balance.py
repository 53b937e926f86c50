"""A slow card is named, and its work moves to the others without the loss noticing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supernode.control.journal import read
from supernode.control.training import status
from supernode.schema.event import Replanned, Slowed

pytestmark = pytest.mark.slow

MODEL = {"layers": 6, "width": 64, "heads": 4}
"""Large enough that a pass is no matter of Python alone."""


def test_a_slow_stage_is_named_and_gives_layers_away(workshop: Any, tmp_path: Path) -> None:
    job = workshop.job({"pipeline": 2, "data": 1}, model=MODEL)
    workshop.run(job, tmp_path / "even")
    # A third rank's worth of noise cannot hide a factor of six.
    slow = {"rank": 0, "slowness": 6.0}
    workshop.run(job | {"drill": slow, "balance": {"every": 1, "slow": 2.0, "move": True}}, tmp_path / "slow")

    state = status(tmp_path / "slow")
    told = [event for _, event in read(tmp_path / "slow" / "journal.db") if isinstance(event, (Slowed, Replanned))]
    named = [event for event in told if isinstance(event, Slowed)]
    moved = [event for event in told if isinstance(event, Replanned)]
    assert 0 in named[0].ranks
    assert named[0].ranks[0] > 2
    assert moved
    layers = [stage.last - stage.first for stage in state.plan.stages]
    assert layers[0] < 3 < layers[1]
    assert sum(layers) == 6
    assert (state.outcome, state.step, state.failures) == ("finished", 6, 0)
    workshop.assert_close(tmp_path / "even", tmp_path / "slow")
    workshop.assert_tidy(tmp_path / "slow")


def test_a_slow_copy_takes_fewer_micro_batches(workshop: Any, tmp_path: Path) -> None:
    job = workshop.job({"data": 2}, model=MODEL)
    workshop.run(job, tmp_path / "even")
    slow = {"rank": 1, "slowness": 6.0}
    workshop.run(job | {"drill": slow, "balance": {"every": 1, "slow": 2.0, "move": True}}, tmp_path / "slow")

    state = status(tmp_path / "slow")
    assert sum(state.plan.shares) == 8
    assert state.plan.shares[0] > 4 > state.plan.shares[1] >= 1
    assert any(incident.what == "rank 1 is slow" for incident in state.incidents)
    assert (state.outcome, state.step, state.failures) == ("finished", 6, 0)
    workshop.assert_close(tmp_path / "even", tmp_path / "slow")
