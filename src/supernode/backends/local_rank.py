"""The first lines of a forked rank: from the server's request to a life in `training.worker`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from supernode.probing import measure
from supernode.schema import plain
from supernode.schema.plan import Plan
from supernode.training.worker import Assignment, Channel, live


def run(request: dict[str, Any], rank: int, connection: socket.socket) -> int:
    """Live the life of a rank; returns its exit code."""
    if "measure" in request:
        return measure.serve(connection, rank=rank, ranks=request["measure"], folder=Path(request["folder"]))
    assignment = Assignment(
        rank=rank,
        incarnation=request["incarnation"],
        plan=plain.read(Plan, request["plan"]),
        folder=Path(request["folder"]),
        meeting=Path(request["meeting"]),
        checkpoint=request["checkpoint"],
        threads=request["threads"],
    )
    return live(assignment, Channel(connection))
