"""Where do the published rows lie, and which columns of them say what was run?"""

from __future__ import annotations

import csv
from pathlib import Path

from supernode.errors import SpecError
from supernode.validation.split import Key, fitting_keys

FOLDER = Path(__file__).parent / "tables"

IDENTITY: dict[str, tuple[str, ...]] = {
    "vtrain_measured_multi": (
        "# GPUs", "global batch", "micro batch", "hidden size", "# layers", "tensor parallelism",
        "data parallelism", "pipeline parallelism",
    ),
    "vtrain_measured_single": (
        "# GPUs", "global batch", "micro batch", "hidden size", "# layers", "tensor parallelism",
        "data parallelism", "pipeline parallelism",
    ),
    "nemo_megatron_bridge_performance": (
        "task", "model", "system", "gpus", "precision", "global_batch", "micro_batch", "seq", "tp", "pp", "cp", "vp",
        "ep",
    ),
    "nemo_long_sequence_cp": ("model", "gpu", "seq_k", "gpus"),
    "megatron_examples_llama_fp8": ("model", "gpus", "gpu"),
    "mosaicml_fsdp_benchmarks": (
        "section", "model", "seq", "gpus", "gpu", "micro_batch", "grad_accum", "precision", "sharding", "act_ckpt",
    ),
    "torchtitan_benchmarks": (
        "model", "gpu", "gpus", "parallel", "local_batch", "seq", "activation_ckpt", "technique", "precision",
    ),
    "megatron_sc21_table1": ("hidden", "layers", "tp", "pp", "gpus"),
    "megatron_sc21_table2_zero3_vs_ptd": ("scheme", "params_B", "gpus"),
    "megatron_h100_weak_scaling": ("hidden", "layers", "tp", "pp", "gpus"),
    "korthikanti_table5_iteration_time": ("model",),
    "korthikanti_fig1_fig7_memory": ("model",),
    "mt_nlg_530b": ("gpus",),
}  # fmt: skip

Row = dict[str, str]


def read(table: str, folder: Path = FOLDER, *, salt: str = "") -> list[Row]:
    """Return the rows of a table, each with the column `fitting` (1 or 0) added.

    The split is the shipped table's: of another folder, only rows that are in the shipped one can be fitting rows.

    Args:
        salt: of another split than the project's own.

    Raises:
        SpecError: there is no such table.
    """
    if table not in IDENTITY or not (folder / f"{table}.csv").exists():
        raise SpecError(f"no table {table!r} in {folder}", hint=f"the tables are {', '.join(IDENTITY)}.")
    fitting = fitting_keys(table, (_key(table, row) for row in rows_of(FOLDER / f"{table}.csv")), salt=salt)
    rows = rows_of(folder / f"{table}.csv")
    return [row | {"fitting": str(int(_key(table, row) in fitting))} for row in rows]


def _key(table: str, row: Row) -> Key:
    return tuple((row.get(column) or "").strip() for column in IDENTITY[table])


def rows_of(file: Path) -> list[Row]:
    """Return the rows of a file as they stand."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        return list(csv.DictReader(lines))
