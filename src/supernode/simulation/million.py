"""How does one training step grow from one supernode to a million cards? The time model, over three tiers.

Tensor and pipeline stay inside a supernode; data goes over all. The work per card stays the same (weak scaling), so the
batch grows with the cards. Whether a model still learns well from such a batch is not asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from supernode.errors import SpecError
from supernode.fabric.choice import choose, collective_time
from supernode.fabric.level import MESSAGE_OVERHEAD, Level
from supernode.forecast.efficiency import CardModel, card_model
from supernode.forecast.memory import memory_parts
from supernode.forecast.network import Wires
from supernode.forecast.times import StepParts, step_parts
from supernode.workload.presets import public_model
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import INTERLEAVED, Software, Strategies, make_strategies

GOOD = 0.95  # SPEC S17: 95% linear scaling
SIZES = tuple(2**power for power in range(12))
"""Supernodes: 512 to 1,048,576 cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What is assumed of a cluster of supernodes; each card has ports of its own on every tier.

    Attributes:
        card: name of a card that has fitted efficiencies; links are cut to what its generation's collectives reach.
        node_cards: cards of a node. DGX H100: 8.
        supernode_cards: cards of a supernode. SPEC S17: 512.
        inside: bytes/s of a card in its node, one direction. NVIDIA H100 data sheet: 900 GB/s both ways.
        across: bytes/s of a card in its supernode, one direction. CloudMatrix384's UB, 392 GB/s, a figure of
            besthub.dev's article on it.
        between: bytes/s of a card's share of the smart NICs, one direction. CloudMatrix384 and DGX H100: 400 Gbit/s.
            The network between supernodes is taken not to be oversubscribed.
        near: seconds of a message from card to card in a supernode, software included; the time model's own.
        far: likewise between supernodes.
        overhead: seconds that each message keeps its sender busy.
        buckets: parts in which gradients travel, so that they can start early; an estimate. Each pays the latency.
        left: part of the gradients' bytes that a compressor leaves.
        spread: standard deviation of a node's time to compute, over its mean. The cluster waits for its slowest node.
            An estimate, taken from no fleet; measure yours.
    """

    card: str = "H200"
    node_cards: int = 8
    supernode_cards: int = 512
    inside: float = 450e9
    across: float = 392e9
    between: float = 50e9
    near: float = 5e-6
    far: float = 12e-6
    overhead: float = MESSAGE_OVERHEAD
    buckets: int = 16
    left: float = 1.0
    spread: float = 0.005

    def __post_init__(self) -> None:
        if self.node_cards < 1 or self.supernode_cards % self.node_cards:
            raise SpecError(
                f"supernodes of {self.supernode_cards} cards in nodes of {self.node_cards}",
                hint="make `supernode_cards` a multiple of `node_cards`.",
            )
        if self.buckets < 1 or not 0 < self.left <= 1 or self.spread < 0:
            raise SpecError(
                f"{self.buckets} buckets, {self.left} of the bytes left, a spread of {self.spread}",
                hint="`buckets` is 1 or more, `left` above 0 and at most 1, `spread` 0 or more.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a supernode trains; all supernodes do alike.

    Attributes:
        model: its shape.
        tensor: cards that share each matrix.
        pipeline: stages.
        interleave: parts of the model that each stage's card holds; 16 × 8 leaves a layer each.
        micro_batches: samples of one step on each copy of the model, one at a time. 8 copies in a supernode with 8
            each make 524,288 tokens for 512 cards, as Llama 3 405B had (16 Mi tokens on 16,384; arXiv:2407.21783,
            table 4).
        sequence: tokens of a sample. Llama 3: 8,192.
        software: what the training program does.
    """

    model: ModelShape = field(default_factory=lambda: public_model("llama3-405b"))
    tensor: int = 4
    pipeline: int = 16
    interleave: int = 8
    micro_batches: int = 8
    sequence: int = 8192
    software: Software = field(default_factory=Software)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size of the cluster.

    Attributes:
        cards: all of them.
        seconds: of one step.
        parts: where they go; `waiting` is for the slowest node.
        scatter: algorithm by which gradients are summed over the tiers.
        scatter_seconds: of all buckets, were nothing beside it.
        efficiency: work per card and second over that of the first size.
    """

    cards: int
    seconds: float
    parts: dict[str, float]
    scatter: str
    scatter_seconds: float
    efficiency: float = 1.0


def data_levels(tiers: Tiers, work: Work, supernodes: int) -> tuple[Level, ...]:
    """Return the levels of a data group: ranks lie tensor first, then a supernode's data, pipeline, supernodes.

    Raises:
        SpecError: tensor does not divide a node, or tensor × pipeline a supernode.
    """
    copies = copies_of(tiers, work)
    in_node = min(tiers.node_cards // work.tensor, copies)
    if copies % in_node:
        raise SpecError(
            f"{copies} copies in a supernode, {in_node} beside each other in a node",
            hint="choose degrees that are powers of two.",
        )
    fitted = card_model(tiers.card).fitted
    joined = (
        (in_node, tiers.inside * fitted.inside, tiers.near),
        (copies // in_node, tiers.across * fitted.inside, tiers.near),
        (supernodes, tiers.between * fitted.outside, tiers.far),
    )
    return tuple(
        # A message takes two links, up to the switch and down.
        Level(kind="switch", size=size, bandwidth=rate, latency=latency / 2, overhead=tiers.overhead)
        for size, rate, latency in joined
        if size > 1
    )


def copies_of(tiers: Tiers, work: Work) -> int:
    """Return the copies of the model in a supernode.

    Raises:
        SpecError: tensor does not divide a node, or tensor × pipeline a supernode.
    """
    if tiers.node_cards % work.tensor or tiers.supernode_cards % (work.tensor * work.pipeline):
        raise SpecError(
            f"tensor {work.tensor} × pipeline {work.pipeline} in supernodes of {tiers.supernode_cards} cards, nodes of "
            f"{tiers.node_cards}",
            hint="choose a `tensor` that divides the node, and a `pipeline` that with it divides the supernode.",
        )
    return tiers.supernode_cards // (work.tensor * work.pipeline)


def _card(tiers: Tiers) -> CardModel:
    """Return the card as tensor and pipeline see it: the node's links, and outside it the supernode's."""
    card = card_model(tiers.card)
    across = tiers.across * card.fitted.inside / card.fitted.outside  # what collectives reach is the switch's part
    wires = Wires(
        node_cards=tiers.node_cards, inside=tiers.inside, outside=across, inside_latency=tiers.near,
        outside_latency=tiers.near,
    )  # fmt: skip
    return replace(card, wires=wires)


def scatter_time(tiers: Tiers, levels: Sequence[Level], nbytes: float) -> tuple[str, float]:
    """Return the quickest reduce-scatter over the tiers, and its seconds, bucket after bucket.

    An all-gather is the same the other way round; both make the hierarchical all-reduce.
    """
    if not levels or nbytes <= 0:
        return "none", 0.0
    bucket = nbytes / tiers.buckets
    name = choose("reduce_scatter", bucket, levels)
    return name, tiers.buckets * float(collective_time("reduce_scatter", bucket, levels, algorithm=name))


def slowest(spread: float, nodes: int) -> float:
    """Return the expected time of the slowest of so many nodes, over the mean.

    Source: Blom, "Statistical Estimates and Transformed Beta-Variables", 1958: the largest of n normal numbers.
    """
    return 1 + spread * NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25))


def ways_of(tiers: Tiers, work: Work, supernodes: int) -> Strategies:
    """Return the layout on so many supernodes: what tensor and pipeline leave of a supernode is data, times them."""
    data = copies_of(tiers, work) * supernodes
    return make_strategies(
        tensor=work.tensor, pipeline=work.pipeline, interleave=work.interleave, data=data, sharding=1,
        batch=data * work.micro_batches, sequence=work.sequence, sequence_parallel=1, precision=1,
        schedule=INTERLEAVED if work.interleave > 1 else 1,
    )  # fmt: skip


def step_at(tiers: Tiers, work: Work, supernodes: int) -> Point:
    """Return one step on so many supernodes."""
    levels = data_levels(tiers, work, supernodes)
    taken: list[tuple[str, float]] = []

    def gather(_: Wires, nbytes: Numbers, __: Numbers, ___: Numbers) -> Numbers:
        taken.append(scatter_time(tiers, levels, float(nbytes)))
        return np.asarray(taken[-1][1])

    software = replace(work.software, gradient_bytes=work.software.gradient_bytes * tiers.left)
    ways = ways_of(tiers, work, supernodes)
    parts = step_parts(work.model, ways, _card(tiers), software, gather=gather)
    seconds = {name: float(getattr(parts, name)) for name in StepParts.__dataclass_fields__}
    nodes = supernodes * tiers.supernode_cards // tiers.node_cards
    seconds["waiting"] = seconds["compute"] * (slowest(tiers.spread, nodes) - 1)
    return Point(
        cards=supernodes * tiers.supernode_cards, seconds=sum(seconds.values()), parts=seconds, scatter=taken[0][0],
        scatter_seconds=taken[0][1],
    )  # fmt: skip


def curve(tiers: Tiers, work: Work, supernodes: Sequence[int] = SIZES) -> list[Point]:
    """Return the step at each size, ascending, with its efficiency relative to the first."""
    points = [step_at(tiers, work, count) for count in supernodes]
    return [replace(point, efficiency=points[0].seconds / point.seconds) for point in points]


def breakpoint_of(points: Sequence[Point], *, least: float = GOOD) -> float | None:
    """Return the cards at which efficiency falls below `least`, between sizes by the logarithm; None if nowhere."""
    for before, after in pairwise(points):
        if after.efficiency < least <= before.efficiency:
            part = (before.efficiency - least) / (before.efficiency - after.efficiency)
            return float(before.cards * (after.cards / before.cards) ** part)
    return None


def strong_curve(tiers: Tiers, work: Work, batch: int, supernodes: Sequence[int] = SIZES) -> list[Point]:
    """Return the step at each size with the same batch for all: the more cards, the fewer micro-batches on each.

    Raises:
        SpecError: the largest size leaves less than a sample, or parts of one, for each copy of the model.
    """
    points = []
    for count in supernodes:
        samples, rest = divmod(batch, count * copies_of(tiers, work))
        if rest or not samples:
            raise SpecError(
                f"{batch} samples over {count * copies_of(tiers, work)} copies of the model",
                hint="choose a batch that is a multiple of the copies on the largest size.",
            )
        points.append(step_at(tiers, replace(work, micro_batches=samples), count))
    first = points[0].seconds * points[0].cards
    return [replace(point, efficiency=first / (point.seconds * point.cards)) for point in points]


def memory_share(tiers: Tiers, work: Work, supernodes: int = 1) -> float:
    """Return the part of a card's memory that the fullest card needs."""
    parts = memory_parts(work.model, ways_of(tiers, work, supernodes), work.software)
    return float(parts.total) / card_model(tiers.card).memory
