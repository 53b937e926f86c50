"""Gradients meet by the way that was chosen, and go on meeting by it after a failure."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from supernode.control.training import status
from supernode.schema.event import Event, StepDone
from supernode.schema.report import RunState

pytestmark = pytest.mark.slow


def test_a_hosts_memory_sums_as_the_ring_does_and_a_relaunch_takes_it_again(workshop: Any, tmp_path: Path) -> None:
    def strike(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 3 and state.incarnation == 1:
            workshop.kill(1, signal=signal.SIGKILL)

    job = workshop.job({"pipeline": 2, "data": 2})
    ways = {"algorithm": "hierarchical", "bucket": 16_384}
    workshop.run(job, tmp_path / "ring")
    workshop.run(job | {"communication": ways}, tmp_path / "memory")
    workshop.run(job | {"communication": ways}, tmp_path / "struck", watch=strike)

    workshop.assert_close(tmp_path / "ring", tmp_path / "memory")
    workshop.assert_same(tmp_path / "memory", tmp_path / "struck")
    state = status(tmp_path / "struck")
    assert state.failures == 1
    told = state.notes["ways"]["copies"]
    assert tuple(told["hosts"]) == (2,)
    assert set(told["taken"]) == {"hierarchical"}
    workshop.assert_tidy(tmp_path / "struck")
