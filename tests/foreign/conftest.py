"""The axes' tests run on the same forked ranks as those of `parallel`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("ranks_together", Path(__file__).parents[1] / "parallel" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)

together = _shared.together
