"""The split of the published rows: deterministic, at most half, and blind to what was measured."""

from __future__ import annotations

import pytest

from supernode.validation.split import fitting_keys
from supernode.validation.tables import IDENTITY, read

MEASURED = ("time", "tflops", "tokens_per_s", "mfu", "hfu", "pct", "days", "pflops", "mem", "GiB")


@pytest.mark.parametrize("table", IDENTITY)
def test_at_most_half_of_a_table_is_fitted_to(table: str) -> None:
    rows = read(table)
    fitting = sum(row["fitting"] == "1" for row in rows)

    assert 0 < fitting <= len(rows) / 2


@pytest.mark.parametrize("table", IDENTITY)
def test_the_split_does_not_look_at_measurements(table: str) -> None:
    assert not [column for column in IDENTITY[table] if any(word in column for word in MEASURED)]


def test_order_does_not_matter() -> None:
    keys = [(str(n),) for n in range(100)]

    assert fitting_keys("t", keys) == fitting_keys("t", keys[::-1])


def test_rows_that_repeat_a_configuration_fall_on_one_side() -> None:
    chosen = fitting_keys("t", [("a",)] * 3 + [("b",)] * 2 + [("c",)])

    assert chosen in ({("a",)}, {("b",), ("c",)}, {("b",)}, {("c",)})
