"""A process that has imported torch once and forks ranks from itself; run as `python -m`, spoken to over a socket.

One request a line, as JSON; a fork request comes with one socket per rank, the ranks' lines to the controller.
When the controller's end closes, every rank ends and the server with them.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from supernode.backends.versions import trouble

FIRST = ("torch", "torch.distributed")
"""What every rank needs before it can say a word to another."""
NEXT = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # the first optimizer step imports it
    "supernode.backends.local_rank",
)
"""What every rank needs before its first checkpoint."""
PIPELINE = ("supernode.passes.pipeline",)

_MOST_FDS = 1024
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve on the socket whose descriptor is the first argument, until it closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gc.disable()  # Imports make no garbage worth the search for it.
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        for name in FIRST + NEXT:
            importlib.import_module(name)
    except ImportError as error:
        _say(control, {"kind": "broken", "message": f"{type(error).__name__}: {error}"})
        return
    if unfit := trouble(str(sys.modules["torch"].__version__)):
        _say(control, {"kind": "broken", "message": unfit})
        return
    gc.freeze()  # Forked pages stay shared: the collector does not touch them any more.
    _say(control, {"kind": "ready"})
    _Server(control).serve()


def _say(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        sys.exit(0)


class _Server:
    """The loop: fork on request, tell of every death, end everything when the controller is gone."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.pid = os.getpid()
        self.children: dict[int, tuple[int, int]] = {}
        self.claim = -1
        self.wake_read, self.wake_write = os.pipe()
        for descriptor in (self.wake_read, self.wake_write):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answer requests until the controller's end closes."""
        pending = b""
        descriptors: list[int] = []
        while True:
            ready, _, _ = select.select([self.control.fileno(), self.wake_read], [], [])
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
            self._reap()
            if self.control.fileno() not in ready:
                continue
            data, received = _receive(self.control)
            descriptors += received
            if not data:
                self._end_all()
                return
            pending += data
            while b"\n" in pending:
                line, pending = pending.split(b"\n", 1)
                request = json.loads(line)
                if request["kind"] == "fork":
                    self._fork_all(request, descriptors)
                    descriptors = []
                elif request["kind"] == "kill":
                    self._kill(request["incarnation"], request["rank"])
                elif request["kind"] == "kill_all":
                    self._end_all()
                    _say(self.control, {"kind": "gone", "token": request["token"]})

    def _fork_all(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if self.claim < 0:
            # Every rank inherits it, so the lock tells the next controller that one of them still lives.
            self.claim = os.open(Path(request["folder"]) / "logs", os.O_RDONLY)
            fcntl.flock(self.claim, fcntl.LOCK_SH)
        if request["pipeline"]:
            for name in PIPELINE:
                importlib.import_module(name)
            gc.freeze()
        lines = len(descriptors) // len(request["ranks"])  # To the controller, and to a keeper where there is one.
        for number, rank in enumerate(request["ranks"]):
            own = descriptors[number * lines : (number + 1) * lines]
            pid = os.fork()
            if pid == 0:
                self._become_rank(request, rank, own, [other for other in descriptors if other not in own])
            self.children[pid] = (request["incarnation"], rank)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_rank(self, request: dict[str, Any], rank: int, own: list[int], others: list[int]) -> None:
        """Turn this fork into a rank; never returns."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.pid:
                os._exit(code)  # The server ended before the kernel knew to end this fork with it.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self.control.close()
            for other in (*others, self.wake_read, self.wake_write):
                os.close(other)
            _log_to(Path(request["folder"]) / "logs" / f"rank-{rank}.log", request["incarnation"])
            gc.enable()
            importlib.import_module("faulthandler").enable()
            worker = importlib.import_module("supernode.backends.local_rank")
            connection, keeper = ([socket.socket(fileno=one) for one in own] + [None, None])[:2]
            code = worker.run(request, rank, connection, keeper)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - a fork must never return into the server's loop
            importlib.import_module("traceback").print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # As where the command was started with it closed.
                    stream.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            incarnation, rank = self.children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            _say(self.control, {"kind": "exit", "incarnation": incarnation, "rank": rank, "code": code})

    def _kill(self, incarnation: int, rank: int) -> None:
        for pid, who in self.children.items():
            if who == (incarnation, rank):
                os.kill(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
        self.children.clear()
        if self.claim >= 0:
            os.close(self.claim)  # Nobody writes in the run's folder any more.
            self.claim = -1


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, ancillary, _, _ = control.recvmsg(65_536, socket.CMSG_LEN(_MOST_FDS * 4))
    except ConnectionError:
        return b"", []
    received = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
    return data, list(received)


def _log_to(path: Path, incarnation: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, f"--- launch {incarnation}\n".encode())
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


if __name__ == "__main__":
    main()
