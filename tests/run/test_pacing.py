"""A job that does not say how often it is saved is saved as what saves cost makes best, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from supernode.control.journal import read
from supernode.schema.event import Saved


def test_the_ranks_save_together_when_the_first_one_says_so(workshop: Any, tmp_path: Path) -> None:
    job = workshop.job(
        "t2", steps=36, checkpoint={"every": 0, "keep": 100}, recovery={"between_failures": 1}
    )  # fmt: skip

    run = workshop.run(job, tmp_path / "run")

    assert run.outcome == "finished"
    saved = [event.step for _, event in read(tmp_path / "run" / "journal.db") if isinstance(event, Saved)]
    assert saved[0] == 10  # Before that nothing is known of what one costs.
    assert saved[-1] == 36
    # At most half a second of stalling would make one of failures a second apart come more than 1 s after the other.
    assert len(saved) >= 3
    assert saved == sorted(saved)
