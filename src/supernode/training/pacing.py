"""After which step is state to be saved, where the job leaves that to what saves and steps are seen to take?"""

from __future__ import annotations

from supernode.keeping.interval import Cost, best_every

_SMOOTHING = 0.1
"""Weight of the newest step in the mean."""
FIRST = 10
"""Steps before the first save, whose cost is not known yet."""


class Pace:
    """Decides on one rank for all; the others are told.

    Args:
        between_failures: seconds, of the whole run.
        step: that the run goes on from.
    """

    def __init__(self, *, between_failures: float, step: int) -> None:
        self._between, self._last = between_failures, step
        self._step = 0.0
        self._cost: tuple[float, float] | None = None

    def stepped(self, seconds: float) -> None:
        """Take note of a step's seconds."""
        self._step = seconds if not self._step else self._step + _SMOOTHING * (seconds - self._step)

    def saved(self, *, stall: float, took: float) -> None:
        """Take note of what a save cost: seconds that training stood still, and seconds until it was on disk."""
        self._cost = stall, took

    @property
    def every(self) -> int:
        """Steps between saves, as far as is known."""
        if self._cost is None or not self._step:
            return FIRST
        stall, took = self._cost
        return best_every((Cost(stall=stall, took=took, between_failures=self._between),), step=self._step)[0]

    def is_due(self, step: int) -> bool:
        """Tell whether to save after a step, which is then the last one saved."""
        if step - self._last < self.every:
            return False
        self._last = step
        return True
