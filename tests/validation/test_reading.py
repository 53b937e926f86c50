"""Rows that cannot be read are named, never a crash; another split halves the rows anew."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from supernode.validation.cases import readable_cases
from supernode.validation.recipes import recipe_of
from supernode.validation.tables import FOLDER, read, rows_of


def spoiled(folder: Path, table: str, **cells: str | None) -> Path:
    """Write a table whose first row has other cells, None for a column left out, and whose second stays as it is."""
    rows = rows_of(FOLDER / f"{table}.csv")[:2]
    for name, cell in cells.items():
        rows[0][name] = cell or ""
    names = [name for name in (*rows[0], *cells) if cells.get(name, "") is not None]
    with (folder / f"{table}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(names)), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_all_rows_of_the_project_are_read_but_one_whose_degrees_make_fewer_cards() -> None:
    _, strange = readable_cases(FOLDER)

    # Llama 3 8B on 1,024 B200: tensor 4 × context 16 × data 4 are 256 cards.
    assert [reason.partition(":")[0] for reason in strange] == ["nemo_long_sequence_cp.csv, line 8"]
    assert "micro-batches on each copy" in strange[0]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"model": "Nobody_7B"}, "unknown model"),
        ({"system": "DGX-Z900"}, "Z900"),
        ({"tokens_per_s_per_gpu": "n/a"}, "could not convert"),
        ({"tokens_per_s_per_gpu": "0"}, "division"),
        ({"gpus": ""}, "could not convert"),
    ],
)
def test_a_strange_row_is_named_with_its_line_and_the_next_one_read(
    tmp_path: Path, cells: dict[str, str], reason: str
) -> None:
    cases, strange = readable_cases(spoiled(tmp_path, "nemo_megatron_bridge_performance", **cells))

    assert len(cases) == 1
    assert len(strange) == 1
    assert "nemo_megatron_bridge_performance.csv, line 2" in strange[0]
    assert reason in strange[0]


def test_a_column_left_out_is_named(tmp_path: Path) -> None:
    cases, strange = readable_cases(spoiled(tmp_path, "mt_nlg_530b", iter_time_s=None))

    assert not cases
    assert all("iter_time_s" in reason for reason in strange)


def test_a_new_column_changes_nothing(tmp_path: Path) -> None:
    cases, strange = readable_cases(spoiled(tmp_path, "mt_nlg_530b", remark="new"))

    assert len(cases) == 2
    assert not strange


def test_another_salt_makes_another_half_of_the_same_rows() -> None:
    plain, salted = read("mosaicml_fsdp_benchmarks"), read("mosaicml_fsdp_benchmarks", salt="1")
    halves = [[row.pop("fitting") for row in rows] for rows in (plain, salted)]

    assert plain == salted
    assert halves[0] != halves[1]
    assert halves[1].count("1") <= len(salted) / 2


def test_a_row_gets_the_recipe_of_its_release_and_degrees() -> None:
    rows = read("nemo_megatron_bridge_performance")
    row = next(
        r for r in rows
        if r["release"].startswith("26.06 ") and r["model"] == "Qwen3_235B_a22B" and r["system"] == "DGX-GB200"
    )  # fmt: skip

    recipe = recipe_of(row, model="qwen3-235b-a22b", card="GB200", precision="mxfp8")

    # scripts/performance/configs/qwen/qwen3_workload_base_configs.py at v0.5.0.
    assert recipe is not None
    assert (recipe["tag"], recipe["dispatcher"], recipe["graphs"]) == ("v0.5.0", "hybridep", "full_iteration")
    assert (recipe["fused_experts"], recipe["overlap"]) == ("1", "1")


def test_a_model_without_recipes_gets_none() -> None:
    row = {"release": "26.08 NeMo Container", "task": "Pre-Training Performance"}

    assert recipe_of(row, model="nemotron-3.5-lightning", card="GB200", precision="mxfp8") is None
