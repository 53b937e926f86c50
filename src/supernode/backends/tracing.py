"""What does the user's own module do in a step? Asked of a process of its own, whatever that code may do there."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from supernode.errors import BY_NAME, ModelError
from supernode.schema.codec import adapter, to_json
from supernode.schema.trace import ModelTrace, TraceRequest

MOST_SECONDS = 120.0
"""How long building the module, drawing a few samples and following a step may take."""
MARK = "SUPERNODE_TRACE"
"""The variable by which whatever the user's code starts is known."""
MARGIN_SECONDS = 5.0
"""How much later the process ends itself, should nobody be left to end it."""
LOOK_SECONDS = 0.1
"""How soon the end of the process is seen."""
TALK_BYTES = 8192
"""How much of what the user's code prints last is kept."""


def can_trace() -> bool:
    """Return whether this computer has what tracing takes; nothing is imported."""
    return find_spec("torch") is not None


def trace(request: TraceRequest, *, most_seconds: float = MOST_SECONDS) -> ModelTrace:
    """Return the trace of a job's own module, as soon as it is there.

    Raises:
        ModelError: the user's code fails, ends its process, or takes too long.
        DataError: the data set or the loss fails.
    """
    mark = f"{secrets.token_hex(16)} "  # tells the answer from what the user's code writes
    words = ("-m", "supernode.probing.asked", str(os.getpid()), str(most_seconds + MARGIN_SECONDS), mark)
    child = subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, env={**os.environ, MARK: mark},
    )  # fmt: skip
    module = request.job.module
    try:
        answer, said = _listen(child, to_json(request).encode(), mark.encode(), most_seconds)
    except TimeoutError as error:
        raise ModelError(
            f"following a step of {module} took more than {most_seconds:g} s",
            hint="let `model` and `data.dataset` build without downloads and long loading, or train without a plan.",
        ) from error
    finally:
        _end(child, mark)
    if not answer:
        last = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise ModelError(
            f"the process that followed {module} ended with exit code {child.returncode}: {last}",
            hint="correct the code that `model` and `data` name; it must neither exit nor crash.",
        )
    told = json.loads(answer)
    if "error" in told:
        raise BY_NAME[told["error"]](told["message"], hint=told["hint"])
    found: ModelTrace = adapter(ModelTrace).validate_python(told["trace"])
    return found


def _listen(child: subprocess.Popen[bytes], asked: bytes, mark: bytes, most_seconds: float) -> tuple[bytes, bytes]:
    """Return the answer, empty where the process ended without one, and the last that was printed.

    The streams may stay open for as long as what the user's code started lives; nobody waits for their end.

    Raises:
        TimeoutError: there is neither an answer nor an end.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    with suppress(BrokenPipeError), child.stdin as stdin:
        stdin.write(asked)
    told, talk = bytearray(), bytearray()
    deadline = time.monotonic() + most_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ, told)
        selector.register(child.stderr, selectors.EVENT_READ, talk)
        while True:
            has_ended = _has_ended(child)
            ready = selector.select(0 if has_ended else LOOK_SECONDS)
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                key.data.extend(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            del talk[:-TALK_BYTES]
            if (begin := told.find(mark)) >= 0 and (end := told.find(b"\n", begin)) >= 0:
                return bytes(told[begin + len(mark) : end]), bytes(talk)
            if has_ended and all(key.data is not told for key, _ in ready):
                return b"", bytes(talk)
            if time.monotonic() > deadline:
                raise TimeoutError


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Tell whether the process has ended; it stays a zombie, so that its number is nobody else's."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(child: subprocess.Popen[bytes], mark: str) -> None:
    """End the process with whatever it started, in its session or, where the system shows environments, in others."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            stream.close()
