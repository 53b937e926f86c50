"""Who answers for the user's code? A process of its own, which that code may end or block, and which outlives nobody.

Run as `python -m supernode.probing.asked PARENT SECONDS MARK`: reads a `TraceRequest` as JSON from its input, and
writes a line of MARK and of the trace, or of what went wrong, to its output.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from dataclasses import asdict
from typing import Any

from supernode.errors import SupernodeError
from supernode.schema.plain import read
from supernode.schema.trace import TraceRequest

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer one request; whatever threads and processes the user's code leaves behind, nothing is waited for."""
    parent, seconds, mark = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    code = 1
    try:
        _end_in_time(parent, seconds)
        _answer(mark)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        print(error.code or "it left by `sys.exit`", file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the last line is what the asker tells of it
        traceback.print_exc()
    finally:
        _leave(code)


def _end_in_time(parent: int, seconds: float) -> None:
    """Have the kernel end this process with its parent, and after so many seconds."""
    if sys.platform == "linux":
        # The signal comes when the parent's thread that started this process ends; that one waits for the answer.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # It ended before the kernel knew.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # What the user's code forks inherits this one.
    most = int(seconds + 1) * (os.cpu_count() or 1)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _answer(mark: str) -> None:
    own = os.getpid()
    request = read(TraceRequest, sys.stdin.read())
    out = os.dup(1)
    os.dup2(2, 1)  # What the user's code prints is talk.
    answer: dict[str, Any]
    try:
        # Not above: torch takes seconds, in which the parent may end.
        probing = importlib.import_module("supernode.probing.trace")
        answer = {"trace": asdict(probing.trace_job(request.job, micro_batch=request.micro_batch))}
    except SupernodeError as error:
        answer = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    if os.getpid() != own:
        os._exit(1)  # A fork that came back from the user's code.
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        stream.write(f"\n{mark}{json.dumps(answer)}\n")


def _leave(code: int) -> None:
    try:
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
