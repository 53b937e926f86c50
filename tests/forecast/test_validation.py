"""The forecast against every published row that the project holds, with the tolerances that are promised."""

from __future__ import annotations

from functools import cache

import pytest

from supernode.validation.memory import score_memory
from supernode.validation.score import TableScore, score_tables


@cache
def scores() -> dict[str, TableScore]:
    return score_tables()


# Per cent of step time, mean absolute error on rows that no parameter was fitted to. The promise where there is one,
# else what is reached today, rounded up, so that a change which makes it worse is noticed.
PROMISED = {
    "vtrain_multi": 10, "vtrain_single": 20, "bridge": 15, "mosaicml": 10, "torchtitan": 10, "sc21": 4,
    "long_sequence": 10, "llama_examples": 10, "sc21_zero3": 15, "h100_weak": 4.5, "mt_nlg": 4,
}  # fmt: skip


@pytest.mark.parametrize("table", PROMISED)
def test_unseen_rows_are_forecast_as_promised(table: str) -> None:
    score = scores()[table]

    assert score.unseen is not None
    assert score.unseen <= PROMISED[table]


def test_korthikanti_is_forecast_better_than_by_calculon() -> None:
    # Calculon's own validation: 3.65% over the same eight times.
    assert scores()["korthikanti"].all_rows <= 3.65


@pytest.mark.parametrize("table", [name for name in PROMISED if name != "llama_examples"])
def test_the_forecast_beats_a_single_rate(table: str) -> None:
    score = scores()[table]

    assert score.unseen is not None
    assert score.null_unseen is not None
    assert score.unseen < score.null_unseen


def test_megatron_turing_is_forecast_by_what_zero3_taught() -> None:
    # Nothing is fitted to its rows: what DeepSpeed did is read in its sources, and the rate of its data axis inferred
    # from ZeRO-3. Without the latter the three rows are 9 to 13% too fast, alike in seconds: some 5 of each step.
    score = scores()["mt_nlg"]

    assert score.unseen is not None
    assert score.null_unseen is not None
    assert score.unseen < min(score.null_unseen, 29.7)


def test_no_table_is_fitted_to_more_than_half() -> None:
    for score in scores().values():
        if score.table in ("sc21", "sc21_zero3"):
            continue  # two published tables, halved each, are split by scheme afterwards
        assert score.fitted_rows <= score.unseen_rows


def test_memory_agrees_with_the_published_figures() -> None:
    found = score_memory()

    # Calculon's errors on the same figures.
    assert found.state <= 8.5
    assert found.activations <= 2.1
