"""How long do this rank's own passes take, whatever it waits for between them?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PassClock:
    """Counts the seconds of forward and backward passes.

    Where ranks wait for each other inside a pass, only the thread's own processor time tells who is slow: waiting takes
    none. Else the wall clock does, which also sees a core that others use.

    Args:
        meets: ranks meet inside a pass (tensor, context or expert axis, sharded weights).
        slowness: a drill: times as long that passes take.

    Attributes:
        seconds: counted since the last `take`.
    """

    def __init__(self, *, meets: bool, slowness: float = 1.0) -> None:
        self._now = time.thread_time if meets else time.perf_counter
        self._idle = _burn if meets else time.sleep
        self._slowness = slowness
        self._is_on = False
        self.seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count what is done inside; a pass within a pass counts once."""
        if self._is_on:
            yield
            return
        self._is_on, start = True, self._now()
        try:
            yield
            if self._slowness > 1:
                self._idle((self._slowness - 1) * (self._now() - start))
        finally:
            self._is_on = False
            self.seconds += self._now() - start

    def take(self) -> float:
        """Return the seconds so far and begin anew."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def _burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
