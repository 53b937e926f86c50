"""How far are predicted collectives from measured ones, on rows that no parameter has seen?

The rows lie in `validation/nccl_*.csv`, with their sources. A hash of what was run, never of how it went, puts 48% of
them in the fitting half; versions of the library that ran the same fall on one side. `fit_collectives.py` sees only the
fitting half. The yardstick is one bus bandwidth per system and collective, fitted to the same half.
"""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import harness
from supernode.collectives.collective_time import collective_seconds
from supernode.errors import SupernodeError

FOLDER = Path(__file__).parent / "validation"
FITTING_SHARE = 0.48
SCORED = (64 * 1024, 512 * 2**20)
"""Bytes from and to which rows count."""
ASTRA_SIM_PCT = 72.9
"""ASTRA-sim 2 on its own HGX-H100 validation set, all-reduce of 64 KB to 512 MB: mean absolute error in percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured collective.

    Attributes:
        library: version of NCCL; empty where the source does not say.
        node_cards: cards of the group in one node.
    """

    system: str
    library: str
    kind: str
    cards: int
    node_cards: int
    nbytes: int
    seconds: float

    @property
    def what(self) -> str:
        """What was run, on whatever version of the library."""
        return f"{self.system}/{self.kind}/{self.cards}/{self.nbytes}"

    @property
    def is_fitting(self) -> bool:
        """Whether parameters may be fitted to it, if the shipped tables hold it."""
        return int.from_bytes(hashlib.sha256(self.what.encode()).digest()[:4], "big") / 2**32 < FITTING_SHARE

    @property
    def is_scored(self) -> bool:
        """Whether its size counts."""
        return SCORED[0] <= self.nbytes <= SCORED[1]


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a table in one of the two formats of `validation/nccl_*.csv`."""
    with file.open(newline="", encoding="utf-8") as lines:
        return [_row(entry) for entry in csv.DictReader(line for line in lines if not line.startswith("#"))]


def _row(entry: dict[str, str]) -> Row:
    return Row(
        system=entry["system"],
        library=entry.get("nccl") or "",
        kind=entry["collective"],
        cards=int(entry["gpus"]),
        node_cards=int(entry.get("gpus_per_node") or entry["gpus"]),
        nbytes=int(entry["size_bytes"]),
        seconds=float(entry.get("latency_ms") or entry["median_ms"]) / 1000,
    )


def readable_rows(file: Path) -> tuple[list[Row], list[str]]:
    """Return the rows that can be read, and why the others cannot: a missing column, no number, a strange name."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        entries = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    rows, strange = [], []
    for line, entry in enumerate(entries, start=2):
        try:
            row = _row(entry)
            if not row.seconds > 0:
                raise ValueError(f"it took {row.seconds} s")
            predict([row])
            rows.append(row)
        except KeyError as error:
            strange.append(f"{file.name}, line {line}: no column {error}")
        except (SupernodeError, ValueError, TypeError) as error:
            strange.append(f"{file.name}, line {line}: {error}")
    return rows, strange


def predict(rows: Sequence[Row]) -> np.ndarray:
    """Return the model's seconds for each row."""
    return _by_group(rows, lambda row: (row.system, row.library, row.kind), _model)


def _model(rows: Sequence[Row]) -> np.ndarray:
    first = rows[0]
    return collective_seconds(
        first.kind,
        [row.nbytes for row in rows],
        [row.cards for row in rows],
        node_cards=[row.node_cards for row in rows],
        system=first.system,
        library=first.library,
    )


def null_model(rows: Sequence[Row], *, fitted_to: Sequence[Row]) -> np.ndarray:
    """Return seconds at one bus bandwidth per system and collective, the one of least mean error on other rows."""
    paces = {}
    for what in {(row.system, row.kind) for row in rows}:
        seen = [row for row in fitted_to if (row.system, row.kind) == what]
        if not seen:
            paces[what] = float("nan")
            continue
        pace = np.sort([row.seconds / _wire_bytes(row) for row in seen])
        # The mean of |pace × bytes ÷ seconds − 1| is least at the median weighted by bytes ÷ seconds.
        weight = np.cumsum(1 / pace)
        paces[what] = float(pace[np.searchsorted(weight, weight[-1] / 2)])
    return np.array([_wire_bytes(row) * paces[row.system, row.kind] for row in rows])


def _wire_bytes(row: Row) -> float:
    if row.kind == "send_recv":
        return float(row.nbytes)
    return row.nbytes * (row.cards - 1) / row.cards * (2 if row.kind == "all_reduce" else 1)


