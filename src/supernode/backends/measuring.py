"""How are ranks measured? Forks them from the server, gives all one order after the other, hears their seconds."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from supernode.backends.fork_client import ForkServer
from supernode.errors import MachineError

PATIENCE = 180.0
"""Seconds that one order may take, the server's import of torch included."""


class Bench:
    """Ranks that wait to be measured; they end with the block.

    Args:
        server: what they are forked from; it outlives them.
        ranks: how many.

    Raises:
        MachineError: torch cannot be imported, or a rank ends.
    """

    def __init__(self, server: ForkServer, ranks: int) -> None:
        self.server, self.ranks = server, ranks
        self._folder = tempfile.TemporaryDirectory(prefix="supernode-measure-")
        self._lines: list[socket.socket] = []

    def __enter__(self) -> Bench:
        folder = Path(self._folder.name)
        (folder / "logs").mkdir()
        self._await_server()
        pairs = [socket.socketpair() for _ in range(self.ranks)]
        request = {
            "kind": "fork", "incarnation": 0, "folder": str(folder), "measure": self.ranks, "pipeline": True,
            "ranks": list(range(self.ranks)),
        }  # fmt: skip
        self.server.send(request, tuple(theirs.fileno() for _, theirs in pairs))
        for ours, theirs in pairs:
            theirs.close()
            ours.settimeout(PATIENCE)
            self._lines.append(ours)
        return self

    def order(self, kind: str, **values: Any) -> list[list[Any]]:
        """Have every rank do something at once; returns the seconds that each told, by rank.

        Raises:
            MachineError: a rank failed, ended, or takes too long.
        """
        line = json.dumps({"kind": kind, **values}).encode() + b"\n"
        answers: list[list[Any]] = []
        try:
            for connection in self._lines:
                connection.sendall(line)
            for connection in self._lines:
                answers.append(self._answer(connection, kind))
        except OSError as error:
            raise MachineError(
                f"a rank did not answer while its {kind} was measured: {error or type(error).__name__}",
                hint="see whether memory ran out, then calibrate again with fewer `--cards`.",
            ) from error
        return answers

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all ranks so far; 0 where the system does not tell."""
        try:
            children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
            # clock_getcpuclockid(3), as Linux encodes it.
            return sum(time.clock_gettime((~int(pid) << 3) | 2) for pid in children)
        except OSError:
            return 0.0

    def _answer(self, connection: socket.socket, kind: str) -> list[Any]:
        text = b""
        while not text.endswith(b"\n"):
            data = connection.recv(1 << 20)
            if not data:
                raise ConnectionError("it ended")
            text += data
        told: dict[str, Any] = json.loads(text)
        if "error" in told:
            raise MachineError(
                f"a rank could not measure its {kind}: {told['error']}", hint="calibrate with fewer `--cards`."
            )
        seconds: list[Any] = told["seconds"]
        return seconds

    def _await_server(self) -> None:
        connection = self.server.connection
        connection.settimeout(PATIENCE)
        try:
            while not self.server.is_ready:
                data = connection.recv(65_536)
                if not data:
                    raise self.server.gone()
                *lines, self.server.pending = (self.server.pending + data).split(b"\n")
                for message in map(json.loads, lines):
                    if message["kind"] == "broken":
                        raise MachineError(
                            f"ranks cannot start: {message['message']}",
                            hint="install them with `pip install 'supernode-sdk[train]'`.",
                        )
                    self.server.is_ready = True
        finally:
            connection.settimeout(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._lines:
            connection.close()
        self.server.send({"kind": "kill_all", "token": -2})
        self.server.connection.settimeout(PATIENCE)
        heard = self.server.pending
        try:
            while b'"token": -2' not in heard:
                data = self.server.connection.recv(65_536)
                if not data:
                    raise self.server.gone()
                heard += data
        finally:
            self.server.connection.settimeout(None)
        self.server.pending = b""
        self._folder.cleanup()
