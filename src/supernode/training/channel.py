"""A rank's line to the controller: what it says, what it is told while it works, and its pulse."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from supernode.keeping.client import Keep
from supernode.keeping.lines import Line

PULSE_SECONDS = 0.5
MOMENT_SECONDS = 0.2
AGAIN_SECONDS = 60.0
"""How long a rank that lost the others waits to be told to begin again."""


class Channel:
    """One JSON object a line, both ways. A controller that is gone ends the rank.

    Attributes:
        incarnation: of the launch that the rank is in.
        stop: it was asked to save and leave.
        again: what it was told to begin again with; it is done with what it did before.
        free: frees the rank from waiting for others, called when it is to begin again.
    """

    def __init__(self, line: Line, incarnation: int) -> None:
        self._line = line
        self.incarnation = incarnation
        self.stop = False
        self.again: dict[str, Any] | None = None
        self.free: Callable[[], object] = lambda: None
        self.keep: Keep | None = None
        """The rank's side of a keeper that took the place of its first one."""
        self._told = threading.Event()
        self._keeper: Line | None = None
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        for target in (self._listen, self._pulse):
            threading.Thread(target=target, daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Say something; blocks while the controller is slow to listen."""
        with self._lock:
            self._line.send(kind, incarnation=self.incarnation, **values)
        if self._line.is_closed:
            sys.exit(0)  # Nobody is left to report to, and nobody may go on unseen.

    def new_keeper(self) -> Line | None:
        """Return the line to a keeper that took the place of one that is gone, once."""
        with self._lock:
            line, self._keeper = self._keeper, None
        return line

    def renewed(self, *, wait: bool) -> dict[str, Any] | None:
        """Return what the rank is to begin again with, once; waits for it, or not."""
        if wait and not self._told.wait(AGAIN_SECONDS):
            return None
        with self._lock:
            told, self.again = self.again, None
            self._told.clear()
        if told is not None:
            self.incarnation = told["incarnation"]
            self.stop = False
        return told

    def is_told_soon(self) -> bool:
        """Tell whether the rank is told to begin again within a moment: an error may be the first sign of it."""
        return self._told.wait(MOMENT_SECONDS)

    def _listen(self) -> None:
        while (message := self._line.take(wait=None)) is not None:
            kind = message["kind"]
            if kind == "stop":
                self.stop = True
            elif kind in ("keeper", "again"):
                with self._lock:
                    if message["fds"]:
                        self._keeper = Line(socket.socket(fileno=message["fds"][0]))
                    if kind == "again":
                        self.again = message
                        self._told.set()
                if kind == "again":
                    self.free()

    def _pulse(self) -> None:
        while not self._line.is_closed:
            time.sleep(PULSE_SECONDS)
            with suppress(SystemExit):
                self.send("pulse", pid=os.getpid(), waits=self._waits(), at=self._where())

    def _frames(self) -> list[str]:
        frame = sys._current_frames().get(self._main or 0)
        found = []
        while frame is not None:
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return found

    def _waits(self) -> bool:
        """Tell whether the rank waits for others in a collective."""
        frames = self._frames()
        # What waits for sums under way calls no code of torch's that Python sees.
        is_own = any(room in line for line in frames[:1] for room in ("/supernode/syncing/", "/supernode/ways/"))
        return is_own or any("/torch/distributed/" in line for line in frames[:3])

    def _where(self) -> str:
        """Return where the rank is, in the nearest code that is not torch's."""
        own = [line for line in self._frames() if "/torch/" not in line]
        return own[0].rpartition("/")[2] if own else ""
