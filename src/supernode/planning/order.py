"""In which order does a pipeline rank run its passes? Written once: memory counts it, the simulation runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: Literal["forward", "backward"]
    micro_batch: int


def rank_order(schedule: str, *, rank: int, pipeline: int, interleave: int, micro_batches: int) -> list[Action]:
    """Return what pipeline rank `rank` runs, in order; for `interleaved`, `micro_batches` is a multiple of `pipeline`.

    Source: Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2, as `torch.distributed.pipelining` orders it.
    """
    forwards = [_forward(step, rank, pipeline, interleave) for step in range(micro_batches * interleave)]
    backwards = [
        Action(stage=(interleave - 1) * pipeline + 2 * rank - f.stage, kind="backward", micro_batch=f.micro_batch)
        for f in forwards
    ]
    ahead = forwards_ahead(schedule, rank=rank, pipeline=pipeline, interleave=interleave, micro_batches=micro_batches)
    order = forwards[: ahead - 1]
    for index, backward in enumerate(backwards):
        order += forwards[ahead - 1 + index : ahead + index]
        order.append(backward)
    return order


def forwards_ahead(schedule: str, *, rank: int, pipeline: int, interleave: int, micro_batches: int) -> int:
    """Return how many forwards a rank is ahead of its backwards at most: the activations that it holds at once.

    Counted in passes through one stage; a rank of an interleaved schedule holds several stages.
    """
    every = micro_batches * interleave
    if schedule == "gpipe":
        return every
    if schedule == "interleaved":
        return min(every, (interleave - 1) * pipeline + 2 * (pipeline - 1 - rank) + 1)
    return min(every, pipeline - rank)


def _forward(step: int, rank: int, pipeline: int, interleave: int) -> Action:
    """Return the rank's forward number `step`: rounds of one micro-batch per rank go through its stages in turn."""
    if interleave == 1:
        return Action(stage=rank, kind="forward", micro_batch=step)
    turn, within = divmod(step, pipeline)
    round_, local = divmod(turn, interleave)
    return Action(stage=local * pipeline + rank, kind="forward", micro_batch=round_ * pipeline + within)
