"""Which efficiencies make the forecast agree with the fitting half of what was measured? Writes `efficiency.yaml`.

Least squares on the logarithm of step time, robust against outliers, with a prior on each parameter: what data sheets,
microbenchmarks and NCCL's own tests let one expect before any training run is seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from supernode.forecast.efficiency import FILE, Efficiency, card_model
from supernode.validation.case import Case
from supernode.validation.cases import load_cases
from supernode.validation.score import Forecaster, errors, mean_error


class Prior(NamedTuple):
    """What a parameter is expected to be, the standard deviation of its logarithm, and its least and most."""

    value: float
    spread: float
    least: float
    most: float


PRIORS = {
    "products": Prior(0.75, 0.15, 0.3, 0.95),
    "products_low": Prior(0.65, 0.2, 0.3, 0.95),
    "products_four": Prior(0.5, 0.3, 0.15, 0.95),
    "operands": Prior(1.0, 0.7, 0.05, 4.0),
    "scores": Prior(0.5, 0.4, 0.1, 0.9),
    "memory": Prior(0.75, 0.25, 0.2, 0.95),
    "launch": Prior(8e-6, 1.0, 5e-7, 1e-4),
    "tail": Prior(2e-6, 0.7, 1e-7, 2e-5),
    "sync": Prior(1e-4, 0.5, 1e-5, 3e-3),
    "inside": Prior(0.75, 0.2, 0.3, 0.98),
    "outside": Prior(0.85, 0.15, 0.3, 0.98),
    "contention": Prior(0.3, 0.7, 0.02, 1.0),
    "step": Prior(0.01, 1.0, 5e-4, 0.3),
}
# Generations that are fitted together; of the parameters, these are each one's own.
TOGETHER = (("A100",), ("H100",), ("Blackwell", "Blackwell Ultra"))
OWN = ("products", "products_low", "products_four", "scores")
# Not fitted to: ZeRO-3 of 2021 and DeepSpeed's pipeline on Selene ran slower than the same cards with Megatron.
LEFT_OUT = ("sc21_zero3", "mt_nlg")
OUTLIER = 0.1
# A table counts as at most so many rows, so that 356 runs on one node do not drown four of a trillion parameters.
MOST_ROWS = 40

Vector = NDArray[np.float64]


class Problem:
    """One group of generations with its rows, as a vector of logarithms to least-squares residuals."""

    def __init__(self, generations: Sequence[str], cases: Sequence[Case]) -> None:
        self.generations = generations
        mine = [c for c in cases if c.fitting and card_model(c.card).generation in generations]
        self.cases = [c for c in mine if c.table not in LEFT_OUT]
        self.forecaster = Forecaster(self.cases)
        self.names = [(n, None) for n in PRIORS if n not in OWN] + [(n, g) for g in generations for n in OWN]
        counts = {t: sum(c.table == t for c in self.cases) for t in {c.table for c in self.cases}}
        self.weights = np.array([min(1.0, (MOST_ROWS / counts[c.table])) ** 0.5 for c in self.cases])

    def parameters(self, vector: Vector) -> Mapping[str, Efficiency]:
        """Return the parameters by generation that a vector stands for."""
        values = np.exp(vector)
        return {
            g: Efficiency(**{n: float(v) for (n, own), v in zip(self.names, values, strict=True) if own in (None, g)})
            for g in self.generations
        }

    def residuals(self, vector: Vector) -> Vector:
        """Return weighted errors of all rows, flattened where they are outliers, and departures from the priors."""
        found = self.forecaster.forecast(self.parameters(vector))
        rows = self.weights * np.log(found / self.forecaster.seconds) / OUTLIER
        soft = np.sign(rows) * np.sqrt(2 * np.log1p(rows**2 / 2))
        expected = np.array([np.log(PRIORS[n].value) for n, _ in self.names])
        spread = np.array([PRIORS[n].spread for n, _ in self.names])
        return np.concatenate([soft, (vector - expected) / spread])

    def solve(self) -> Mapping[str, Efficiency]:
        """Return the best parameters."""
        start = np.log([PRIORS[n].value for n, _ in self.names])
        bounds = [np.log([getattr(PRIORS[n], side) for n, _ in self.names]) for side in ("least", "most")]
        found = least_squares(self.residuals, start, bounds=tuple(bounds), max_nfev=60)
        return self.parameters(found.x)


def fit(cases: Sequence[Case]) -> dict[str, Efficiency]:
    """Return the parameters of all generations, fitted to the fitting half of some cases."""
    fitted: dict[str, Efficiency] = {}
    for generations in TOGETHER:
        fitted.update(Problem(generations, cases).solve())
    return fitted


RANGES: dict[str, Callable[[Case], float]] = {
    "cards": lambda case: float(case.ways.cards),
    "width": lambda case: float(case.model.width),
    "sequence": lambda case: float(case.ways.sequence),
    "tensor": lambda case: float(case.ways.tensor),
    "pipeline": lambda case: float(case.ways.pipeline),
}


def render(fitted: Mapping[str, Efficiency], cases: Sequence[Case]) -> str:
    """Return the file's text."""
    lines = [
        "# How much of its data sheet a card generation delivers in training; see `Efficiency` for each parameter.",
        "# Fitted by benchmarks/fit_efficiency.py to the fitting half of src/supernode/validation/tables; not typed.",
        "generations:",
    ]
    for name, found in fitted.items():
        lines.append(f"  {name}:")
        lines += [f"    {key}: {value:.3e}" if value < 0.01 else f"    {key}: {value:.3f}"
                  for key, value in asdict(found).items()]  # fmt: skip
    lines += ["# Least and most of what the fitting rows ran; beyond it a forecast is a guess, and says so.", "ranges:"]
    for name in fitted:
        lines.append(f"  {name}:")
        mine = [case for case in cases if case.fitting and card_model(case.card).generation == name]
        for key, value in RANGES.items():
            found = [value(case) for case in mine]
            lines.append(f"    {key}: [{min(found):.0f}, {max(found):.0f}]")
    lines += [
        "# The relative error that four of five unseen rows of a table stayed within, and what they ran.",
        "bands:",
    ]
    for band in bands(fitted, cases):
        lines.append(f"  - {{{', '.join(f'{key}: {value}' for key, value in band.items())}}}")
    return "\n".join(lines) + "\n"


