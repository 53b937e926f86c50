"""How does a run's state lie on disks, so that nothing that was acknowledged is ever lost? Loads no torch."""

from __future__ import annotations
