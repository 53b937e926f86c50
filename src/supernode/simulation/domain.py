"""Where does the closed form of a step apply? Rules that look at the strategy and the fabric, never at the events.

The closed form (`forecast.times.step_parts`) and the events (`simulation.step`) take the seconds of a pass, a message
and an exchange from one description; they differ in how these add up. They agree within 2% where

- every rank holds as many layers, up to two fewer that the first and the last give way (as `search.space.Space`
  holds), or the strategy says what they hold (`fullest`, `last`) and is not interleaved, whose parts would differ;
- one rank is the slowest throughout: not the first one for its embedding, and with GPipe, whose forwards and backwards
  do not mix, the same forward and backward;
- a pipeline has twice as many micro-batches as stages or more (GPipe: as many; four times where ranks differ by more
  than a tenth, which they must not with a zero-bubble order), and a multiple of them where it is interleaved;
- a message takes no longer than a tenth of the shortest forward, and the fabric carries it as fast as a card's own
  port, or else what is lost or won by that is below 1% of the step;
- weights are gathered once a step, or there is one stage: ZeRO 3 makes passes longer by what the axis waits for, and
  zero-bubble and interleaved orders do not wait for all of it;
- what the data axis waits for is at most a tenth of the step of a pipeline: other ranks drain meanwhile;
- no rank is slower than planned, and ranks that share cores do not differ by more than a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.forecast.times import step_parts
from supernode.hardware.machine import Machine
from supernode.simulation.events.strategy import even_layers, strategy_work
from supernode.simulation.events.work import StepWork
from supernode.simulation.step import wire_of
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import Software, Strategies

# Layers that the ends may hold less than the others, together.
SPARE = 2
UNEVEN = 1.1  # slowest rank over fastest
LONGEST_MESSAGE = 0.1  # of the shortest forward
LARGEST_WAIT = 0.1  # of the step
LARGEST_DETOUR = 0.01  # of the step


def outside(
    model: ModelShape,
    ways: Strategies,
    card: CardModel,
    software: Software,
    *,
    machine: Machine | None = None,
    layers: Sequence[int] = (),
) -> tuple[str, ...]:
    """Return why the closed form does not apply to a strategy; nothing where it does."""
    return tuple(_reasons(model, ways, card, software, machine, layers))


def _reasons(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, machine: Machine | None,
    layers: Sequence[int],
) -> Iterator[str]:  # fmt: skip
    work = strategy_work(model, ways, card, software, layers=layers)
    if work.pipeline == 1:
        return
    cut = [stage.layers for stage in work.stages]
    is_told = bool(ways.fullest > 0) and work.interleave == 1
    if not is_told and (list(even_layers(sum(cut), len(cut))) != cut or -sum(cut) % len(cut) > SPARE):
        yield "ranks hold different numbers of layers"
    busy = [sum(stage.total for stage in work.stages[rank :: work.pipeline]) for rank in range(work.pipeline)]
    if work.pipeline > 2 and busy[0] > 1.02 * busy[1]:
        yield "the embedding makes the first rank the slowest"
    if work.schedule == "gpipe":
        ahead, back = ([stage.passing(kind) for stage in work.stages] for kind in ("forward", "backward"))
        if max(ahead) + max(back) > 1.005 * max(a + b for a, b in zip(ahead, back, strict=True)):
            yield "one rank is the slowest forward, another backward"
    is_uneven = max(busy) >= UNEVEN * min(busy)
    if card.sharing > 1 and is_uneven:
        yield "ranks that share cores differ by more than a tenth"
    if work.schedule == "zero_bubble" and is_uneven:
        yield "weights' gradients fill the waits of ranks that differ by more than a tenth"
    rounds = 1 if work.schedule == "gpipe" else 4 if is_uneven else 2
    is_whole = work.schedule != "interleaved" or not work.micro_batches % work.pipeline
    if work.micro_batches < rounds * work.pipeline or not is_whole:
        yield "micro-batches do not fill the pipeline"
    parts = step_parts(model, ways, card, software)
    yield from _messages(work, ways, card, machine, float(parts.transfer / parts.total))
    if ways.sharding == 3:
        yield "weights are gathered for every pass of a pipeline"
    elif float(parts.data / parts.total) > LARGEST_WAIT:
        yield "the data axis waits for more than a tenth of the step"


def _messages(
    work: StepWork, ways: Strategies, card: CardModel, machine: Machine | None, share: float
) -> Iterator[str]:
    alone = (work.transfer + work.transfer_back) / 2
    wire = wire_of(work, ways, card, machine)
    real = [alone]
    if wire is not None:
        pairs = [(r, r + 1) for r in range(work.pipeline - 1)]
        real = [work.message / wire.alone(("send", a, b)) + wire.latency(("send", a, b)) for a, b in pairs]
    shortest = min(stage.forward for stage in work.stages if stage.layers) if any(s.layers for s in work.stages) else 0
    if max(real) + work.landing > LONGEST_MESSAGE * shortest:
        yield "a message takes longer than a tenth of a forward"
    if share * abs(float(np.mean(real)) / alone - 1) > LARGEST_DETOUR:
        yield "the fabric carries messages at another rate"
