"""How do gradients and sharded weights travel beside the passes? In pieces, in turn, each slowing the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from supernode.schema.order import Action
from supernode.simulation.events.clock import Clock, Job
from supernode.simulation.events.span import Span
from supernode.simulation.events.work import StepWork, Sync


@dataclass(slots=True)
class Lane:
    """What goes on on one pipeline rank's cards.

    Attributes:
        pass_: under way; None while the rank waits.
        computing: part of that pass that computes rather than waits for an axis.
        core: how many times as fast it goes as while all ranks are at work, where they share cores.
        exchange: under way.
        share: part of its rate that the fabric leaves the exchange.
        queue: exchanges that wait for their turn: seconds, what comes after.
    """

    pass_: Job | None = None
    computing: float = 1.0
    core: float = 1.0
    exchange: Job | None = None
    share: float = 1.0
    queue: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)


class Exchanges:
    """The data axis of a step under way.

    Args:
        gathered: called with a stage when another piece of its weights has come.
        changed: called when an exchange begins or the last one ends, so that the fabric is shared anew.
    """

    def __init__(
        self, work: StepWork, clock: Clock, spans: list[Span], *, gathered: Callable[[int], None],
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.lanes = [Lane() for _ in range(work.pipeline)]
        self._work, self._clock, self._spans = work, clock, spans
        self._gathered, self._changed = gathered, changed
        sync = work.sync
        self._beside: Sync | None = sync if sync and sync.overlaps and not sync.each else None
        self._here: dict[int, int] = {}
        self._ready: dict[tuple[int, int], set[int]] = {}

    def gather_all(self) -> None:
        """Begin to gather weights on all ranks at once, those of the first stages first."""
        if self._beside is None:
            return
        for stage in range(len(self._work.stages)):
            number = stage % self._work.pipeline
            whole = self._beside.gather[number] * self._work.share(stage)
            for place in range(self._beside.buckets if whole else 0):
                seconds = self._beside.piece(number, whole, place)
                self._enqueue(number, seconds, lambda stage=stage: self._got(stage))  # type: ignore[misc]

    def pieces(self, action: Action) -> int:
        """Return into how many pieces a pass falls: one for each bucket that travels beside it."""
        return self._beside.buckets if self._beside and (self.gates(action) or self.sums(action)) else 1

    def gates(self, action: Action) -> bool:
        """Return whether a pass needs weights that are on their way."""
        if self._beside is None or action.kind != "forward" or action.micro_batch:
            return False
        return self._beside.gather[action.stage % self._work.pipeline] > 0

    def sums(self, action: Action) -> bool:
        """Return whether a pass completes gradients that are to be summed."""
        last = action.micro_batch == self._work.micro_batches - 1
        kind = "weights" if self._work.is_split else "backward"
        return self._beside is not None and last and action.kind == kind

    def is_here(self, stage: int, piece: int) -> bool:
        """Return whether a piece of a stage's weights has come."""
        return self._here.get(stage, 0) > piece

    def complete(self, stage: int, piece: int) -> None:
        """Note that a piece of gradients is complete; all ranks begin to exchange it when the first has it, too.

        Source: Megatron-LM's `align_grad_reduce`, so that no rank's exchange slows what others wait for.
        """
        assert self._beside is not None
        local, number = divmod(stage, self._work.pipeline)
        ready = self._ready.setdefault((local, piece), set())
        ready.add(number)
        for other in sorted(ready) if number == 0 else [number] if 0 in ready else []:
            whole = self._beside.scatter[other] * self._work.share(local * self._work.pipeline + other)
            # The backward ends where the forward began.
            self._enqueue(other, self._beside.piece(other, whole, self._beside.buckets - 1 - piece), lambda: None)

    def adjust(self, number: int) -> None:
        """Set the rates of a rank's pass and exchange: side by side, each slows the other by the contention h.

        While the pass waits for the tensor, context or expert axis, the exchange does; over both, a pass of which a
        part c computes slows to 1 / (1 + h c).
        """
        lane, beside = self.lanes[number], 1.0
        if lane.pass_ and lane.exchange and self._beside:
            slowed = 1 / (1 + self._beside.contention * lane.computing)
            beside = max(lane.computing * slowed, 1e-9)
            self._clock.set_rate(lane.pass_, slowed * lane.core)
        elif lane.pass_:
            self._clock.set_rate(lane.pass_, lane.core)
        if lane.exchange:
            self._clock.set_rate(lane.exchange, beside * lane.share)

    def _got(self, stage: int) -> None:
        self._here[stage] = self._here.get(stage, 0) + 1
        self._gathered(stage)

    def _enqueue(self, number: int, seconds: float, done: Callable[[], None]) -> None:
        self.lanes[number].queue.append((seconds, done))
        if self.lanes[number].exchange is None:
            self._next(number)

    def _next(self, number: int) -> None:
        lane = self.lanes[number]
        seconds, done = lane.queue.popleft()
        began = self._clock.now

        def ended() -> None:
            lane.exchange = None
            self._spans.append(
                Span(rank=number, stage=-1, kind="data", micro_batch=-1, start=began, end=self._clock.now)
            )
            if lane.queue:
                self._next(number)
            else:
                lane.share = 1.0
                self.adjust(number)
                self._changed()
            done()

        begins = lane.share == 1.0
        lane.exchange = self._clock.start(seconds, ended)
        self.adjust(number)
        if begins:
            self._changed()
