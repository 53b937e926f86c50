"""What does the user's own module do in a step? Asked of a process of its own, whatever that code may do there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

from supernode.errors import BY_NAME, ModelError
from supernode.schema.codec import adapter, to_json
from supernode.schema.trace import ModelTrace, TraceRequest

MOST_SECONDS = 120.0
"""How long building the module, drawing a few samples and following a step may take."""


def can_trace() -> bool:
    """Return whether this computer has what tracing takes; nothing is imported."""
    return find_spec("torch") is not None


def trace(request: TraceRequest, *, most_seconds: float = MOST_SECONDS) -> ModelTrace:
    """Return the trace of a job's own module.

    Raises:
        ModelError: the user's code fails, ends its process, or takes too long.
        DataError: the data set or the loss fails.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "supernode.probing.trace"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    module = request.job.module
    try:
        answer, said = child.communicate(to_json(request).encode(), most_seconds)
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"following a step of {module} took more than {most_seconds:g} s",
            hint="let `model` and `data.dataset` build without downloads and long loading, or train without a plan.",
        ) from error
    finally:
        _end(child)
    try:
        told = json.loads(answer)
    except ValueError:
        last = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise ModelError(
            f"the process that followed {module} ended with exit code {child.returncode}: {last}",
            hint="correct the code that `model` and `data` name; it must neither exit nor crash.",
        ) from None
    if "error" in told:
        raise BY_NAME[told["error"]](told["message"], hint=told["hint"])
    found: ModelTrace = adapter(ModelTrace).validate_python(told["trace"])
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process with whatever it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            stream.close()
