"""Which axis should lie closest together? Orders the axes over the tiers of a fabric so that a step is shortest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.forecast.network import Wires
from supernode.forecast.times import StepParts, step_parts
from supernode.hardware.machine import Tier
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import FULL, Software, Strategies

RANK_ORDER = ("tensor", "context", "data", "pipeline")
"""As Megatron-LM, and this project's own layout, number their ranks: innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An order of the axes, innermost first, and what it comes to.

    Attributes:
        parts: seconds of a step that wait for each axis, and those that do not depend on the order.
        slow_bytes: that each card sends over the slowest tier in a step, on average.
    """

    order: tuple[str, ...]
    parts: Mapping[str, float]
    slow_bytes: float

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


def tiers_of(wires: Wires, cards: int) -> tuple[Tier, ...]:
    """Return wires as tiers."""
    node = Tier(name="node", cards=wires.node_cards, bandwidth=wires.inside, latency=wires.inside_latency)
    whole = Tier(name="machine", cards=cards, bandwidth=wires.outside, latency=wires.outside_latency)
    return (node, whole) if cards > wires.node_cards else (replace(node, cards=cards),)


def with_spares(tiers: Sequence[Tier], cards: int) -> Iterator[tuple[Tier, ...]]:
    """Yield the tiers as they are, and such as leave some cards of each innermost group out, where enough are left.

    Groups of 64 do not fill domains of 72: in rank order every second one lies across two domains. With 8 cards of
    each left out, none does.

    Args:
        cards: that are needed.
    """
    yield tuple(tiers)
    node = tiers[0].cards
    for used in range(node - 1, node // 2, -1):
        if tiers[-1].cards // node * used < cards:
            return
        yield tuple(replace(tier, cards=tier.cards // node * used) for tier in tiers)


def best_place(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, tiers: Sequence[Tier]
) -> Placed:
    """Return the best order of the axes, with as many cards of each innermost group left out as it takes."""
    found = [best_order(model, ways, card, software, kept) for kept in with_spares(tiers, int(ways.cards))]
    return min(found, key=lambda placed: (float(f"{placed.time:.9g}"), placed.slow_bytes))


def best_order(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, tiers: Sequence[Tier]
) -> Placed:
    """Return the order of the axes with the shortest step; of equal ones, the fewest bytes over the slowest tier."""
    placed = every_order(model, ways, card, software, tiers)
    # Sums in another order differ in their last digits.
    return min(
        placed, key=lambda p: (float(f"{p.time:.9g}"), p.slow_bytes, [RANK_ORDER.index(axis) for axis in p.order])
    )


def every_order(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, tiers: Sequence[Tier]
) -> Iterator[Placed]:
    """Yield each order of the axes that have more than one card, the others outermost."""
    wide = [axis for axis in RANK_ORDER if float(getattr(ways, axis)) > 1]
    narrow = tuple(axis for axis in RANK_ORDER if axis not in wide)
    for order in permutations(wide):
        yield place(model, ways, card, software, tiers, order=(*order, *narrow))


def place(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, tiers: Sequence[Tier],
    *, order: Sequence[str] = RANK_ORDER,
) -> Placed:  # fmt: skip
    """Return what one strategy's step takes with its axes in this order.

    The time model knows ranks in `RANK_ORDER` and two tiers. For each axis it is asked with wires on which that axis'
    groups find as many members in a node, and as much bandwidth between nodes, as they do in this order.
    """
    degrees = {axis: int(getattr(ways, axis)) for axis in RANK_ORDER}
    usual = step_parts(model, ways, card, software)
    parts = {
        "alone": float(usual.compute + usual.launch + usual.bubble + usual.optimizer + usual.step + usual.host),
        **{
            axis: _axis_time(model, ways, card, software, tiers, _inside(tiers, degrees, order, ways, axis), axis=axis)
            for axis in (*RANK_ORDER, "expert")
        },
    }
    return Placed(order=tuple(order), parts=parts, slow_bytes=slow_bytes(model, ways, software, tiers, order=order))


PART_OF = {"tensor": "tensor", "context": "context", "data": "data", "pipeline": "transfer", "expert": "expert"}


def _axis_time(
    model: ModelShape, ways: Strategies, card: CardModel, software: Software, tiers: Sequence[Tier],
    inside: Sequence[int], *, axis: str,
) -> float:  # fmt: skip
    """Return the seconds that an axis is waited for when so many members of a group lie in a group of each tier."""
    size = _size(ways, axis)
    if size == 1 and axis != "data":  # experts may have copies where nothing else has
        return 0.0
    stride = {
        "tensor": 1.0, "expert": float(ways.expert_tensor), "context": float(ways.tensor), "data": float(ways.tensor),
        "pipeline": float(ways.tensor * ways.context * ways.data),
    }[axis]  # fmt: skip
    outside = tiers[0].bandwidth
    crossed = [(tier, inside[i]) for i, tier in enumerate(tiers[1:]) if inside[i] < size]
    if crossed:
        outside = min(_reached(tier.bandwidth, below, inside[0], size, axis=axis) for tier, below in crossed)
    # A pipeline is as slow as its slowest hop.
    near = (2 if inside[0] >= size else 0) if axis == "pipeline" else inside[0]
    wires = replace(
        card.wires, node_cards=math.ceil(near * stride), inside=tiers[0].bandwidth, outside=outside,
        outside_latency=max([tier.latency for tier, _ in crossed], default=card.wires.outside_latency),
        inside_latency=tiers[0].latency,
    )  # fmt: skip
    parts: StepParts = step_parts(model, ways, replace(card, wires=wires), software)
    return float(getattr(parts, PART_OF[axis]))


def _reached(bandwidth: float, below: int, nearest: int, size: int, *, axis: str) -> float:
    """Return what a tier leaves each card, in terms of the bandwidth between nodes that is as slow for the axis."""
    if axis == "pipeline":
        return bandwidth
    if axis == "expert":  # each sends to all: the part that leaves groups of `below`, over the part that leaves nodes
        return bandwidth * (size - nearest) / (size - below)
    return bandwidth * below / nearest  # a ring leaves a group once, by the ports of all its members


def _size(ways: Strategies, axis: str) -> int:
    return int(ways.data * ways.context) if axis == "data" else int(getattr(ways, axis))


def _inside(
    tiers: Sequence[Tier], degrees: Mapping[str, int], order: Sequence[str], ways: Strategies, axis: str
) -> list[int]:
    """Return how many members of an axis' group lie in one group of each tier, where fewest do."""

    def held(name: str, cards: int) -> int:
        stride = math.prod(degrees[inner] for inner in order[: order.index(name)])
        return _fewest(stride, degrees[name], cards)

    def members(cards: int) -> int:
        if axis == "data":  # gradients are summed over the context axis, too
            return held("data", cards) * held("context", cards)
        if axis == "expert":  # experts are spread over a stage's cards in their order
            stage = math.prod(held(name, cards) for name in ("tensor", "context", "data"))
            inner = math.prod(degrees[name] for name in order[: order.index("pipeline")])
            if inner == degrees["tensor"] * degrees["context"] * degrees["data"]:  # one after the other
                return _fewest(int(ways.expert_tensor), int(ways.expert), cards)
            return int(np.clip(stage // int(ways.expert_tensor), 1, int(ways.expert)))
        return held(axis, cards)

    return [members(tier.cards) for tier in tiers]


def _fewest(stride: int, degree: int, cards: int) -> int:
    """Return how many members of a group lie together in a run of so many cards, at the least.

    Groups and runs both begin at card 0. Where neither size divides the other, some groups lie across two runs, and
    the smallest part is what the sizes have in common.
    """
    whole = stride * degree
    if cards % whole == 0:
        return degree
    return max(math.gcd(whole, cards) // stride, 1)


def slow_bytes(
    model: ModelShape, ways: Strategies, software: Software, tiers: Sequence[Tier], *, order: Sequence[str]
) -> float:
    """Return the bytes that each card sends over the slowest tier in a step, on average over the cards.

    Rings leave a group of cards once, whatever their members in it; tokens cross to each group of a tier once. Where
    all tiers are as fast as a node, none is slow.
    """
    if min(tier.bandwidth for tier in tiers) >= tiers[0].bandwidth:
        return 0.0
    slowest = min(range(1, len(tiers)), key=lambda i: tiers[i].bandwidth)  # of equal ones, the innermost
    degrees = {axis: int(getattr(ways, axis)) for axis in RANK_ORDER}
    sent = 0.0
    for axis, nbytes in ring_bytes(model, ways, software).items():
        size, inside = _size(ways, axis), _inside(tiers, degrees, order, ways, axis)[slowest - 1]
        sent += nbytes * (size - 1) / size / inside if inside < size else 0.0
    stages, inside = int(ways.pipeline), _inside(tiers, degrees, order, ways, "pipeline")[slowest - 1]
    if inside < stages:
        hops = (math.ceil(stages / inside) - 1) * float(ways.interleave) + float(ways.interleave) - 1
        sent += 2 * sent_on(model, ways) / float(ways.interleave) * hops / stages
    experts, inside = int(ways.expert), _inside(tiers, degrees, order, ways, "expert")[slowest - 1]
    if inside < experts:
        groups = experts / inside
        copies = groups * (1 - (1 - 1 / groups) ** float(model.routed))
        sent += exchanged_bytes(model, ways, software) / float(model.routed) * copies * (groups - 1) / groups
    return sent


def sent_on(model: ModelShape, ways: Strategies) -> float:
    """Return the bytes that a card in the middle of a pipeline sends on in a step; as many come back as gradients."""
    one = float(ways.tokens * model.width * ways.element / ways.tensor)
    return one * float(ways.micro_batches) * float(ways.interleave)


def exchanged_bytes(model: ModelShape, ways: Strategies, software: Software) -> float:
    """Return the bytes that a card holds for all experts' cards in a step, each visit of a token counted."""
    passes = 6 if float(ways.recompute) == FULL or software.redone_experts else 4
    tokens = float(ways.tokens / ways.tensor * ways.micro_batches)
    visits = tokens * float(model.routed) * float(model.routed_width) * float(ways.element)
    return passes * float(model.mixtures / ways.pipeline) * visits


def ring_bytes(model: ModelShape, ways: Strategies, software: Software) -> dict[str, float]:
    """Return the bytes of a step that go round each axis' rings: gathers and scatters of so many in all."""
    is_full, many = float(ways.recompute) == FULL, ways.micro_batches
    hidden = ways.tokens * model.width * ways.element
    tensor = 2 * (3 if is_full else 2) * model.sublayers / ways.pipeline * many * hidden
    wide = model.key_value_heads * (model.head_width + model.values) / ways.tensor
    keys = ways.context * ways.tokens * wide * ways.element
    context = (4 if is_full else 3) * model.attentions / ways.pipeline * many * keys
    body = (model.body_parameters / ways.pipeline + model.vocabulary * model.width) / ways.tensor
    once = software.gradient_bytes + np.where(ways.sharding > 0, ways.element, software.gradient_bytes)
    each = 2 * ways.element + software.gradient_bytes
    data = body * np.where(ways.sharding == 3, many * each, once)
    return {"tensor": float(tensor), "context": float(context), "data": float(data)}
