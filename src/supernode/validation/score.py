"""How far is the forecast from what was measured, and how far would the simplest forecast be?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from supernode.forecast.efficiency import Efficiency, card_model
from supernode.forecast.times import step_parts
from supernode.validation.case import Case, measured, stacked
from supernode.validation.cases import load_cases
from supernode.workload.shape import Numbers
from supernode.workload.strategy import FULL

# Calculon with its own a100_80g.json and no refit, on all rows of a table; `peer_accuracy_claims.csv` and its source.
# Least and most where it was measured apart: vTrain's single node by variant, SC'21 by table (three-dimensional rows).
CALCULON = {
    "korthikanti": (3.65, 3.65), "vtrain_multi": (15.4, 15.4), "vtrain_single": (39.0, 55.0), "sc21": (7.4, 10.3),
    "mt_nlg": (29.7, 29.7),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TableScore:
    """Mean absolute errors of step time on one table, in per cent; None where there are no such rows.

    Attributes:
        fitted: on the rows that parameters were fitted to.
        unseen: on the others.
        null_unseen: on the others, of the best single FLOP rate of the table.
        null_all: on all rows, likewise.
        calculon: as measured with Calculon on all rows, least and most.
        band: the relative error that four of five unseen rows stay within, in per cent.
    """

    table: str
    fitted_rows: int
    unseen_rows: int
    fitted: float | None
    unseen: float | None
    all_rows: float
    null_unseen: float | None
    null_all: float
    calculon: tuple[float, float] | None
    band: float | None


class Forecaster:
    """All cases, stacked once by card and software, so that a fit can ask for forecasts again and again."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)
        self.seconds = measured(self.cases)
        keys = [(case.card, case.software) for case in self.cases]
        self._groups = []
        for key in dict.fromkeys(keys):
            places = [place for place, found in enumerate(keys) if found == key]
            self._groups.append((np.array(places), *key, *stacked([self.cases[place] for place in places])))

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

    def work(self) -> Numbers:
        """Return FLOPs of one step on each card: six per matrix entry and token, attention, and what is recomputed."""
        found = np.zeros(len(self.cases))
        for places, _, _, model, ways in self._groups:
            idle = model.routed_parameters * (1 - model.routed / np.maximum(model.experts, 1))
            active = model.parameters - idle - model.vocabulary * model.width * (1 - model.tied)
            scores = 6 * model.attentions * model.heads * model.head_width * ways.sequence
            passes = np.where(ways.recompute == FULL, 4 / 3, 1)
            found[places] = ways.batch * ways.sequence * (6 * active + scores) * passes / ways.cards
        return found


def errors(forecast: Numbers, seconds: Numbers) -> Numbers:
    """Return relative errors of step time."""
    return forecast / seconds - 1


def mean_error(found: Numbers) -> float:
    """Return the mean absolute error in per cent; NaN of nothing."""
    return float(100 * np.mean(np.abs(found))) if found.size else float("nan")


def null_forecast(work: Numbers, seconds: Numbers) -> Numbers:
    """Return what the best single FLOP rate forecasts: the rate, among those measured, of least mean absolute error."""
    rates = work / seconds
    best = min(rates, key=lambda rate: mean_error(errors(work / rate, seconds)))
    return np.asarray(work / best)


def score_tables(
    cases: Sequence[Case] | None = None, parameters: Mapping[str, Efficiency] | None = None
) -> dict[str, TableScore]:
    """Return the scores of all tables.

    Args:
        cases: in place of the shipped tables'.
        parameters: by generation, in place of the file's.
    """
    forecaster = Forecaster(load_cases() if cases is None else cases)
    forecast, work, seconds = forecaster.forecast(parameters), forecaster.work(), forecaster.seconds
    tables = np.array([case.table for case in forecaster.cases])
    fitting = np.array([case.fitting for case in forecaster.cases])
    return {
        str(table): _score(str(table), fitting[tables == table], forecast[tables == table], work[tables == table],
                           seconds[tables == table])
        for table in dict.fromkeys(tables)
    }  # fmt: skip


def _score(table: str, fitting: Numbers, forecast: Numbers, work: Numbers, seconds: Numbers) -> TableScore:
    ours, null = errors(forecast, seconds), errors(null_forecast(work, seconds), seconds)
    unseen = ~fitting.astype(bool)

    def some(found: Numbers) -> float | None:
        return round(mean_error(found), 2) if found.size else None

    band = round(float(100 * np.quantile(np.abs(ours[unseen]), 0.8)), 1) if unseen.any() else None
    return TableScore(
        table=table, fitted_rows=int((~unseen).sum()), unseen_rows=int(unseen.sum()), fitted=some(ours[~unseen]),
        unseen=some(ours[unseen]), all_rows=round(mean_error(ours), 2), null_unseen=some(null[unseen]),
        null_all=round(mean_error(null), 2), calculon=CALCULON.get(table), band=band,
    )  # fmt: skip
