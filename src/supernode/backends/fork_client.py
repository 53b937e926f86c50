"""The controller's side of the fork server: its process and the line to it. Imports next to nothing, to start early."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

from supernode.errors import MachineError

END_SECONDS = 20.0
"""How long processes may take to end once they are killed."""


class ForkServer:
    """The server's process and the line to it. Starting it early hides the import of torch behind other work."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "supernode.backends.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Ctrl-C goes to the terminal's foreground processes; the ranks hear of it from the controller alone.
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        theirs.close()
        self.pending = b""
        self.is_ready = False
        """It has imported what ranks need, and said so; until then it hears nothing."""
        self._has_forked = False

    @property
    def pid(self) -> int:
        """The server's process number."""
        return self._process.pid

    def send(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send a request, with descriptors along it."""
        line = json.dumps(request).encode() + b"\n"
        self._has_forked = self._has_forked or bool(descriptors)
        try:
            sent = socket.send_fds(self.connection, [line], descriptors) if descriptors else 0
            self.connection.sendall(line[sent:])
        except OSError as error:
            raise self.gone() from error

    def gone(self) -> MachineError:
        """Return the error to raise when the server has ended by itself."""
        try:
            code = self._process.wait(1.0)  # Its end of the line closes just before it ends.
        except subprocess.TimeoutExpired:
            return MachineError(
                "the process that ranks are forked from does not listen any more", hint="`supernode resume` goes on."
            )
        if code < 0:
            return MachineError(
                f"the process that ranks are forked from was killed by signal {-code}",
                hint="see `dmesg` for whether memory ran out; `supernode resume` goes on.",
            )
        return MachineError(
            f"the process that ranks are forked from ended with exit code {code}",
            hint="see what it said on stderr, if anything; `supernode resume` goes on.",
        )

    @property
    def has_ended(self) -> bool:
        """Its process is gone."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the server and every rank."""
        self.connection.close()
        if not (self._has_forked and self.is_ready):
            self._process.kill()  # It may be importing for a minute yet. The kernel ends its ranks, should it have any.
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
