"""What does the cut over stages save? The step with equal layers against the one that `cut_stages` finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from supernode.forecast.efficiency import CardModel
from supernode.forecast.kernels import pass_times
from supernode.forecast.times import StepParts, step_parts
from supernode.planning.cut import cut_stages
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import Software, Strategies
from supernode.workload.sublayers import (
    attention_demand,
    embedding_traffic,
    head_demand,
    mamba_demand,
    mixture_demand,
    mlp_demand,
)

DEMANDS: Mapping[str, Any] = {
    "attentions": attention_demand, "mlps": mlp_demand, "mixtures": mixture_demand, "mambas": mamba_demand,
}  # fmt: skip
"""What each kind of sublayer asks, by the name of its count in a shape."""


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
    head = float(pass_times(head_demand(model, ways), ways, card, software, again=False).total)
    embedding = 2 * float(embedding_traffic(model, ways)) / (card.memory_bandwidth * card.fitted.memory)
    one = replace(ways, pipeline=ways.pipeline / stages, interleave=ways.interleave / parts)
    body = _busy(step_parts(model, one, card, software)) / many - head - embedding
    costs = layer_times(model, ways, card, software, body=body)
    equal, cut = slowest_ranks(costs, pipeline=stages, interleave=parts, embedding=embedding, head=head)
    return Balance(equal=equal, cut=cut, model=usual, each=many - 1 / parts)


def slowest_ranks(
    costs: Sequence[float], *, pipeline: int, interleave: int = 1, embedding: float = 0.0, head: float = 0.0
) -> tuple[float, float]:
    """Return what the slowest rank computes with equal layers, and with the cut that dynamic programming finds.

    Args:
        costs: of each layer, in any one unit.
        embedding: cost that the first stage adds.
        head: cost that the last one adds.
    """
    count = pipeline * interleave

    def slowest(bounds: Iterable[tuple[int, int]]) -> float:
        loads: defaultdict[int, float] = defaultdict(float)
        for place, (first, last) in enumerate(bounds):
            ends = (embedding if place == 0 else 0.0) + (head if place == count - 1 else 0.0)
            loads[place % pipeline] += sum(costs[first:last]) + ends
        return max(loads.values())

    found = cut_stages(costs, pipeline=pipeline, interleave=interleave, embedding=embedding, head=head)
    least, over = divmod(len(costs), count)
    starts = [0, *accumulate(least + (place < over) for place in range(count))]
    equal = slowest(pairwise(starts))
    # A cut that evens out chunks may pile them up on one rank; then equal layers it is.
    return equal, min(equal, slowest((stage.first, stage.last) for stage in found))


def layer_times(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, *, body: float
) -> tuple[float, ...]:
    """Return the seconds of each layer's micro-batch, forward and backward, in order.

    Layers without experts come first where a model has both. In a hybrid of Mamba and attention, each kind is spread
    evenly; which layer is of which kind is published as a pattern, but only the counts are in a shape.

    Args:
        body: seconds of all layers together; what no kind's own time accounts for is spread over them evenly.
    """
    counts = {name: int(getattr(model, name)) for name in DEMANDS}
    each = {
        name: float(pass_times(demand(model, ways, software), ways, card, software).total) if counts[name] else 0.0
        for name, demand in DEMANDS.items()
    }
    spread = (body - sum(counts[name] * each[name] for name in DEMANDS)) / sum(counts.values())
    each = {name: seconds + spread for name, seconds in each.items()}
    if counts["mambas"]:
        places = sorted(((place + 0.5) / many, name) for name, many in counts.items() for place in range(many))
        return tuple(each[name] for _, name in places)
    plain = (each["attentions"] + each["mlps"],) * counts["mlps"]
    return plain + (each["attentions"] + each["mixtures"],) * counts["mixtures"]


def _busy(parts: StepParts) -> float:
    return float(parts.compute + parts.launch + parts.tensor + parts.context + parts.expert)
