"""What does the step of one strategy consist of? The same seconds as the closed form's, pass by pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from supernode.errors import SpecError
from supernode.forecast.axes import BUCKET, data_contention, data_times, first_share
from supernode.forecast.efficiency import CardModel
from supernode.forecast.network import send_time
from supernode.forecast.pipeline import forward_shares, messages
from supernode.forecast.times import accumulation_time, stage_parts, step_parts, update_time
from supernode.simulation.events.span import Kind
from supernode.simulation.events.work import StageWork, StepWork, Sync
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, Software, Strategies

SCHEDULES = {GPIPE: "gpipe", ONE_F_ONE_B: "1f1b", INTERLEAVED: "interleaved", ZERO_BUBBLE: "zero_bubble"}
# A pass in more pieces than this shows nothing more.
MOST_BUCKETS = 32


def strategy_work(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, layers: Sequence[int] = ()
) -> StepWork:
    """Return the step of one strategy.

    Args:
        layers: of each stage, in order; empty cuts as the closed form does, see `even_layers`.

    Raises:
        SpecError: more than one strategy, micro-batches that are no whole number, or fewer layers than stages.
    """
    pipeline, interleave = _whole(ways.pipeline, "pipeline"), _whole(ways.interleave, "interleave")
    many = _whole(ways.micro_batches, "micro_batches")
    total, schedule = _whole(model.layers, "layers"), SCHEDULES[_whole(ways.schedule, "schedule")]
    cut = tuple(layers) or even_layers(total, pipeline * interleave)
    if sum(cut) != total or len(cut) != pipeline * interleave:
        raise SpecError(
            f"stages of {list(cut)} layers of a model of {total}", hint="cut all layers, one entry a stage."
        )
    stages = _stages(model, ways, card, software, cut)
    ahead, back, landing = (float(number) for number in messages(model, ways, card, software))
    stride = ways.tensor * ways.context * ways.data
    alone = [float(send_time(card.tuned_wires, np.asarray(nbytes), stride=stride)) for nbytes in (ahead, back)]
    parts = step_parts(model, ways, card, software)
    return StepWork(
        stages=stages,
        schedule=schedule if pipeline > 1 else "1f1b",
        pipeline=pipeline,
        micro_batches=many,
        message=ahead,
        message_back=back,
        transfer=alone[0],
        transfer_back=alone[1],
        landing=landing,
        blocks=not software.overlaps_pipeline,
        sharing=card.sharing,
        sync=_sync(model, ways, card, software, stages, pipeline),
        optimizer=0.0 if software.adapters else float(update_time(model, ways, card, software)),
        fixed=float(parts.step + parts.host),
    )


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return how many layers each stage holds: as many on all; the last and the first give way where that is uneven.

    Embedding and head may be all that the ends hold.

    Raises:
        SpecError: fewer layers than stages between the ends.

    >>> even_layers(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    if layers < max(1, stages - 2):
        raise SpecError(f"{layers} layers for {stages} stages", hint="take fewer stages.")
    each = -(-layers // stages)
    cut, spare = [each] * stages, each * stages - layers
    order = [place for pair in zip(range(stages - 1, -1, -1), range(stages), strict=True) for place in pair]
    for place in dict.fromkeys(order):
        if not spare:
            break
        cut[place] -= 1
        spare -= 1
    return tuple(cut)


def _stages(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, cut: Sequence[int]
) -> tuple[StageWork, ...]:
    one = stage_parts(model, ways, card, software)
    forwards: dict[Kind, float] = {n: float(s) for n, s in forward_shares(ways, software).items()}  # type: ignore[misc]
    # Of all ranks together, as the rest is.
    adding = float(ways.pipeline * accumulation_time(model, ways, card, software))
    waits = {name: float(getattr(one, name)) for name in forwards}
    made = []
    for place, count in enumerate(cut):
        share = count / sum(cut)
        first, last = place == 0, place == len(cut) - 1
        forward = share * float(one.body.forward) + last * float(one.head.forward) + first * float(one.embedding) / 2
        backward = share * (float(one.body.backward) + adding)
        backward += last * float(one.head.backward) + first * float(one.embedding) / 2
        weights = share * float(one.body.weights) + last * float(one.head.weights)
        made.append(
            StageWork(
                layers=count, forward=forward, backward=backward, weights=min(weights, backward),
                forward_waits=tuple((n, share * waits[n] * part) for n, part in forwards.items() if waits[n]),
                backward_waits=tuple((n, share * waits[n] * (1 - part)) for n, part in forwards.items() if waits[n]),
            )
        )  # fmt: skip
    return tuple(made)


def _sync(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, stages: Sequence[StageWork], pipeline: int
) -> Sync | None:
    scatter, gather = (float(seconds) for seconds in data_times(model, ways, card, software))
    stage = int(ways.sharding)
    if software.adapters or not scatter + gather:
        return None
    nbytes = float(np.asarray(model.parameters)) / pipeline / float(ways.tensor) * software.gradient_bytes
    # A bucket at most, a layer at most.
    pieces = max(max(one.layers for one in stages), math.ceil(nbytes / (len(stages) / pipeline) / BUCKET))
    return Sync(
        # Whole copies: the sum goes back to all, as long a way again.
        scatter=(scatter * (2 if stage == 0 else 1),) * pipeline,
        gather=(gather if stage > 0 else 0.0,) * pipeline,
        first=(float(first_share(model, ways)),) * pipeline,
        each=stage == 3,
        once=software.scatters_once,
        overlaps=software.overlaps_data,
        overlaps_sums=software.overlaps_sums,
        contention=float(data_contention(model, ways, card, software, np.asarray(scatter + gather))),
        buckets=max(2, min(MOST_BUCKETS, pieces)),
    )


def _whole(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float64]], name: str) -> int:
    if numbers.size != 1 or float(numbers.reshape(())) != round(float(numbers.reshape(()))):
        raise SpecError(f"`{name}` is {numbers}", hint="simulate one strategy at a time, of whole numbers.")
    return int(numbers.reshape(()))
