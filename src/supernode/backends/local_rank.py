"""The first lines of a forked rank: from the server's request to a life in `training.worker`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from supernode.keeping.client import Keep
from supernode.keeping.lines import Line
from supernode.probing import measure, selftest
from supernode.schema import plain
from supernode.schema.plan import Plan
from supernode.training.channel import Channel
from supernode.training.worker import Assignment, live


def run(request: dict[str, Any], rank: int, connection: socket.socket | None, keeper: socket.socket | None) -> int:
    """Live the life of a rank; returns its exit code.

    Args:
        keeper: the line to the node's keeper; ranks that only measure or are checked have none.
    """
    if "check" in request:
        return 0 if selftest.passes() else 1
    assert connection is not None
    if "measure" in request or keeper is None:
        return measure.serve(connection, rank=rank, ranks=request["measure"], folder=Path(request["folder"]))
    assignment = Assignment(
        rank=rank,
        incarnation=request["incarnation"],
        plan=plain.read(Plan, request["plan"]),
        folder=Path(request["folder"]),
        meeting=Path(request["meeting"]),
        checkpoint=request["checkpoint"],
        memory=request["memory"],
        threads=request["threads"],
    )
    return live(assignment, Channel(Line(connection), assignment.incarnation), Keep(Line(keeper), rank))
