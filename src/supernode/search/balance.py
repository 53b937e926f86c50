"""What does the cut over stages save? The step with equal layers against the one that `cut_stages` finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from supernode.forecast.efficiency import CardModel
from supernode.forecast.kernels import pass_times
from supernode.forecast.times import StepParts, step_parts
from supernode.planning.cut import cut_stages
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import Software, Strategies
from supernode.workload.sublayers import embedding_traffic, head_demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """One micro-batch on the slowest rank, in seconds, and how much longer a step is than if it took no time.

    Attributes:
        equal: with as equal a number of layers on each stage as there can be, the first ones holding what is over.
        cut: with the stages that dynamic programming finds.
        model: as the closed form takes it.
        each: seconds of a step for each second of the slowest rank.
    """

    equal: float
    cut: float
    model: float
    each: float

    def step(self, closed_form: float, *, slowest: float) -> float:
        """Return the seconds of a step, given what the closed form says, with another slowest rank."""
        return closed_form + self.each * (slowest - self.model)


def balance(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> Balance:
    """Return the slowest rank's micro-batch with equal layers and with the best cut, of one strategy."""
    stages, parts, layers = int(ways.pipeline), int(ways.interleave), int(model.layers)
    many = float(ways.micro_batches)
    usual = _busy(step_parts(model, ways, card, software)) / many
    if stages == 1 or stages * parts > layers:  # with fewer layers than parts, embedding and head stand for layers
        return Balance(equal=usual, cut=usual, model=usual, each=many)
    one = replace(ways, pipeline=ways.pipeline / stages, interleave=ways.interleave / parts)
    whole = _busy(step_parts(model, one, card, software)) / many
    head = float(pass_times(head_demand(model, ways), ways, card, software, again=False).total)
    embedding = 2 * float(embedding_traffic(model, ways)) / (card.memory_bandwidth * card.fitted.memory)
    layer = (whole - head - embedding) / layers

    def slowest(bounds: Iterable[tuple[int, int]]) -> float:
        loads: defaultdict[int, float] = defaultdict(float)
        for place, (first, last) in enumerate(bounds):
            ends = (embedding if place == 0 else 0.0) + (head if place == stages * parts - 1 else 0.0)
            loads[place % stages] += (last - first) * layer + ends
        return max(loads.values())

    found = cut_stages([layer] * layers, pipeline=stages, interleave=parts, embedding=embedding, head=head)
    least, over = divmod(layers, stages * parts)
    sizes = [least + (place < over) for place in range(stages * parts)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    equal = slowest((start, start + size) for start, size in zip(starts, sizes, strict=True))
    cut = slowest((stage.first, stage.last) for stage in found)
    # A cut that evens out chunks may pile them up on one rank; then equal layers it is.
    return Balance(equal=equal, cut=min(cut, equal), model=usual, each=many - 1 / parts)


def _busy(parts: StepParts) -> float:
    return float(parts.compute + parts.launch + parts.tensor + parts.context + parts.expert)
