"""Which cases do the tables hold? Every row of every table, read by the table's own reader."""

from __future__ import annotations

from pathlib import Path

from supernode.validation.case import Case
from supernode.validation.cases_core import CORE_READERS
from supernode.validation.cases_fsdp import FSDP_READERS
from supernode.validation.cases_megatron import MEGATRON_READERS
from supernode.validation.tables import FOLDER, read

READERS = MEGATRON_READERS | FSDP_READERS | CORE_READERS


def load_cases(folder: Path = FOLDER) -> list[Case]:
    """Return all rows of all tables that a folder holds."""
    found = [table for table in READERS if (folder / f"{table}.csv").exists()]
    return [case for table in found for row in read(table, folder) for case in READERS[table](row)]
