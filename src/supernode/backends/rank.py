"""What does the controller's side know of one rank: its line, how far it is, and whether it lives?"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from supernode.keeping.lines import Line
from supernode.keeping.pulse import Pulse

_PULSES_SECONDS = 2.0
"""Without a pulse for so long, a rank hears nobody: it says so twice a second."""


@dataclass(slots=True)
class Rank:
    """A rank's process.

    Attributes:
        launch: incarnation that it was forked for; it may have begun again since.
        has_met: it has met the others of the incarnation that it is in.
        heard: when it last said something of its work.
        at: where it is in its code, as it last said, and whether it `waits` for others there.
        is_lost: it counts as lost, whatever it says from now on.
    """

    number: int
    line: Line
    launch: int
    heard: float = field(default_factory=time.monotonic)
    met_seconds: float = 0.0
    has_met: bool = False
    step: int = 0
    spoke: bool = False
    told_end: bool = False
    is_lost: bool = False
    lost_peer: str = ""
    done: bool = False
    failed: dict[str, Any] = field(default_factory=dict)
    at: str = ""
    waits: bool = False
    _pulse: Pulse = field(default_factory=Pulse)
    _told_again: float | None = None

    @property
    def can_go_on(self) -> bool:
        """Whether its process can begin again."""
        gone = self.told_end or self.is_lost or self.line.is_closed or self.done or self.failed
        # Who waits for the others to meet cannot be freed; another process is there sooner.
        return not gone and (self.has_met or bool(self.lost_peer))

    def begin_again(self) -> None:
        """Forget what it did in the incarnation before."""
        self.heard = self._told_again = time.monotonic()
        self.spoke = self.done = self.has_met = False
        self.lost_peer = ""
        self._pulse.beat()

    def pulse(self, told: dict[str, Any]) -> None:
        """Note a sign of life."""
        self._pulse.beat()
        if told:
            self._pulse.pid, self.at, self.waits = told["pid"], told["at"], told["waits"]
        if self.spoke:
            self._told_again = None

    @property
    def has_pulse(self) -> bool:
        """Whether it has given a sign of life of late."""
        return time.monotonic() - self._pulse.lived < _PULSES_SECONDS

    def is_late(self, limit: float) -> bool:
        """Tell whether it was told to begin again, and has not let go of what it did within `limit` seconds."""
        told = self._told_again
        return told is not None and not self.spoke and time.monotonic() - told > limit

    def is_frozen(self, limit: float) -> bool:
        """Tell whether it has neither given a sign of life nor used its core for `limit` seconds."""
        return self._pulse.is_frozen(limit)
