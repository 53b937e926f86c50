"""How does the controller's side get along with the server that ranks are forked from? It hears it, and replaces it."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from supernode.backends.fork_client import END_SECONDS, ForkServer
from supernode.backends.rank import Rank
from supernode.errors import MachineError

TOGETHER_SECONDS = 0.05
"""How long deaths are waited for that come with one: a node takes all its ranks along."""


class Serving:
    """The server, another one once it is gone, and what it says.

    Args:
        exited: told of each rank that has ended: launch, number and exit code.

    Attributes:
        server: the one there is now.
    """

    def __init__(self, server: ForkServer | None, exited: Callable[[int, int, int], None]) -> None:
        self.server = server or ForkServer()
        self._exited = exited
        self._was_served = self.server.is_ready
        self._token = 0

    def renew(self) -> None:
        """Start another server in the place of one that has ended."""
        self.server.close()
        self.server = ForkServer()

    def fork(self, request: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        """Have ranks forked; that the server is gone, hearing tells."""
        with suppress(MachineError):
            self.server.send(request, descriptors)

    def kill(self, rank: Rank) -> None:
        """Kill one rank, if the server has it; if the server is gone, so is the rank."""
        with suppress(MachineError):
            self.server.send({"kind": "kill", "incarnation": rank.launch, "rank": rank.number})

    def kill_all(self) -> bool:
        """End every rank; tells whether the server did, which else is gone itself.

        Raises:
            MachineError: they do not end.
        """
        self._token += 1
        with suppress(MachineError):  # Reading tells that it is gone.
            self.server.send({"kind": "kill_all", "token": self._token})
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            messages = self._lines(wait=1.0)
            if messages is None:
                return False
            if any(m["kind"] == "gone" and m["token"] == self._token for m in messages):
                return True
        raise MachineError(
            f"ranks do not end within {END_SECONDS:g} s of being killed", hint="look for processes in state D."
        )

    def hear(self) -> MachineError | None:
        """Take in what the server says; returns how it ended, if it has.

        Raises:
            MachineError: it cannot start, and nor would another.
        """
        messages = self._lines(wait=5.0)
        if messages is None:
            gone = self.server.gone()
            if not self._was_served:
                raise gone
            return gone
        for message in messages:
            if message["kind"] == "exit":
                self._exited(message["incarnation"], message["rank"], message["code"])
        return None

    def hear_more(self) -> MachineError | None:
        """Take in what the server says within a moment; returns how it ended, if it has."""
        deadline = time.monotonic() + TOGETHER_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not self.server.has_ended:
            if not select.select([self.server.connection], [], [], left)[0]:
                break
            if (gone := self.hear()) is not None:
                return gone
        return None

    def _lines(self, *, wait: float) -> list[dict[str, Any]] | None:
        """Return what the server said; None if it is gone."""
        self.server.connection.settimeout(wait)
        try:
            data = self.server.connection.recv(65_536)
        except (TimeoutError, BlockingIOError):
            return []
        except OSError:
            data = b""
        finally:
            with suppress(OSError):
                self.server.connection.settimeout(None)
        if not data:
            return None
        *lines, self.server.pending = (self.server.pending + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if message["kind"] == "broken":
                raise MachineError(
                    f"ranks cannot start: {message['message']}",
                    hint="install them with `pip install 'supernode-sdk[train]'`.",
                )
            self.server.is_ready = self._was_served = True
        return messages