FEWEST_ROWS = 4
"""Unseen rows of one kind in a table, of which a band may be made."""


def bands(fitted: Mapping[str, Efficiency], cases: Sequence[Case]) -> list[dict[str, str]]:
    """Return the bands of unseen rows by generation, table, mixtures and sharded weights, as `forecast/trust` reads."""
    unseen = [case for case in cases if not case.fitting]
    forecaster = Forecaster(unseen)
    found = np.abs(errors(forecaster.forecast(fitted), forecaster.seconds))
    kinds = [
        (card_model(c.card).generation, c.table, bool(c.model.mixtures > 0), bool(c.ways.sharding == 3)) for c in unseen
    ]
    made = []
    for kind in sorted(set(kinds)):
        places = [place for place, other in enumerate(kinds) if other == kind]
        if len(places) < FEWEST_ROWS:
            continue
        cards, width = (np.median([RANGES[key](unseen[place]) for place in places]) for key in ("cards", "width"))
        made.append({
            "generation": kind[0], "table": kind[1], "mixtures": str(kind[2]).lower(), "sharded": str(kind[3]).lower(),
            "cards": f"{cards:.0f}", "width": f"{width:.0f}", "rows": str(len(places)),
            "band": f"{np.quantile(found[places], 0.8):.3f}",
        })  # fmt: skip
    return made


def report(fitted: Mapping[str, Efficiency], cases: Sequence[Case]) -> None:
    """Print errors of the fitting half and of unseen rows by table and generation."""
    forecaster = Forecaster(cases)
    found = errors(forecaster.forecast(fitted), forecaster.seconds)
    places = [(c.table, card_model(c.card).generation, c.fitting) for c in cases]
    for table, generation in sorted({place[:2] for place in places}):
        halves = [np.array([p == (table, generation, half) for p in places]) for half in (True, False)]
        print(f"{table:16}{generation:18}", *(f"{mean_error(found[h]):6.1f}% of {h.sum():<4}" for h in halves),
              f"bias {100 * found[halves[0]].mean() if halves[0].any() else 0:+.1f}%")  # fmt: skip


def main() -> None:
    """Fit all groups; print the parameters and errors; write the file unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="do not write the file")
    parser.add_argument("--file", type=Path, default=FILE)
    flags = parser.parse_args()
    cases = load_cases()
    fitted = fit(cases)
    assert {f.name for f in fields(Efficiency)} == set(PRIORS)
    print(render(fitted, cases))
    report(fitted, cases)
    if not flags.dry:
        flags.file.write_text(render(fitted, cases), encoding="utf-8")


if __name__ == "__main__":
    main()
