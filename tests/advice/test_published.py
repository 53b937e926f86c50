"""Are published projects forecast as well as the documents say?"""

from __future__ import annotations

import statistics

import pytest

from supernode.advice.project import forecast
from supernode.advice.published import (
    Row,
    is_fitting,
    machine_of,
    pace_of,
    published_rows,
    published_seconds,
    question_of,
)
from supernode.advice.terms import FILE, Terms, whole_runs
from supernode.forecast.rates import card_of

ROWS = {row["model"]: row for row in published_rows()}
# Whose layout is published, which takes no search.
QUICK = [row for row in ROWS.values() if row["data"]]


def ours(row: Row, **terms: float) -> float:
    question, machine = question_of(row), machine_of(row)
    wanted = Terms(tokens=float(row["tokens"]), draws=200, **terms)  # type: ignore[arg-type]
    project = forecast(question, machine, wanted, pace=pace_of(row, question, machine))
    return project.ideal if row["kind"] == "ideal" else project.seconds.middle


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Pythia 12B", 11.8), ("GPT-NeoX-20B", 20.6), ("BLOOM 176B", 176.2), ("StarCoderBase 15.5B", 15.5),
     ("MPT-7B", 6.65), ("OPT-175B", 175), ("LLaMA 65B", 65.2), ("Llama 3.1 405B", 405.9)],
)  # fmt: skip
def test_the_shapes_have_the_published_parameters(name: str, billions: float) -> None:
    assert float(question_of(ROWS[name]).model.parameters) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("row", QUICK, ids=lambda row: row["model"])
def test_a_published_layout_takes_the_published_cards(row: Row) -> None:
    degrees = [int(row[name]) for name in ("tensor", "pipeline", "data")]

    assert degrees[0] * degrees[1] * degrees[2] == int(row["cards"])
    assert int(row["batch"]) % (degrees[2] * int(row["micro_batch"])) == 0
    assert card_of(machine_of(row)).wires.outside == pytest.approx(float(row["node_gbit"]) * 1e9 / 64)


def test_projects_with_a_published_layout_come_out_within_a_tenth_on_average() -> None:
    errors = [ours(row) / published_seconds(row) - 1 for row in QUICK]

    assert statistics.fmean(abs(error) for error in errors) < 0.12
    assert statistics.median(abs(error) for error in errors) < 0.06


def test_the_overhead_is_what_these_projects_show() -> None:
    known = whole_runs()
    whole = [row for row in QUICK if row["kind"] != "ideal"]
    ratios = [published_seconds(row) / ours(row, overhead=1.0) for row in whole]

    assert known.overhead == pytest.approx(statistics.median(ratios), rel=0.05)
    assert 0 < known.deviation < 0.15


@pytest.mark.slow
def test_the_overhead_is_the_median_of_the_rows_that_were_read_in_full() -> None:
    fitting = [row for row in ROWS.values() if is_fitting(row)]
    ratios = [published_seconds(row) / ours(row, overhead=1.0) for row in fitting]

    assert whole_runs().overhead == pytest.approx(statistics.median(ratios), rel=0.01)
    assert (whole_runs().fitted, whole_runs().known) == (len(fitting), len(ROWS))


def test_no_row_with_a_figure_from_memory_is_fitted_to_and_the_file_names_them() -> None:
    header = FILE.read_text(encoding="utf-8").split("overhead:")[0]
    said = " ".join(line.removeprefix("# ") for line in header.splitlines())
    fitted, memory = said.split("Not fitted to, as figures of theirs are from memory:")

    for name, row in ROWS.items():
        assert not (is_fitting(row) and "memory" in row["read"])
        assert (name in memory) == ("memory" in row["read"])
        assert is_fitting(row) <= (name in fitted)
