"""Which cases do the tables hold? Every row of every table, read by the table's own reader."""

from __future__ import annotations

from pathlib import Path

from supernode.errors import SpecError
from supernode.validation.case import Case
from supernode.validation.cases_core import CORE_READERS
from supernode.validation.cases_fsdp import FSDP_READERS
from supernode.validation.cases_megatron import MEGATRON_READERS
from supernode.validation.tables import FOLDER, read

READERS = MEGATRON_READERS | FSDP_READERS | CORE_READERS


def load_cases(folder: Path = FOLDER) -> list[Case]:
    """Return all rows of all tables that a folder holds.

    Raises:
        SpecError: a row names a model or card that is not known.
    """
    cases, strange = readable_cases(folder)
    if strange:
        raise SpecError(
            f"{len(strange)} rows in {folder} cannot be read: {strange[0]}", hint="see `workload/models.yaml`."
        )
    return cases


def readable_cases(folder: Path) -> tuple[list[Case], list[str]]:
    """Return the rows that can be read, and why the others cannot."""
    cases: list[Case] = []
    strange: list[str] = []
    for table in READERS:
        if not (folder / f"{table}.csv").exists():
            continue
        for row in read(table, folder):
            try:
                cases += READERS[table](row)
            except SpecError as error:
                strange.append(f"{table}: {error}")
    return cases, strange
