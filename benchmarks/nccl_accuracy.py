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
from supernode.hardware.collective_time import collective_seconds
from supernode.hardware.transport import by_system

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
    def is_fitting(self) -> bool:
        """Whether parameters may be fitted to it."""
        what = f"{self.system}/{self.kind}/{self.cards}/{self.nbytes}"
        return int.from_bytes(hashlib.sha256(what.encode()).digest()[:4], "big") / 2**32 < FITTING_SHARE

    @property
    def is_scored(self) -> bool:
        """Whether its size counts."""
        return SCORED[0] <= self.nbytes <= SCORED[1]


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a table in one of the two formats of `validation/nccl_*.csv`."""
    with file.open(newline="", encoding="utf-8") as lines:
        entries = csv.DictReader(line for line in lines if not line.startswith("#"))
        return [
            Row(
                system=entry["system"],
                library=entry.get("nccl") or "",
                kind=entry["collective"],
                cards=int(entry["gpus"]),
                node_cards=int(entry.get("gpus_per_node") or entry["gpus"]),
                nbytes=int(entry["size_bytes"]),
                seconds=float(entry.get("latency_ms") or entry["median_ms"]) / 1000,
            )
            for entry in entries
        ]


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
    """Return seconds at the one bus bandwidth per system and collective that is least wrong in the middle."""
    seen: dict[Any, list[float]] = defaultdict(list)
    for row in fitted_to:
        seen[row.system, row.kind].append(row.seconds / _wire_bytes(row))
    return np.array([_wire_bytes(row) * float(np.median(seen[row.system, row.kind])) for row in rows])


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
    return round(100 * float(np.mean(errors)), 2) if errors else None


def nccl_scores(file: Path = FOLDER / "nccl_aiconfigurator.csv") -> dict[str, Any]:
    """Return errors in percent on scored rows: fitted, unseen and null; over all, per kind, per system and kind.

    Args:
        file: a table; rows of another one than the shipped count as unseen where the shipped split says so.
    """
    rows = [row for row in read_rows(file) if row.is_scored]
    shipped = [row for row in read_rows(FOLDER / file.name) if row.is_scored] if _is_shipped(file) else rows
    fitting = [row for row in shipped if row.is_fitting]
    kinds, systems = sorted({row.kind for row in rows}), sorted({row.system for row in rows})
    score = lambda chosen: _score(chosen, fitting)  # noqa: E731
    return {
        "all": score(rows),
        "kinds": {kind: score([row for row in rows if row.kind == kind]) for kind in kinds},
        "systems": {
            system: {
                kind: score(chosen)
                for kind in kinds
                if (chosen := [row for row in rows if row.system == system and row.kind == kind])
            }
            for system in systems
        },
    }


def _is_shipped(file: Path) -> bool:
    return (FOLDER / file.name).exists()


def _score(rows: Sequence[Row], fitting: Sequence[Row]) -> dict[str, float | int | None]:
    fitted, unseen = [row for row in rows if row.is_fitting], [row for row in rows if not row.is_fitting]
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


def expert_exchange() -> list[dict[str, Any]]:
    """Return published expert all-to-alls within a node beside the model's: bandwidth of a card towards others.

    DeepEP sends each token once to each card that holds one of its experts, by kernels of its own, not NCCL; its
    figures bound what a library may reach. Of 8 experts over 8 cards, 1 − (7/8)^8 of the cards are hit.
    """
    found = []
    with (FOLDER / "alltoall_ep.csv").open(newline="", encoding="utf-8") as lines:
        for entry in csv.DictReader(line for line in lines if not line.startswith("#")):
            system = {"V1 H800 normal": "h100_sxm", "V2 SM100": "b200_sxm"}.get(entry["version"])
            if system is None or entry["link"] != "NVLink":
                continue
            nbytes = int(entry["tokens_per_gpu"]) * int(entry["hidden"]) * 8 * (1 - (7 / 8) ** 8)
            seconds = float(collective_seconds("all_to_all", nbytes, 8, system=system))
            ours = nbytes / seconds / 1e9
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


PRINTED = ("fitted_pct", "unseen_pct", "null_unseen_pct")


def main() -> None:
    """Score and print."""
    flags = harness.parser(__doc__).parse_args()
    scores, vidur = nccl_scores(), nccl_scores(FOLDER / "nccl_vidur.csv")
    show(scores)
    harness.say("with the launch, partly across nodes:")
    show(vidur)
    above = [
        f"{system} {kind}"
        for system, kinds in scores["systems"].items()
        for kind, each in kinds.items()
        if (each["unseen_pct"] or 0) > 10
    ]
    result = {
        "nccl_unseen_pct": max(each["unseen_pct"] for each in scores["kinds"].values()),
        "nccl_unseen_mean_pct": scores["all"]["unseen_pct"],
        "nccl_fitted_mean_pct": scores["all"]["fitted_pct"],
        "nccl_null_mean_pct": scores["all"]["null_unseen_pct"],
        "astra_sim_all_reduce_pct": ASTRA_SIM_PCT,
        "above_10_pct": above,
        "scores": scores,
        "launch_included_and_across_nodes": vidur,
        "expert_exchange": expert_exchange(),
        "transports": sorted({each.source for each in by_system().values()}),
        "machine": harness.machine("numpy"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
