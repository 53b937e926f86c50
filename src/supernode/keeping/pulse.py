"""Does a process live, or is it frozen? It says so now and then, and uses its core between."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Pulse:
    """What is known of a process's life.

    Attributes:
        pid: its number; 0 while that is not known.
        lived: when it last gave a sign of life, on the monotonic clock.
    """

    pid: int = 0
    lived: float = field(default_factory=time.monotonic)
    _used: tuple[float, int] | None = None

    def beat(self) -> None:
        """Note a sign of life."""
        self.lived, self._used = time.monotonic(), None

    def is_frozen(self, limit: float) -> bool:
        """Tell whether it has neither given a sign of life nor used its core for `limit` seconds."""
        silent = time.monotonic() - self.lived
        if not self.pid or silent < limit / 2:
            return False
        used = _cpu_ticks(self.pid)
        if self._used is None or self._used[1] != used:
            self._used = time.monotonic(), used
        return silent > limit and time.monotonic() - self._used[0] > limit / 3


def _cpu_ticks(pid: int) -> int:
    """Return the processor time of a process, in ticks; -1 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])
