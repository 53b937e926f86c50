"""How far is the memory model from the published one? Korthikanti et al., figures 1 and 7."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from supernode.forecast.memory import MemoryParts, memory_parts
from supernode.validation.case import ways_of
from supernode.validation.cases_megatron import MEGATRON_2021
from supernode.validation.tables import FOLDER, Row, read
from supernode.workload.shape import gpt_shape
from supernode.workload.strategy import FULL, NO_RECOMPUTE, SELECTIVE

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScore:
    """Mean absolute errors in per cent.

    Attributes:
        state: of weights, gradients and optimizer.
        activations: without recomputation, and with sequence parallelism and selective recomputation.
    """

    state: float
    activations: float


def score_memory(folder: Path = FOLDER) -> MemoryScore:
    """Return the errors over all rows; nothing is fitted to them."""
    runs = {row["model"]: row for row in read("korthikanti_table5_iteration_time", folder)}
    state, activations = [], []
    for row in read("korthikanti_fig1_fig7_memory", folder):
        plain = _parts(runs[row["model"]], NO_RECOMPUTE, 0)
        light = _parts(runs[row["model"]], SELECTIVE, 1)
        full = _parts(runs[row["model"]], FULL, 0)
        state.append(float(plain.state) / GIB / float(row["param_optimizer_GiB"]) - 1)
        activations += [
            float(plain.activations) / GIB / float(row["activation_none_GiB"]) - 1,
            float(light.activations) / GIB / float(row["activation_seq_selective_GiB"]) - 1,
            float(full.activations / plain.activations) / (float(row["act_pct_full"]) / 100) - 1,
        ]
    return MemoryScore(
        state=round(float(100 * np.mean(np.abs(state))), 2),
        activations=round(float(100 * np.mean(np.abs(activations))), 2),
    )


def _parts(row: Row, recompute: int, spread: int) -> MemoryParts:
    model = gpt_shape(
        layers=float(row["layers"]), width=float(row["hidden"]), heads=float(row["attention_heads"]),
        vocabulary=float(row["vocab"]), positions=float(row["seq"]),
    )  # fmt: skip
    ways = ways_of(
        tensor=float(row["tp"]), pipeline=float(row["pp"]), interleave=float(row["interleave"]),
        micro_batch=float(row["micro_batch"]), batch=float(row["global_batch"]), sequence=float(row["seq"]),
        recompute=recompute, sequence_parallel=spread,
    )  # fmt: skip
    return memory_parts(model, ways, MEGATRON_2021)
