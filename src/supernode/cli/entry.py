"""Where the command begins: the process that ranks are forked from comes first, since it has the most to import."""

from __future__ import annotations

import os
import sys
from typing import Any


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    server = _early_server(sys.argv[1:])
    # Not above: the server imports torch while this process imports what reads flags.
    from supernode.cli.main import main as listen

    listen(server)


def _open_standard_streams() -> None:
    """Open what the shell closed (`>&-`), lest a socket takes the number that words are written to."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest free number, which is this one.
            os.set_inheritable(descriptor, True)


def _early_server(words: list[str]) -> Any:
    """Return a fork server on its way, where the command is one that trains and torch is installed."""
    if len(words) < 2 or words[0] not in ("run", "resume") or {"--help", "-h"} & set(words):
        return None
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return None
    from supernode.backends.fork_client import ForkServer

    return ForkServer()
