"""Who computes what, and what it should take: the planner's answer as a value that runs, is printed and is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from supernode.schema.job import JobSpec
from supernode.schema.trace import ModelTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The degrees that a run really has; `data` is a number here.

    A rank is (pipeline, data, context, tensor), row-major, tensor fastest: neighbours in rank share the most traffic.
    Experts are spread over neighbours on the data axis.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False
    sharding: str = "replicas"
    schedule: str = "1f1b"
    interleave: int = 1
    recompute: str = "none"

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def copies(self) -> int:
        """Ranks over which the gradient of one parameter is summed."""
        return self.data * self.context

    def rank(self, *, pipeline: int = 0, data: int = 0, context: int = 0, tensor: int = 0) -> int:
        """Return the rank at a place of the mesh."""
        return ((pipeline * self.data + data) * self.context + context) * self.tensor + tensor

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """Return (pipeline, data, context, tensor) of a rank."""
        outer, tensor = divmod(rank, self.tensor)
        outer, context = divmod(outer, self.context)
        pipeline, data = divmod(outer, self.data)
        return pipeline, data, context, tensor

    def __str__(self) -> str:
        parts = [f"tensor {self.tensor}", f"pipeline {self.pipeline}", f"data {self.data}"]
        parts += [f"{axis} {getattr(self, axis)}" for axis in ("context", "expert") if getattr(self, axis) > 1]
        extra = []
        if self.interleave > 1:
            extra.append(f"interleave {self.interleave}")
        if self.schedule == "zero_bubble":
            extra.append("zero bubble")
        if self.copies > 1:
            extra.append(self.sharding)
        if self.sequence:
            extra.append("sequence")
        if self.recompute != "none":
            extra.append(f"recompute {self.recompute}")
        return ", ".join([" × ".join(parts), *extra])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers of the model.

    Attributes:
        index: place in the pipeline, 0 first.
        rank: pipeline coordinate that holds it.
        first: first block.
        last: one past the last block.
        embeds: it holds the embedding at the front.
        heads: it holds the final norm and the head.
    """

    index: int
    rank: int
    first: int
    last: int
    embeds: bool
    heads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on the fullest card, by part; estimated."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step by part, each the part that nothing hides; predicted.

    Attributes:
        compute: matrix products and memory-bound operations on the busiest stage.
        tensor: waiting for the tensor axis.
        pipeline: bubble and transfers between stages.
        data: gradient synchronisation that backward does not hide.
        optimizer: clipping and the update.
        overhead: launches, Python and bookkeeping.
        context: waiting for keys and values of the context axis.
        expert: waiting for tokens on their way to experts and back.
    """

    compute: float
    tensor: float
    pipeline: float
    data: float
    optimizer: float
    overhead: float
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """Seconds in all."""
        inside = self.compute + self.tensor + self.context + self.expert
        return inside + self.pipeline + self.data + self.optimizer + self.overhead


WAYS = "ways"
"""Name under which a run notes how its gradients meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTable:
    """What the ways to sum gradients should take.

    Attributes:
        sizes: bytes, ascending.
        times: seconds at each size, by algorithm.
    """

    sizes: tuple[float, ...]
    times: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayTaken:
    """How gradients of a group meet.

    Attributes:
        hosts: ranks of the group on each host.
        sizes: bytes, ascending.
        taken: the way at each size.
    """

    hosts: tuple[int, ...]
    sizes: tuple[int, ...]
    taken: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job laid out on cards.

    Attributes:
        machine: name of the machine it was made for.
        cards: card of each rank.
        micro_batch: samples in one micro-batch on one rank.
        micro_batches: micro-batches in one step on each rank; where shares are uneven, their mean.
        stages: the cut, one entry per stage; one per rank and `interleave`.
        parameters: of the whole model, shared ones once; 0 if the model is the user's own and not yet built.
        vocabulary: token kinds that the model is built for; 0 for the user's own.
        memory: estimate for the fullest card; None where the model is the user's own.
        step: predicted time of one step; None likewise.
        flops: floating-point operations of one step over all cards (6 × parameters × tokens, attention added).
        notes: what the planner wants the reader to know.
        sums: predicted seconds of an all-reduce over the copies, by algorithm and size; empty within one node.
        ways: how gradients met in earlier launches, by group, as `ways.choose` tells it; it stays so.
        shares: micro-batches in one step on each data coordinate; empty where all have as many.
        trace: of the user's own module, whose stages then count the children of the sequence; None where it was not
            traced.
    """

    job: JobSpec
    layout: Layout
    machine: str
    cards: tuple[int, ...]
    micro_batch: int
    micro_batches: int
    stages: tuple[Stage, ...]
    parameters: int = 0
    vocabulary: int = 0
    memory: MemoryUse | None = None
    step: StepTime | None = None
    flops: float = 0.0
    notes: tuple[str, ...] = ()
    sums: SumTable | None = None
    ways: Mapping[str, WayTaken] = field(default_factory=dict)
    shares: tuple[int, ...] = ()
    trace: ModelTrace | None = None

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.layout.ranks

    def share(self, data: int) -> int:
        """Return the micro-batches of a data coordinate in one step."""
        return self.shares[data] if self.shares else self.micro_batches

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on (samples, for the user's own data set)."""
        return self.job.batch * (1 if self.job.data.dataset else self.job.data.sequence)
