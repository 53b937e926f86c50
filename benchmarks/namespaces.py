"""How does one get, and enter, a network namespace that has no name? Through descriptors, with the C library's calls.

Python's own `os.unshare` and `os.setns` came with 3.12.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from supernode.errors import MachineError

Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None, use_errno=True)


def namespace() -> int:
    """Return a descriptor of a new network namespace, which lives as long as the descriptor."""

    def make() -> int:
        if _libc.unshare(_CLONE_NEWNET):
            raise MachineError(
                f"no network namespace can be made here: {os.strerror(ctypes.get_errno())}",
                hint="run as root, or within `unshare --user --map-root-user --net`.",
            )
        # A thread that has left its process's namespace may make the new one all its own.
        Path("/proc/thread-self/net/dev").read_text()
        with suppress(OSError):
            Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")  # It would chatter on the counters.
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return on_thread(make)


def enter(namespace: int) -> None:
    """Move this thread (of a process with one thread: the process) into a namespace."""
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise MachineError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}", hint="run as root.")


def inside(namespace: int, function: Callable[[], Result]) -> Result:
    def work() -> Result:
        enter(namespace)
        return function()

    return on_thread(work)


def on_thread(function: Callable[[], Result]) -> Result:
    """Call a function on a thread of its own, whose namespace ends with it."""
    answer: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answer.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answer[0]


def words(*command: str, given: str = "") -> str:
    """Return what a command says."""
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=30).stdout
    except FileNotFoundError as error:
        raise MachineError(
            f"`{command[0]}` is missing", hint="install `iproute2`, which has both `ip` and `tc`."
        ) from error
    except subprocess.CalledProcessError as error:
        raise MachineError(
            f"`{' '.join(command)}` failed: {error.stderr.strip()}",
            hint="emulated hosts need CAP_NET_ADMIN and a kernel with veth, bridge and sch_tbf.",
        ) from error


def die_with_parent() -> None:
    """Have the kernel end this process when the one that forked it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
