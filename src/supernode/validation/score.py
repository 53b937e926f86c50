"""How far is the forecast from what was measured, and how far would the simplest forecasts be?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from supernode.planning.efficiency import Efficiency, card_model
from supernode.planning.shape import Numbers
from supernode.planning.times import step_parts
from supernode.validation.case import Case, measured, stacked


class Forecaster:
    """All cases, stacked once by card and software, so that a fit can ask for forecasts again and again."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)
        self.seconds = measured(self.cases)
        keys = sorted({(c.card, repr(c.software)) for c in self.cases})
        self._groups = []
        for key in keys:
            places = [i for i, c in enumerate(self.cases) if (c.card, repr(c.software)) == key]
            mine = [self.cases[i] for i in places]
            self._groups.append((np.array(places), mine[0].card, mine[0].software, *stacked(mine)))

    def forecast(self, parameters: Mapping[str, Efficiency] | None = None) -> Numbers:
        """Return the seconds of a step for each case.

        Args:
            parameters: by generation, in place of the file's.
        """
        found = np.zeros(len(self.cases))
        for places, name, software, model, ways in self._groups:
            card = card_model(name)
            if parameters is not None and card.generation in parameters:
                card = replace(card, fitted=parameters[card.generation])
            found[places] = step_parts(model, ways, card, software).total
        return found


def errors(forecast: Numbers, seconds: Numbers) -> Numbers:
    """Return relative errors of step time."""
    return forecast / seconds - 1


def mean_error(errors: Numbers) -> float:
    """Return the mean absolute error in per cent; NaN of nothing."""
    return float(100 * np.mean(np.abs(errors))) if errors.size else float("nan")


Choose = Callable[[Case], bool]
