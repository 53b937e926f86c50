"""How far is the forecast from published measurements? Fitted and unseen rows apart, beside two yardsticks.

Nothing is measured here: the rows in src/supernode/validation/tables are. `--tables DIR` scores other rows of the same
tables, all of them unseen unless the shipped tables hold them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
from nccl_accuracy import nccl_scores
from supernode.validation.cases import readable_cases
from supernode.validation.memory import score_memory
from supernode.validation.score import TableScore, score_tables
from supernode.validation.tables import FOLDER


def row(score: TableScore) -> str:
    """Return a table's score as a line for people."""
    cells = [score.fitted, score.unseen, score.null_unseen, score.band]
    shown = "".join(f"{'–' if cell is None else f'{cell:.1f}%':>10}" for cell in cells)
    calculon = "–" if score.calculon is None else " to ".join(f"{cell:g}%" for cell in dict.fromkeys(score.calculon))
    return f"{score.table:16}{score.fitted_rows:6}{score.unseen_rows:8}{shown}{calculon:>15}"


def main() -> None:
    """Score all tables and the memory model."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tables", type=Path, default=FOLDER, help="folder with tables in place of the shipped ones")
    flags = parser.parse_args()
    cases, strange = readable_cases(flags.tables)
    scores = score_tables(cases)
    memory = score_memory()
    nccl = nccl_scores()
    result: dict[str, Any] = {f"{name}_unseen_pct": score.unseen for name, score in scores.items()}
    if "korthikanti" in scores:
        result["korthikanti_pct"] = scores["korthikanti"].all_rows
    result |= {
        "memory_weights_pct": memory.state,
        "memory_activations_pct": memory.activations,
        "nccl_unseen_pct": max(kind["unseen_pct"] for kind in nccl["kinds"].values()),
        "nccl": nccl["kinds"],
        "rows_not_read": strange,
        "tables": {name: asdict(score) for name, score in scores.items()},
        "error": "mean absolute error of step time; band: four of five unseen rows are within it",
        "machine": harness.machine("numpy"),
    }
    harness.say("table           fitted  unseen    fitted    unseen      null      band       Calculon")
    for score in scores.values():
        harness.say(row(score))
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
