"""Is a card that a run waits for in order again? It is checked again and again, until it is or its time is up."""

from __future__ import annotations

import time
from typing import Any

from supernode.schema.event import CardChecked

CHECK = -1
"""Stands for the launch of a process that checks a card."""
_BETWEEN_SECONDS = 2.0
_EACH_SECONDS = 30.0


class Awaited:
    """A card that the run waits for.

    Args:
        until: when to give up, by `time.monotonic`.
    """

    def __init__(self, card: int, *, until: float) -> None:
        self.card, self._until = card, until
        self._begun: float | None = None
        self._next = 0.0
        self._code: int | None = None
        self._tries = 0

    @property
    def is_due(self) -> bool:
        """Whether a check is to begin now."""
        now = time.monotonic()
        is_stuck = self._begun is not None and now - self._begun > _EACH_SECONDS
        return self._code != 0 and now < self._until and (is_stuck or (self._begun is None and now >= self._next))

    def begin(self) -> dict[str, Any]:
        """Begin a check; returns what the fork server is asked for."""
        self._begun = time.monotonic()
        self._tries += 1
        return {"check": True, "ranks": [self.card], "incarnation": CHECK}

    def exited(self, code: int) -> None:
        """Note how a check ended."""
        self._begun, self._code = None, code
        self._next = time.monotonic() + _BETWEEN_SECONDS

    def verdict(self) -> CardChecked | None:
        """Return what came of it; None as long as that is open."""
        if self._code == 0:
            return CardChecked(card=self.card, is_up=True)
        if time.monotonic() < self._until:
            return None
        how = (
            "no check has ended" if self._code is None else f"the last of {self._tries} checks ended with {self._code}"
        )
        return CardChecked(card=self.card, is_up=False, reason=how)
