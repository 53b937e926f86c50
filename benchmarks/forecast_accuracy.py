"""How far is the forecast from published measurements? Fitted and unseen rows apart, beside two yardsticks.

Nothing is measured here: the rows in src/supernode/validation/tables are. `--tables DIR` scores other rows of the same
tables, all of them unseen unless the shipped tables hold them. `--splits N` draws N other halves, fits to each anew and
says how far each table is off then: what another choice of rows would have shown.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
from fit_efficiency import fit
from nccl_accuracy import above_10_pct, nccl_scores, readable_rows, show
from supernode.errors import SupernodeError
from supernode.validation.cases import load_cases, readable_cases
from supernode.validation.memory import MemoryScore, score_memory
from supernode.validation.score import TableScore, score_tables
from supernode.validation.tables import FOLDER

NCCL_TABLES = ("nccl_measured_aiconfigurator.csv", "nccl_aiconfigurator.csv")
"""Names under which a folder may hold rows of collectives."""
YARDSTICKS = ("sc21", "mt_nlg", "h100_weak")
"""Tables to be forecast better than both yardsticks, or within 4%."""


def row(score: TableScore) -> str:
    """Return a table's score as a line for people."""
    cells = [score.fitted, score.unseen, score.null_unseen, score.band]
    shown = "".join(f"{'–' if cell is None else f'{cell:.1f}%':>10}" for cell in cells)
    calculon = "–" if score.calculon is None else " to ".join(f"{cell:g}%" for cell in dict.fromkeys(score.calculon))
    return f"{score.table:16}{score.fitted_rows:6}{score.unseen_rows:8}{shown}{calculon:>15}"


def is_better(score: TableScore) -> bool:
    """Return whether unseen rows are nearer than both yardsticks say, or within 4%."""
    if score.unseen is None:
        return True
    yardsticks = [score.null_unseen, *(score.calculon or ())]
    return score.unseen < 4 or all(yardstick is None or score.unseen < yardstick for yardstick in yardsticks)


def over_splits(splits: int) -> dict[str, list[float]]:
    """Return each table's unseen error in percent under other splits, each fitted to its own half."""
    found: dict[str, list[float]] = defaultdict(list)
    for salt in range(1, splits + 1):
        cases = load_cases(salt=str(salt))
        for name, score in score_tables(cases, fit(cases)).items():
            if score.unseen is not None:
                found[name].append(score.unseen)
        harness.say(f"split {salt}: " + ", ".join(f"{name} {errors[-1]:.1f}%" for name, errors in found.items()))
    return dict(found)


def main() -> None:
    """Score all tables and the memory model."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tables", type=Path, default=FOLDER, help="folder with tables in place of the shipped ones")
    parser.add_argument("--splits", type=int, default=0, help="fit to so many other halves, too; seconds each")
    flags = parser.parse_args()
    cases, strange = readable_cases(flags.tables)
    scores = score_tables(cases)
    memory = _memory(flags.tables, strange)
    nccl = _nccl(flags.tables, strange)
    splits = over_splits(flags.splits)
    result: dict[str, Any] = {f"{name}_unseen_pct": score.unseen for name, score in scores.items()}
    if "korthikanti" in scores:
        result["korthikanti_pct"] = scores["korthikanti"].all_rows
    result |= {
        "memory_weights_pct": memory.state,
        "memory_activations_pct": memory.activations,
        "nccl_unseen_pct": max(kind["unseen_pct"] or 0 for kind in nccl["kinds"].values()),
        "nccl_above_10_pct": above_10_pct(nccl),
        "below_yardsticks": {name: is_better(scores[name]) for name in YARDSTICKS if name in scores},
        "worst_over_splits_pct": {name: max(errors) for name, errors in splits.items()},
        "splits": splits,
        "nccl": nccl["kinds"],
        "nccl_systems": nccl["systems"],
        "rows_not_read": strange,
        "tables": {name: asdict(score) for name, score in scores.items()},
        "error": "mean absolute error of step time; band: four of five unseen rows are within it",
        "machine": harness.machine("numpy", "scipy"),
    }
    harness.say("table           fitted  unseen    fitted    unseen      null      band       Calculon")
    for score in scores.values():
        harness.say(row(score))
    show(nccl)
    for reason in strange:
        harness.say(f"not read: {reason}")
    harness.finish(result, flags)


def _memory(folder: Path, strange: list[str]) -> MemoryScore:
    try:
        return score_memory(folder)
    except (SupernodeError, KeyError, ValueError, TypeError) as error:
        strange.append(f"memory of {folder}: {error}; the shipped rows are scored.")
        return score_memory()


def _nccl(folder: Path, strange: list[str]) -> dict[str, Any]:
    file = next((folder / name for name in NCCL_TABLES if (folder / name).exists()), None)
    rows, unread = readable_rows(file) if file else ([], [])
    strange += unread
    return nccl_scores(rows=rows or None)


if __name__ == "__main__":
    main()
