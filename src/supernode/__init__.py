"""Many accelerator cards as one machine: describe it once, then plan, simulate, allocate, train and recover on it.

The package's face. Importing it loads neither torch nor numpy; names arrive when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from supernode.control.supernode import SuperNode
    from supernode.errors import SupernodeError
    from supernode.schema.job import JobSpec
    from supernode.schema.plan import Plan
    from supernode.schema.report import Report
    from supernode.schema.slice import Slice

__version__ = "0.1.0"

__all__ = ["JobSpec", "Plan", "Report", "Slice", "SuperNode", "SupernodeError", "__version__"]

_HOMES = {
    "SuperNode": "supernode.control.supernode",
    "SupernodeError": "supernode.errors",
    "JobSpec": "supernode.schema.job",
    "Plan": "supernode.schema.plan",
    "Report": "supernode.schema.report",
    "Slice": "supernode.schema.slice",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'supernode' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
