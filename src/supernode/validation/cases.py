"""Which cases do the tables hold? Every row of every table, read by the table's own reader."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from supernode.errors import SpecError
from supernode.forecast.efficiency import card_model
from supernode.validation.case import Case
from supernode.validation.cases_core import CORE_READERS
from supernode.validation.cases_fsdp import FSDP_READERS
from supernode.validation.cases_megatron import MEGATRON_READERS
from supernode.validation.tables import FOLDER, read

READERS = MEGATRON_READERS | FSDP_READERS | CORE_READERS


def load_cases(folder: Path = FOLDER, *, salt: str = "") -> list[Case]:
    """Return the rows that can be read of all tables that a folder holds.

    Of the project's own one row is left out, whose degrees do not multiply to its cards; `readable_cases` names it.

    Args:
        salt: of another split than the project's.
    """
    return readable_cases(folder, salt=salt)[0]


def readable_cases(folder: Path, *, salt: str = "") -> tuple[list[Case], list[str]]:
    """Return the rows that can be read, and why the others cannot: a missing column, no number, a strange name."""
    cases: list[Case] = []
    strange: list[str] = []
    for table in READERS:
        if not (folder / f"{table}.csv").exists():
            continue
        for line, row in enumerate(read(table, folder, salt=salt), start=2):
            try:
                # No heads, no time: what comes of a division by them is looked at below.
                with np.errstate(divide="ignore", invalid="ignore"):
                    found = list(READERS[table](row))
                for case in found:
                    _check(case)
            except KeyError as error:
                strange.append(f"{table}.csv, line {line}: no column or entry {error}")
            except (SpecError, ValueError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
                strange.append(f"{table}.csv, line {line}: {error}")
            else:
                cases += found
    return cases, strange


def _check(case: Case) -> None:
    """Raise SpecError unless a case is of a known card, its degrees are numbers, and it took some time."""
    card_model(case.card)
    for entry in fields(case.ways):
        if not np.isfinite(getattr(case.ways, entry.name)).all():
            raise SpecError(f"`{entry.name}` is not a finite number", hint="give what was run.")
    samples = case.ways.micro_batches
    if not (np.all(samples >= 1) and np.all(samples == np.round(samples))):
        raise SpecError(
            f"{samples} micro-batches on each copy of the model",
            hint="a batch is so many whole micro-batches on so many copies; degrees multiply to the cards.",
        )
    if not (case.model.layers > 0 and case.model.width > 0):
        raise SpecError("a model without layers or width", hint="give what was run.")
    if not 0 < case.seconds < float("inf"):
        raise SpecError(f"a step of {case.seconds} seconds", hint="give what was measured.")
