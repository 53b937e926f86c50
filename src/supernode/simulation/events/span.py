"""What is recorded of a simulated step? Who did what, from when to when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "forward", "backward", "weights", "tensor", "context", "expert", "send", "data", "optimizer", "overhead"
]  # fmt: skip

WITHIN: tuple[Kind, ...] = ("tensor", "context", "expert")
"""Kinds that lie within a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that one pipeline rank does.

    Attributes:
        rank: pipeline coordinate; of the sender, for `send`.
        stage: -1 where it concerns the whole rank.
        kind: `send` and `data` run beside computing, all else in turn; those in `WITHIN` lie within their pass, drawn
            together at its end.
        micro_batch: -1 where it concerns all.
        start: seconds since the step began.
        end: likewise; of `send`, when the last byte has left.
        to: rank that gets what is sent; -1 for all else.
    """

    rank: int
    stage: int
    kind: Kind
    micro_batch: int
    start: float
    end: float
    to: int = -1