def _by_group(rows: Sequence[Row], key: Callable[[Row], Any], value: Callable[[Sequence[Row]], Any]) -> np.ndarray:
    places: dict[Any, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[key(row)].append(place)
    result = np.empty(len(rows))
    for chosen in places.values():
        result[chosen] = value([rows[place] for place in chosen])
    return result


def mean_error_pct(rows: Sequence[Row], predicted: Iterable[float]) -> float | None:
    """Return the mean absolute error in percent of the measured time; None without rows."""
    errors = [abs(guess / row.seconds - 1) for guess, row in zip(predicted, rows, strict=True)]
    known = [error for error in errors if not np.isnan(error)]
    return round(100 * float(np.mean(known)), 2) if known else None


def nccl_scores(table: str = "nccl_aiconfigurator", *, rows: Sequence[Row] | None = None) -> dict[str, Any]:
    """Return errors in percent on scored rows: fitted, unseen and null; over all, per kind, per system and kind.

    Args:
        table: the shipped table whose fitting half the parameters come from.
        rows: what to score instead of that table; a row is unseen unless the shipped fitting half holds it.
    """
    fitting = [row for row in read_rows(FOLDER / f"{table}.csv") if row.is_scored and row.is_fitting]
    chosen = [row for row in (rows or read_rows(FOLDER / f"{table}.csv")) if row.is_scored]
    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in chosen:
        groups[row.system][row.kind].append(row)
        kinds[row.kind].append(row)
    return {
        "all": _score(chosen, fitting),
        "kinds": {kind: _score(kinds[kind], fitting) for kind in sorted(kinds)},
        "systems": {
            system: {kind: _score(mine, fitting) for kind, mine in sorted(groups[system].items())}
            for system in sorted(groups)
        },
    }


def _score(rows: Sequence[Row], fitting: Sequence[Row]) -> dict[str, float | int | None]:
    known = {row.what for row in fitting}
    fitted, unseen = [row for row in rows if row.what in known], [row for row in rows if row.what not in known]
    return {
        "fitted_pct": mean_error_pct(fitted, predict(fitted)),
        "unseen_pct": mean_error_pct(unseen, predict(unseen)),
        "null_unseen_pct": mean_error_pct(unseen, null_model(unseen, fitted_to=fitting)),
        "unseen_90th_pct": _ninetieth_pct(unseen),
        "fitted_rows": len(fitted),
        "unseen_rows": len(unseen),
    }


def _ninetieth_pct(rows: Sequence[Row]) -> float | None:
    if not rows:
        return None
    errors = [abs(guess / row.seconds - 1) for guess, row in zip(predict(rows), rows, strict=True)]
    return round(100 * float(np.percentile(errors, 90)), 1)


# An H800 has 8 of an H100's 18 NVLinks: 400 of 900 GB/s (NVIDIA's data sheets).
EXPERT_SYSTEMS = {"V1 H800 normal": ("h100_sxm", 8 / 18), "V2 SM100": ("b200_sxm", 1.0)}
"""DeepEP's name: a measured system, and the share of its links."""


def expert_exchange() -> list[dict[str, Any]]:
    """Return published expert all-to-alls within a node beside the model's: bandwidth of a card towards others.

    DeepEP sends each token once to each card that holds one of its experts, by kernels of its own, not NCCL; its
    figures bound what a library may reach. Of 8 experts over 8 cards, 1 − (7/8)^8 of the cards are hit.
    """
    found = []
    with (FOLDER / "alltoall_ep.csv").open(newline="", encoding="utf-8") as lines:
        for entry in csv.DictReader(line for line in lines if not line.startswith("#")):
            if entry["version"] not in EXPERT_SYSTEMS or entry["link"] != "NVLink":
                continue
            system, links = EXPERT_SYSTEMS[entry["version"]]
            nbytes = int(entry["tokens_per_gpu"]) * int(entry["hidden"]) * 8 * (1 - (7 / 8) ** 8)
            seconds = float(collective_seconds("all_to_all", nbytes, 8, system=system))
            ours = links * nbytes / seconds / 1e9
            found.append(
                {
                    "case": f"{entry['version']} {entry['sms']}".strip(),
                    "published_dispatch_GBps": float(entry["dispatch_GBps"]),
                    "model_GBps": round(ours, 1),
                }
            )
    return found


def show(scores: dict[str, Any]) -> None:
    """Tell a person the table."""
    harness.say(f"{'':34} {'fitted':>8} {'unseen':>8} {'null':>8}   rows")
    lines = [("all", scores["all"]), *scores["kinds"].items()]
    lines += [(f"{system} {kind}", each) for system, kinds in scores["systems"].items() for kind, each in kinds.items()]
    for name, each in lines:
        cells = (f"{each[key]:7.1f}%" if each[key] is not None else f"{'–':>8}" for key in PRINTED)
        harness.say(f"{name:34} {' '.join(cells)}   {each['fitted_rows']} + {each['unseen_rows']}")


def above_10_pct(scores: dict[str, Any]) -> list[str]:
    """Return the systems and kinds whose unseen rows are further off than the promise."""
    return [
        f"{system} {kind}"
        for system, kinds in scores["systems"].items()
        for kind, each in kinds.items()
        if (each["unseen_pct"] or 0) > 10
    ]


PRINTED = ("fitted_pct", "unseen_pct", "null_unseen_pct")


def main() -> None:
    """Score and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--table", type=Path, help="score the rows of this CSV file, too; columns as in validation/")
    flags = parser.parse_args()
    scores, vidur = nccl_scores(), nccl_scores("nccl_vidur")
    show(scores)
    harness.say("with the launch, partly across nodes:")
    show(vidur)
    rows, strange = readable_rows(flags.table) if flags.table else ([], [])
    more = nccl_scores(rows=rows) if rows else None
    if more:
        harness.say(f"{flags.table}:")
        show(more)
    result = {
        "nccl_unseen_pct": max(each["unseen_pct"] for each in scores["kinds"].values()),
        "nccl_unseen_mean_pct": scores["all"]["unseen_pct"],
        "nccl_fitted_mean_pct": scores["all"]["fitted_pct"],
        "nccl_null_mean_pct": scores["all"]["null_unseen_pct"],
        "null_all_reduce_pct": scores["kinds"]["all_reduce"]["null_unseen_pct"],
        "astra_sim_all_reduce_pct": ASTRA_SIM_PCT,
        "above_10_pct": above_10_pct(scores),
        "scores": scores,
        "launch_included_and_across_nodes": vidur,
        "table": more,
        "rows_not_read": strange,
        "expert_exchange": expert_exchange(),
        "machine": harness.machine("numpy"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
