"""In which order does a pipeline rank run its passes? Written once: memory counts it, the simulation runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: `weights` is the part of a backward that makes the weights' gradients, where the schedule puts it off;
            `backward` then is the rest, for which the stage before waits.
    """

    stage: int
    kind: Literal["forward", "backward", "weights"]
    micro_batch: int


def rank_order(schedule: str, *, rank: int, pipeline: int, interleave: int, micro_batches: int) -> list[Action]:
    """Return what pipeline rank `rank` runs, in order; for `interleaved`, `micro_batches` is a multiple of `pipeline`.

    Args:
        schedule: gpipe, 1f1b, interleaved or zero_bubble. The last is 1F1B whose rank r puts each weights' gradient
            off until r more backwards are through, so that all ranks hold as much as the first one.

    Source: Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2, as `torch.distributed.pipelining` orders it;
    zero_bubble is ZB-H1 of Qi et al., arXiv:2401.10241, section 2.2.
    """
    forwards = [_forward(step, rank, pipeline, interleave) for step in range(micro_batches * interleave)]
    backwards = [
        Action(stage=(interleave - 1) * pipeline + 2 * rank - f.stage, kind="backward", micro_batch=f.micro_batch)
        for f in forwards
    ]
    ahead = forwards_ahead(schedule, rank=rank, pipeline=pipeline, interleave=interleave, micro_batches=micro_batches)
    if schedule == "zero_bubble":
        return _with_weights(forwards, backwards, ahead=min(micro_batches, pipeline - rank), late=rank)
    order = forwards[: ahead - 1]
    for index, backward in enumerate(backwards):
        order += forwards[ahead - 1 + index : ahead + index]
        order.append(backward)
    return order


def _with_weights(forwards: list[Action], backwards: list[Action], *, ahead: int, late: int) -> list[Action]:
    """Return one forward, one backward, and the weights' gradient of `late` backwards before."""
    order = forwards[: ahead - 1]
    puts_off = [Action(stage=b.stage, kind="weights", micro_batch=b.micro_batch) for b in backwards]
    for index, backward in enumerate(backwards):
        order += forwards[ahead - 1 + index : ahead + index]
        order.append(backward)
        order += puts_off[index - late : index - late + 1] if index >= late else []
    return order + puts_off[max(0, len(backwards) - late) :]


def forwards_ahead(schedule: str, *, rank: int, pipeline: int, interleave: int, micro_batches: int) -> int:
    """Return how many forwards a rank is ahead of its backwards at most: the activations that it holds at once.

    Counted in passes through one stage; a rank of an interleaved schedule holds several stages. With zero_bubble they
    are held until the weights' gradient, which is put off the longer, the sooner the backward is due.
    """
    every = micro_batches * interleave
    if schedule == "gpipe":
        return every
    if schedule == "zero_bubble":
        return min(every, pipeline)
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
