"""What does a pipeline add to its slowest rank's work? Waiting for the others, and for what travels between stages."""

from __future__ import annotations

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.forecast.network import gather_time, send_time
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import FULL, GPIPE, INTERLEAVED, ZERO_BUBBLE, Software, Strategies


def bubble_time(ways: Strategies, *, whole: Numbers, slow: Numbers, forward: Numbers, weights: Numbers) -> Numbers:
    """Return how long the slowest rank waits while the pipeline fills and drains.

    A zero-bubble schedule (ZB-H1) waits for the others' forwards and for the part of their backwards that its weights'
    gradients, one for each rank put off to the end, do not outlast: (p − 1) (F + B − 2 W) where ranks are alike.

    Args:
        whole: one micro-batch on all ranks.
        slow: on the slowest.
        forward: of `whole`, the forwards.
        weights: of `whole`, the weights' gradients.

    Source: Narayanan et al., arXiv:2104.04473, section 2.2; Qi et al., arXiv:2401.10241, section 2.3.
    """
    waits = np.maximum(whole - slow, 0)
    parts = forward / np.maximum(whole, 1e-12), weights / np.maximum(whole, 1e-12)
    others = waits * (1 - parts[0] - parts[1] + parts[1] / np.maximum(ways.pipeline - 1, 1))
    zero = waits * parts[0] + np.maximum(others - ways.pipeline * parts[1] * slow, 0)
    waits = np.where(ways.schedule == ZERO_BUBBLE, zero, waits / ways.interleave)
    return np.where(ways.pipeline > 1, waits, 0)


def left_open(ways: Strategies, bubble: Numbers, *, sharing: float, busy: Numbers, even: Numbers) -> Numbers:
    """Return what is left of a pipeline's bubble where ranks share cores.

    One that waits leaves its core to another, so that only what the cores cannot fill is lost. Of p ranks, K have a
    whole core's speed at once. Filling and draining, cores stand idle while fewer than K work: a part 1 − a / K of them
    while a do, for a pass of one stage each. With 1F1B and GPipe that happens twice, at the turn from forwards to
    backwards, too; for K = p it is the whole bubble. Interleaved, passes are shorter and, unless K is near p, the turn
    costs nothing. The slowest rank alone, at a whole core's speed, may yet take longer than all of this. Below zero,
    uneven ranks make up for each other, and the slowest is done before its share of a core says. The events of
    `simulation.step` agree.

    Args:
        sharing: ranks to a core.
        busy: seconds of a step that the slowest rank is busy, while all ranks are.
        even: likewise of the mean rank.
    """
    if sharing <= 1:
        return bubble
    stages, parts = ways.pipeline, ways.interleave
    most = stages / sharing
    fewer = np.maximum(np.ceil(most) - 1, 0)
    idle = (fewer - fewer * (fewer + 1) / (2 * most)) / sharing
    turns = np.where(parts > 1, 1 + np.maximum(2 / sharing - 1, 0) ** 3, 2) / parts
    filled = even * (1 + turns * idle / ways.micro_batches)
    alone = (busy + bubble) / np.minimum(sharing, stages)
    return np.where(stages > 1, np.maximum(alone, filled) - busy, 0)


def transfer_time(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, whole: Numbers, slow: Numbers,
    weights: Numbers,
) -> Numbers:  # fmt: skip
    """Return the waiting for activations and their gradients between stages; see `travel_time`."""
    stride = ways.tensor * ways.context * ways.data
    there, again, gather = messages(model, ways, card, software)
    ahead, back = (send_time(card.tuned_wires, nbytes, stride=stride) for nbytes in (there, again))
    return travel_time(ways, software, ahead=ahead, back=back, landing=gather, whole=whole, slow=slow, weights=weights)


def travel_time(
    ways: Strategies, software: Software, *, ahead: Numbers, back: Numbers, landing: Numbers, whole: Numbers,
    slow: Numbers, weights: Numbers,
) -> Numbers:  # fmt: skip
    """Return the waiting for messages of known times between stages.

    The first micro-batch goes all ways once, through every stage of an interleaved pipeline. Where ranks compute while
    they send, that is all with GPipe, and with interleaving, whose ranks are far enough ahead. 1F1B has as many
    micro-batches under way as ranks, and the next ones start when those are back: each round waits for the way to the
    last rank and back, unless uneven ranks wait for the slowest anyway; putting weights' gradients off (ZB-H1) makes
    up for most of it. Where ranks wait while they send, each micro-batch is exchanged with the stage before and the
    one after, the ends having one neighbour. The events of `simulation.step` agree.

    Args:
        ahead: seconds of a message to the next stage.
        back: likewise of its gradient to the stage before.
        landing: seconds until what has come is whole.
        whole: one micro-batch on all ranks.
        slow: on the slowest.
        weights: of a rank's backward, the weights' gradients.
    """
    hop, others, many = ahead + back + 2 * landing, ways.pipeline - 1, ways.micro_batches
    if software.overlaps_pipeline:
        spare = ways.pipeline * slow - whole
        rounds = np.maximum(many / ways.pipeline - 1, 0)
        plain = hop * (2 * others - 1) + rounds * np.maximum(hop * others - spare, 0)
        zero = hop * others + np.maximum(hop * others - spare, 0)
        zero = zero + rounds * np.maximum(hop * others - spare - weights, 0)
        steps = {GPIPE: hop * others, INTERLEAVED: hop * (ways.pipeline * ways.interleave - 1), ZERO_BUBBLE: zero}
    else:
        each = 2 * (ahead + back if software.serial_transfers else np.maximum(ahead, back)) + 2 * landing
        plain = hop * others + each * many * np.where(others > 1, 1, 0.5)
        steps = {GPIPE: hop * others + each * np.maximum(many - 1, 0), ZERO_BUBBLE: plain}
        steps[INTERLEAVED] = hop * others + each * many * (ways.interleave - 0.5)
    for schedule, waits in steps.items():
        plain = np.where(ways.schedule == schedule, waits, plain)
    return np.where(ways.pipeline > 1, plain, 0)


def messages(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the bytes that a card sends to the next stage and to the one before, and the seconds until they are whole.

    What travels cut over the tensor axis is gathered where it arrives, save with sequence parallelism.
    """
    nbytes = ways.tokens * model.width * ways.element
    is_whole = (ways.tensor <= 1) | (ways.sequence_parallel > 0) | software.whole_messages
    landing = np.where(is_whole, 0, gather_time(card.tuned_wires, nbytes, cards=ways.tensor, stride=np.ones(())))
    ahead = nbytes / (1 if software.whole_messages else ways.tensor)
    return ahead, nbytes / (1 if software.whole_gradients else ways.tensor), landing


def forward_shares(ways: Strategies, software: Software) -> dict[str, Numbers]:
    """Return the forward's part of what each axis exchanges for a micro-batch."""
    again = ways.recompute == FULL
    return {
        "tensor": np.where(again, 1 / 3, 1 / 2),
        "context": np.where(again, 1 / 4, 1 / 3),
        "expert": np.where(again | software.redone_experts, 1 / 3, 1 / 2),
    }
