"""How do keepers, ranks and the controller speak? JSON objects, one a line, with descriptors or bytes along."""

from __future__ import annotations

import array
import json
import select
import socket
from collections import deque
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
_MOST_FDS = 64
_MOST_LINE = 2**28
"""Bytes; the table of a rank's tensors is the longest line, some hundred bytes each."""


class Line:
    """One end of a socket over which lines go both ways, and descriptors with some of them.

    Attributes:
        is_closed: the other end is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_closed = False
        self._pending = bytearray()
        self._descriptors: deque[int] = deque()
        self._lines: deque[Message] = deque()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self.connection.fileno()

    def send(self, kind: str, descriptors: tuple[int, ...] = (), **values: Any) -> None:
        """Say something; nobody may be left to hear it, which reading tells."""
        line = json.dumps({"kind": kind, "fds": len(descriptors), **values}).encode() + b"\n"
        # Whoever is gone may have said something before, which is still to be read; reading tells of the end, too.
        with suppress(OSError):
            sent = socket.send_fds(self.connection, [line], descriptors) if descriptors else 0
            self.connection.sendall(memoryview(line)[sent:])

    def take(self, *, wait: float | None = 0.0) -> Message | None:
        """Return the next message, with `fds` its descriptors; None where none comes within `wait` seconds."""
        while not self._lines and not self.is_closed:
            try:
                # A time limit of the socket's own would hold for those who send meanwhile, too.
                if wait is not None and not self._is_ready(wait):
                    return None
                data, ancillary, _, _ = self.connection.recvmsg(2**18, socket.CMSG_LEN(_MOST_FDS * 4))
            except (OSError, ValueError):
                data, ancillary = b"", []
            self._receive(data, ancillary)
        if not self._lines:
            return None
        message = self._lines.popleft()
        message["fds"] = [self._descriptors.popleft() for _ in range(message.get("fds", 0))]
        return message

    def _is_ready(self, wait: float) -> bool:
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        return bool(poller.poll(max(wait, 0.0) * 1000))

    def _receive(self, data: bytes, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._descriptors.extend(received)
        if not data or len(self._pending) > _MOST_LINE:
            self.is_closed = True
            return
        self._pending += data
        *lines, rest = self._pending.split(b"\n")
        self._pending = bytearray(rest)
        self._lines.extend(json.loads(bytes(line)) for line in lines)

    def close(self) -> None:
        """Close this end."""
        self.is_closed = True
        self.connection.close()
