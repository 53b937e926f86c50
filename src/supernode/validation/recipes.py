"""With what settings did NVIDIA run a row of its tables? The published recipe that is nearest to what the row says.

`tables/megatron_bridge_recipes.csv` holds, for each tag of github.com/NVIDIA-NeMo/Megatron-Bridge, every workload of
scripts/performance/configs (of src/megatron/bridge/perf_recipes at v0.6.0) in the words of those files. The container
26.04 has the release 0.4.0, and so on: docs/releases/software-versions.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from supernode.validation.tables import FOLDER, Row, rows_of

RECIPES = "megatron_bridge_recipes"
DEGREES = ("tp", "pp", "cp", "ep", "vp", "micro_batch", "gpus", "global_batch")
TASKS = {"Pre": "pretrain", "LoR": "lora", "SFT": "sft"}


def degree(text: str | None) -> float:
    """Return a parallel degree; `n/a` and nothing mean 1, and what stands in brackets is another recipe's."""
    first = (text or "").partition(" ")[0]
    return max(float(first), 1.0) if first.isdigit() else 1.0


def version(release: str) -> tuple[int, ...]:
    """Return a container's number as a tuple that sorts; of 26.04.01 (26, 4, 1)."""
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def recipe_of(row: Row, *, model: str, card: str, precision: str) -> Row | None:
    """Return the recipe nearest to a row, or None if there is none of its model, card and kind of task.

    Nearest is, in this order: of the row's precision; of its release, else one as near as there is, rather later than
    earlier; with most degrees and batches in common.

    Args:
        model: in the words of `workload/models.yaml`.
        card: in those of `forecast/cards.yaml`.
        precision: in those of `PRECISIONS`.
    """
    release, task = row["release"].split()[0], TASKS.get(row["task"][:3], "pretrain")
    releases = sorted({found["release"] for found in _recipes().get((model, card, task), ())}, key=version)
    if not releases:
        return None
    later = [found for found in releases if version(found) >= version(release)]
    of_release = later[0] if later else releases[-1]

    def likeness(found: Row) -> tuple[int, ...]:
        same = sum(degree(row[name]) == degree(found[name]) for name in DEGREES)
        return found["precision"] == precision, found["release"] == of_release, same

    return max(_recipes()[model, card, task], key=likeness)


@cache
def _recipes() -> Mapping[tuple[str, str, str], list[Row]]:
    found: dict[tuple[str, str, str], list[Row]] = {}
    for recipe in rows_of(FOLDER / f"{RECIPES}.csv"):
        found.setdefault((recipe["model"], recipe["card"], recipe["task"]), []).append(recipe)
    return found
