"""Which few numbers explain what was measured here? Fits a computer's own rates to steps that its ranks took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supernode.errors import MachineError
from supernode.forecast.efficiency import CardModel, Efficiency
from supernode.forecast.network import Wires
from supernode.hardware.calibration import AxisCost, Compute, Curve, Sample
from supernode.workload.strategy import FLOAT32

FREE = 1e30
"""A rate at which nothing takes time."""
TERMS = ("products", "scores", "memory", "operands", "operation", "step")
OUTLIER = 0.2
"""A step that took longer than the fit says by this part was disturbed: nothing makes one faster."""
ROUNDS = 4

Predict = Callable[[CardModel], float]
"""Seconds of a measured step on a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step that was measured, and the forecast of it for any card."""

    seconds: float
    predict: Predict


def plain_card(**costs: float) -> CardModel:
    """Return a card on which only what is named takes time: seconds a FLOP, a byte, a kernel or a step."""
    rate = {name: 1 / cost for name, cost in costs.items() if cost > 0}
    products, memory = rate.get("products", FREE), rate.get("memory", FREE)
    return CardModel(
        generation="",
        peaks=(products,) * (FLOAT32 + 1),
        exponentials=np.inf,
        memory_bandwidth=memory,
        memory=FREE,
        wires=Wires(node_cards=1, inside=FREE, outside=FREE, inside_latency=0.0, outside_latency=0.0),
        fitted=Efficiency(
            products=1.0, products_low=1.0, products_four=1.0, operands=memory / rate.get("operands", FREE),
            scores=rate.get("scores", FREE) / products, memory=1.0, launch=0.0, tail=costs.get("operation", 0.0),
            sync=0.0, inside=1.0, outside=1.0, contention=0.0, step=costs.get("step", 0.0),
        ),
    )  # fmt: skip


def fit_compute(processes: int, steps: Sequence[Measured], samples: Sequence[Sample]) -> Compute:
    """Return the rates that explain whole steps of ranks alone, each on a core of its own.

    The forecast of a step is a sum of terms, each a count over a rate; so the rates follow by least squares of the
    relative error, none below zero. Steps that were disturbed are left out.

    Args:
        steps: of different widths, lengths and depths.
        samples: of products and copies, told beside.

    Raises:
        MachineError: what was measured is explained by no positive rates.

    Source: Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23 (`scipy.optimize.nnls`).
    """
    seconds = np.array([step.seconds for step in steps])
    terms = np.array([[step.predict(plain_card(**{name: 1.0})) for name in TERMS] for step in steps])
    costs = _least_squares(terms, seconds)
    kept = np.ones(len(steps), dtype=bool)
    for _ in range(ROUNDS):
        kept = seconds < (1 + OUTLIER) * (terms @ costs)
        if kept.sum() < len(TERMS):
            break
        costs = _least_squares(terms[kept], seconds[kept])
    found = dict(zip(TERMS, map(float, costs), strict=True))
    if not found["products"] or not found["memory"] + found["operands"]:
        raise MachineError(
            "the measured steps do not grow with their work", hint="calibrate while less else runs on this computer."
        )
    half = _product_rate(samples, processes, "bfloat16") / _product_rate(samples, processes, "float32")
    return Compute(
        processes=processes,
        products=1 / found["products"],
        products_half=half / found["products"],
        operands=1 / max(found["operands"], 1 / FREE),
        scores=1 / max(found["scores"], 1 / FREE),
        memory=1 / max(found["memory"], 1 / FREE),
        operation=found["operation"],
        step=found["step"],
        copy=max(2 * float(s.what["nbytes"]) / s.seconds for s in samples if _is(s, "copy", processes)),
    )


def _least_squares(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.optimize import nnls

    relative = terms / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    found: NDArray[np.float64] = nnls(relative / scale, np.ones(len(seconds)))[0] / scale
    return found


def _product_rate(samples: Sequence[Sample], processes: int, precision: str) -> float:
    rates = [
        2 * float(s.what["rows"]) * float(s.what["depth"]) * float(s.what["columns"]) / s.seconds
        for s in samples
        if _is(s, "product", processes) and s.what["precision"] == precision
    ]
    return max(rates)


def _is(sample: Sample, kind: str, processes: int) -> bool:
    return sample.kind == kind and sample.ranks == processes


def curves_of(samples: Sequence[Sample]) -> tuple[Curve, ...]:
    """Return the curves of measured exchanges; larger ones never take less time than smaller ones."""
    groups: dict[tuple[str, int, int], dict[float, float]] = {}
    for sample in samples:
        if sample.kind == "exchange":
            key = str(sample.what["collective"]), sample.ranks, int(sample.what["group"])
            groups.setdefault(key, {})[float(sample.what["nbytes"])] = sample.seconds
    made = []
    for (kind, ranks, cards), found in sorted(groups.items()):
        sizes = tuple(sorted(found))
        rising = np.minimum.accumulate([found[size] for size in reversed(sizes)])[::-1]
        made.append(Curve(kind=kind, ranks=ranks, cards=cards, nbytes=sizes, seconds=tuple(map(float, rising))))
    return tuple(made)


def fit_axis(
    axis: str, ranks: int, counts: Sequence[tuple[float, float, float]], seconds: Sequence[float],
    trust: Sequence[float],
) -> AxisCost:  # fmt: skip
    """Return what an axis costs a rank's Python while so many are at work, by least squares, none below zero.

    Args:
        counts: layers of a rank, micro-batches, and seconds of computing of each measured step.
        seconds: that each took beyond the forecast of its computing and exchanges.
        trust: weight of each; what was disturbed, or is long, is less exact.
    """
    from scipy.optimize import nnls

    weights = np.array(trust)
    terms = np.array([[1.0, layers, many, layers * many, busy] for layers, many, busy in counts])
    found = nnls(terms * weights[:, None], np.maximum(np.array(seconds), 0.0) * weights)[0]
    step, layer, micro_batch, block, waiting = map(float, found)
    return AxisCost(
        axis=axis, ranks=ranks, step=step, layer=layer, micro_batch=micro_batch, block=block, waiting=waiting
    )
