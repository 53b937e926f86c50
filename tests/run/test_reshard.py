"""What eight ranks saved goes on in any other layout, and what any other layout saved goes on in eight."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from supernode.control.training import status

pytestmark = pytest.mark.slow

WHOLE = {"tensor": 1, "pipeline": 1, "data": 1}
MANY = {"tensor": 2, "pipeline": 2, "data": 2}
OTHERS = {"t1p4d2": {"tensor": 1, "pipeline": 4, "data": 2}, "t4": WHOLE | {"tensor": 4}, "one process": WHOLE}
HALFWAY = 3
TOLERANCE = 1e-5
"""Float32 sums in another order; Adam's first steps divide by moments that are small, which widens it."""


@pytest.mark.parametrize("other", OTHERS)
def test_a_run_goes_on_in_another_layout_and_from_one_to_eight_ranks(workshop: Any, tmp_path: Path, other: str) -> None:
    saved = workshop.folder / "half on many"
    if not saved.exists():
        workshop.run(workshop.job(MANY, steps=HALFWAY), saved)
    there = Path(shutil.copytree(saved, tmp_path / "there"))
    back = tmp_path / "back"

    for folder, degrees in ((there, OTHERS[other]), (back, MANY)):
        if not folder.exists():
            workshop.run(workshop.job(OTHERS[other], steps=HALFWAY), folder)
        workshop.resume(
            folder, overrides={f"parallelism.{axis}": degree for axis, degree in degrees.items()} | {"steps": 6}
        )

    assert status(there).plan.ranks == {"t1p4d2": 8, "t4": 4, "one process": 1}[other]
    assert status(back).plan.ranks == 8
    for folder in (there, back):
        workshop.assert_close(workshop.undisturbed("1"), folder, tolerance=TOLERANCE)
        assert workshop.steps_taken(folder) == [1, 2, 3, 4, 5, 6]
