"""What does a step consist of? Passes, messages and exchanges with their seconds."""

from __future__ import annotations

from dataclasses import dataclass

from supernode.errors import SpecError
from supernode.simulation.events.span import Kind

Waits = tuple[tuple[Kind, float], ...]
"""Seconds by axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Seconds of one micro-batch in one stage.

    Attributes:
        layers: that the stage holds.
        forward: computing.
        backward: likewise, with the weights' gradients.
        weights: of `backward`, the weights' gradients, which a zero-bubble schedule puts off.
        forward_waits: seconds that the forward waits for the tensor, context and expert axes.
        backward_waits: likewise.
    """

    layers: int
    forward: float
    backward: float
    weights: float = 0.0
    forward_waits: Waits = ()
    backward_waits: Waits = ()

    def seconds(self, kind: str, *, split: bool) -> tuple[float, Waits]:
        """Return the computing of a pass and what it waits for.

        Args:
            split: the weights' gradients are a pass of their own.
        """
        if kind == "forward":
            return self.forward, self.forward_waits
        if kind == "weights":
            return self.weights, ()
        return self.backward - self.weights * split, self.backward_waits

    def passing(self, kind: str) -> float:
        """Return the seconds of a whole forward or backward with what it waits for."""
        computing, waits = self.seconds(kind, split=False)
        return computing + sum(seconds for _, seconds in waits)

    @property
    def total(self) -> float:
        """Seconds of forward and backward with all waiting."""
        return self.passing("forward") + self.passing("backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """What pipeline ranks exchange over the data axis; each attribute of seconds has one entry for each rank.

    Attributes:
        scatter: seconds in which gradients are summed, when nothing else is on the wires.
        gather: likewise of collecting weights; 0 where they are whole.
        first: part of either beside which nothing runs: weights that the first layer needs, gradients that come last;
            empty for none, else one entry for each rank.
        each: weights are gathered for every pass and gradients scattered after it (ZeRO 3), not once a step.
        once: gradients are scattered after the last micro-batch's alone, all the same.
        overlaps: both go on beside computing.
        overlaps_sums: likewise the scattering after every pass.
        contention: part of the time beside each other that it costs computing.
        buckets: pieces of a stage's gradients, 2 or more.
    """

    scatter: tuple[float, ...]
    gather: tuple[float, ...]
    first: tuple[float, ...] = ()
    each: bool = False
    once: bool = False
    overlaps: bool = True
    overlaps_sums: bool = True
    contention: float = 0.0
    buckets: int = 2

    def piece(self, number: int, seconds: float, place: int) -> float:
        """Return the seconds of one piece of a rank's exchange, the one beside which nothing runs being piece 0."""
        first = self.first_of(number)
        return seconds * (first if place == 0 else (1 - first) / (self.buckets - 1))

    def first_of(self, number: int) -> float:
        """Return the part of a rank's exchanges beside which nothing runs."""
        return self.first[number] if self.first else 0.0

    def around(self, number: int, kind: str, *, share: float, computing: float, last: bool, split: bool) -> float:
        """Return what a pass waits for weights before it and gradients after it, where each pass does.

        Args:
            number: of the rank.
            share: of the rank's layers that the pass goes through.
            computing: seconds that the pass computes.
            last: the pass is of the last micro-batch.
            split: weights' gradients are a pass of their own.
        """
        sums = kind == ("weights" if split else "backward") and (last or not self.once)
        gather = share * self.gather[number] * (kind != "weights")
        scatter = share * self.scatter[number] * sums
        if not self.overlaps:
            return gather + scatter
        first, beside = self.first_of(number), gather + scatter * self.overlaps_sums
        rest = (1 - first) * beside
        waits = first * beside + max(rest - computing, 0.0) + self.contention * min(rest, computing)
        # Of the backward's weights, the first to come are the layer's that has just been used.
        return max(waits - first * gather * (kind == "backward"), 0.0) + scatter * (not self.overlaps_sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step of one pipeline, every card of a stage doing alike.

    Attributes:
        stages: in the order in which a sample meets them; stage s is on pipeline rank s % `pipeline`.
        schedule: gpipe, 1f1b, interleaved or zero_bubble.
        message: bytes that each card sends to the next stage for a micro-batch.
        message_back: likewise of the gradient, to the stage before.
        transfer: seconds of the message with the wires to itself.
        transfer_back: likewise of the gradient.
        landing: seconds until what has come is ready to be used.
        blocks: a rank cannot compute while it sends.
        sharing: ranks to a core, 1 or more; all seconds are those that a rank takes while all are at work, and one
            that waits leaves its part to the others.
        sync: None where nothing is exchanged over the data axis.
        optimizer: seconds of the update.
        fixed: seconds around each step.
    """

    stages: tuple[StageWork, ...]
    schedule: str
    pipeline: int
    micro_batches: int
    message: float = 0.0
    message_back: float = 0.0
    transfer: float = 0.0
    transfer_back: float = 0.0
    landing: float = 0.0
    blocks: bool = False
    sharing: float = 1.0
    sync: Sync | None = None
    optimizer: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if self.pipeline < 1 or not self.stages or len(self.stages) % self.pipeline:
            raise SpecError(
                f"{len(self.stages)} stages on {self.pipeline} pipeline ranks", hint="give each rank as many stages."
            )
        if self.micro_batches < 1:
            raise SpecError(f"{self.micro_batches} micro-batches", hint="give 1 or more.")
        if self.sharing < 1:
            raise SpecError(f"{self.sharing} ranks to a core", hint="give 1 where each has one of its own.")

    @property
    def interleave(self) -> int:
        """Stages of a rank."""
        return len(self.stages) // self.pipeline

    def core_rate(self, active: int) -> float:
        """Return how many times as fast ranks go as while all are at work, when so many pipeline ranks are.

        All of a pipeline rank's cards go on together; none gets more than a whole core.
        """
        return min(self.sharing, self.pipeline / active)

    @property
    def is_split(self) -> bool:
        """Whether weights' gradients are passes of their own."""
        return self.schedule == "zero_bubble"

    def share(self, stage: int) -> float:
        """Return the part of its rank's layers that a stage holds."""
        mine = [one.layers for one in self.stages[stage % self.pipeline :: self.pipeline]]
        return self.stages[stage].layers / sum(mine) if sum(mine) else 1 / len(mine)
