"""How far off is the forecast of a whole project? Published runs from start to end, ours beside a single FLOP rate.

Each row of `whole_runs.csv` (in `supernode/validation/tables`) says what was run, and which of its facts were read.
Rows with a published layout are forecast with it; the others with the best plan that the search finds, so that what
people did worse than that shows as our error. One number is fitted (`--fit`): how much longer a whole project takes
than its steps, failures and checkpoints. It is fitted to the rows of which every figure was read in its source; the
others, some of whose figures are from memory, are reported apart. Rows of the kind `ideal` are published as tokens over
a rate, so that steps alone are compared with them. Nothing belongs to a row, a model or a card.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from typing import Any

import numpy as np

import harness
from supernode.advice.project import Project, forecast
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

DAY = 86_400.0
# Rows of the usual collection that no whole run can be read from.
UNUSABLE = {
    "PaLM 540B": "utilisation on TPU v4 only; no training run on TPUs stands behind the forecast",
    "GPT-3 175B, Megatron": "single steps and utilisation, which `forecast_accuracy.py` scores",
    "MT-NLG 530B": "single steps, likewise; how long the whole run took is not published",
    "Llama 3.1 8B and 70B": "neither cards nor batch are published; the hours would mean 14% and 25% of the peak",
}


def fit(rows: list[Row]) -> None:
    """Write how much longer the fitting rows took than their forecast, and how that differs from row to row."""
    ratios, fitting = [], [row for row in rows if is_fitting(row)]
    for row in fitting:
        question, machine = question_of(row), machine_of(row)
        terms = Terms(tokens=float(row["tokens"]), overhead=1.0)
        project = forecast(question, machine, terms, pace=pace_of(row, question, machine))
        ratios.append(published_seconds(row) / DAY / _days(row, project)[0])
    overhead = statistics.median(ratios)
    apart = statistics.fmean(np.log(np.asarray(ratios) / overhead) ** 2) ** 0.5
    memory = ", ".join(row["model"] for row in rows if "memory" in row["read"])
    guessed = sum(row["cards_known"] != "1" for row in fitting), sum(not row["data"] for row in fitting)
    said = (
        "Written by `python benchmarks/project_forecast.py --fit`, from published runs whose sources are in "
        f"validation/tables/whole_runs.csv. Fitted to {len(ratios)} of {len(rows)} rows, those read in full: "
        f"{', '.join(row['model'] for row in fitting)}; of these, how many cards was assumed for {guessed[0]}, and the "
        f"layout is our search's for {guessed[1]}. Not fitted to, as figures of theirs are from memory: {memory}."
    )
    FILE.write_text(
        "".join(f"# {line}\n" for line in textwrap.wrap(said, 118))
        + f"overhead: {overhead:.3f}\ndeviation: {apart:.3f}\nfitted: {len(ratios)}\nknown: {len(rows)}\n",
        encoding="utf-8",
    )


def scored(row: Row) -> dict[str, Any]:
    """Return a row's days, published and ours."""
    question, machine = question_of(row), machine_of(row)
    project = forecast(
        question, machine, Terms(tokens=float(row["tokens"])), pace=pace_of(row, question, machine)
    )  # fmt: skip
    published = published_seconds(row) / DAY
    middle, low, high = _days(row, project)
    peak = card_of(machine).peaks[1]
    return {
        "model": row["model"], "cards": int(row["cards"]), "card": row["card"], "published_days": round(published, 2),
        "our_days": round(middle, 2), "p10": round(low, 2), "p90": round(high, 2),
        "error_pct": round(100 * (middle / published - 1), 1), "inside": low <= published <= high,
        "layout": "published" if row["data"] else "found", "cards_known": row["cards_known"] == "1",
        "plan": project.pace.words, "mfu_published": question.flops * project.steps / (
            published * DAY * project.pace.cards * peak), "goodput": round(project.goodput.middle, 4),
        "kwh": round(project.energy.middle / 3.6e6),
        "published_kwh": float(row["kwh"]) if row["kwh"] else None, "read": row["read"], "assumed": row["assumed"],
        "source": row["source"],
    }  # fmt: skip


def _days(row: Row, project: Project) -> tuple[float, float, float]:
    if row["kind"] == "ideal":
        middle = project.ideal / DAY
        return middle, middle / (1 + project.band), middle * (1 + project.band)
    times = project.seconds
    return times.middle / DAY, times.low / DAY, times.high / DAY


def null_errors(rows: list[dict[str, Any]]) -> tuple[float, list[float]]:
    """Return the part of the peak that fits all rows best at once, and each row's error with it, in per cent."""
    used = np.array([row["mfu_published"] for row in rows])
    tried = np.linspace(0.05, 0.8, 1501)
    errors = np.abs(used[None] / tried[:, None] - 1).mean(axis=1)
    best = float(tried[int(errors.argmin())])
    return best, [float(100 * (each / best - 1)) for each in used]


def mean_abs(errors: list[float]) -> float | None:
    """Return the mean of the errors' sizes; None of no errors."""
    return round(statistics.fmean(abs(error) for error in errors), 1) if errors else None


def main() -> None:
    """Print a table, then the JSON."""
    flags = harness.parser(__doc__)
    flags.add_argument("--fit", action="store_true", help="fit the one number anew, and write it")
    asked = flags.parse_args()
    read = published_rows()
    if asked.fit:
        fit(read)
        whole_runs.cache_clear()
    rows = [scored(row) | {"fitted": is_fitting(row)} for row in read]
    rate, nulls = null_errors(rows)
    for row, null in zip(rows, nulls, strict=True):
        row["null_error_pct"] = round(null, 1)
        print(
            f"{row['model']:22} {row['cards']:6} {row['card']:8} {row['published_days']:8.1f} d published, ours "
            f"{row['our_days']:7.1f} ({row['p10']:.1f} to {row['p90']:.1f}), {row['error_pct']:+6.1f}% "
            f"(null {null:+6.1f}%), layout {row['layout']}"
            f"{', fitted' if row['fitted'] else ''}"
        )
    firm = [row for row in rows if row["layout"] == "published"]
    found = [row for row in rows if row["layout"] == "found"]
    unseen = [row for row in rows if not row["fitted"]]
    result = {
        "rows": len(rows), "mean_error_pct": mean_abs([row["error_pct"] for row in rows]),
        "median_error_pct": round(statistics.median(abs(row["error_pct"]) for row in rows), 1),
        "unseen_rows": len(unseen), "unseen_pct": mean_abs([row["error_pct"] for row in unseen]),
        "unseen_null_pct": mean_abs([row["null_error_pct"] for row in unseen]),
        "overhead": whole_runs().overhead, "deviation": whole_runs().deviation, "null_pct": mean_abs(nulls),
        "null_part_of_peak": round(rate, 3),
        "layout_published_pct": mean_abs([row["error_pct"] for row in firm]),
        "layout_published_null_pct": mean_abs([row["null_error_pct"] for row in firm]),
        "layout_found_pct": mean_abs([row["error_pct"] for row in found]),
        "inside_p10_p90": sum(row["inside"] for row in rows), "table": rows, "unusable": UNUSABLE,
        "machine": harness.machine("numpy"),
    }  # fmt: skip
    if asked.json:
        print(json.dumps(result))
    else:
        print({name: value for name, value in result.items() if name not in ("table", "unusable", "machine")})


if __name__ == "__main__":
    main()
