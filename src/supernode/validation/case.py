"""What is one published row to the forecast? A model, a strategy, a card and the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import Software, Strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published row.

    Attributes:
        card: name in `efficiency.yaml`.
        model: its shape.
        ways: the one strategy.
        seconds: of one step, measured.
        fitting: whether parameters may be fitted to it.
        label: for people.
    """

    table: str
    card: str
    software: Software
    model: ModelShape
    ways: Strategies
    seconds: float
    fitting: bool
    label: str


def ways_of(**degrees: float) -> Strategies:
    """Return the one strategy of a row."""
    return Strategies(**{name: np.asarray(value, dtype=float) for name, value in degrees.items()})


def stacked(cases: Sequence[Case]) -> tuple[ModelShape, Strategies]:
    """Return the models and strategies of several cases as arrays."""
    models = {f.name: np.array([float(getattr(c.model, f.name)) for c in cases]) for f in fields(ModelShape)}
    ways = {f.name: np.array([float(getattr(c.ways, f.name)) for c in cases]) for f in fields(Strategies)}
    return ModelShape(**models), Strategies(**ways)


def measured(cases: Sequence[Case]) -> Numbers:
    """Return the seconds of each case."""
    return np.array([case.seconds for case in cases])
