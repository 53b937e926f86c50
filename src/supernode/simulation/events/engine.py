"""When does what happen? Passes, messages and exchanges of one step in virtual time, each at the rate it can have."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from supernode.schema.order import Action, rank_order
from supernode.simulation.events.clock import Clock, Job
from supernode.simulation.events.exchange import Exchanges
from supernode.simulation.events.span import Kind, Span
from supernode.simulation.events.wire import Key, Wire
from supernode.simulation.events.work import StepWork


@dataclass(slots=True, kw_only=True)
class _Rank:
    """How far a pipeline rank is.

    Attributes:
        order: passes it runs.
        place: of the next one, or of the one under way.
        piece: of that pass.
        began: when that pass did.
        is_held: it cannot compute, as it is sending.
    """

    order: list[Action]
    place: int = 0
    piece: int = 0
    began: float = 0.0
    is_held: bool = False


class Engine:
    """A step under way.

    Args:
        wire: what carries messages; None lets each have its time alone.
        speed: of each pipeline rank's cards, 1 for as fast as planned.
    """

    def __init__(self, work: StepWork, *, wire: Wire | None = None, speed: Sequence[float] = ()) -> None:
        self.spans: list[Span] = []
        self._clock = Clock()
        self._work, self._wire = work, wire
        self._speed = tuple(speed) or (1.0,) * work.pipeline
        self._exchanges = Exchanges(
            work, self._clock, self.spans, gathered=lambda stage: self._go(self._at(stage)), changed=self._share_wires
        )
        shape = {"pipeline": work.pipeline, "interleave": work.interleave, "micro_batches": work.micro_batches}
        self._ranks = [_Rank(order=rank_order(work.schedule, rank=r, **shape)) for r in range(work.pipeline)]
        self._arrived = {Action(stage=0, kind="forward", micro_batch=n) for n in range(work.micro_batches)}
        self._sending: dict[Key, Job] = {}
        self._waiting: dict[Key, deque[Action]] = {}

    def run(self) -> float:
        """Run until nothing is left to do; return the seconds."""
        self._exchanges.gather_all()
        for rank in range(len(self._ranks)):
            self._go(rank)
        self._clock.run()
        assert all(rank.place == len(rank.order) for rank in self._ranks), "the order deadlocks"
        return self._clock.now

    def _at(self, stage: int) -> int:
        return stage % self._work.pipeline

    def _go(self, number: int) -> None:
        """Let a rank begin its next piece of a pass if all it needs is there."""
        rank, lane = self._ranks[number], self._exchanges.lanes[number]
        if lane.pass_ or rank.is_held or rank.place == len(rank.order):
            return
        action = rank.order[rank.place]
        if action.kind != "weights" and action not in self._arrived:
            return
        if self._exchanges.gates(action) and not self._exchanges.is_here(action.stage, rank.piece):
            return
        if rank.piece == 0:
            rank.began = self._clock.now
        seconds, lane.computing = self._seconds(number, action)
        lane.pass_ = self._clock.start(seconds / self._exchanges.pieces(action), lambda: self._end_piece(number))
        self._exchanges.adjust(number)
        self._share_cores()

    def _seconds(self, number: int, action: Action) -> tuple[float, float]:
        """Return the seconds of a pass and which part of them computes."""
        work, stage = self._work, self._work.stages[action.stage]
        computing, waits = stage.seconds(action.kind, split=work.is_split)
        computing /= self._speed[number]
        waiting = sum(seconds for _, seconds in waits)
        if work.sync and work.sync.each:
            waiting += work.sync.around(
                number, action.kind, share=work.share(action.stage), computing=computing,
                last=action.micro_batch == work.micro_batches - 1, split=work.is_split,
            )  # fmt: skip
        whole = computing + waiting
        return whole, computing / whole if whole else 1.0

    def _end_piece(self, number: int) -> None:
        rank, action = self._ranks[number], self._ranks[number].order[self._ranks[number].place]
        self._exchanges.lanes[number].pass_ = None
        self._exchanges.adjust(number)
        if self._exchanges.sums(action):
            self._exchanges.complete(action.stage, rank.piece)
        rank.piece += 1
        if rank.piece == self._exchanges.pieces(action):
            rank.piece = 0
            rank.place += 1
            self._note(number, action, rank.began)
            self._pass_on(number, action)
        self._go(number)
        self._share_cores()

    def _share_cores(self) -> None:
        """Let all ranks that are at work share the cores; one that sends copies, and has its part."""
        if self._work.sharing <= 1:
            return
        lanes = self._exchanges.lanes
        active = sum(lane.pass_ is not None or rank.is_held for lane, rank in zip(lanes, self._ranks, strict=True))
        for number, lane in enumerate(lanes):
            lane.core = self._work.core_rate(max(active, 1))
            self._exchanges.adjust(number)

    def _note(self, number: int, action: Action, start: float) -> None:
        """Record a pass, and at its end what it waited for."""
        _, waits = self._work.stages[action.stage].seconds(action.kind, split=self._work.is_split)
        end = self._clock.now
        spans: list[tuple[Kind, float, float]] = [(action.kind, start, end)]
        for kind, seconds in waits:
            spans.append((kind, max(start, end - seconds), end))
            end -= seconds
        for kind, began, ended in spans:
            self.spans.append(
                Span(rank=number, stage=action.stage, kind=kind, micro_batch=action.micro_batch, start=began, end=ended)
            )

    def _pass_on(self, number: int, action: Action) -> None:
        """Give a pass's result to the pass that takes it up."""
        follower = self._follower(action)
        if follower is None:
            return
        to = self._at(follower.stage)
        if to == number or not (self._wire or self._work.transfer):
            self._arrive(to, follower)
            return
        key = ("send", number, to)
        self._waiting.setdefault(key, deque()).append(follower)
        self._ranks[number].is_held = self._work.blocks
        if key not in self._sending:
            self._send(key)

    def _follower(self, action: Action) -> Action | None:
        last = len(self._work.stages) - 1
        if action.kind == "weights":
            return None
        if action.kind == "forward" and action.stage < last:
            return Action(stage=action.stage + 1, kind="forward", micro_batch=action.micro_batch)
        before = action.stage if action.kind == "forward" else action.stage - 1
        return Action(stage=before, kind="backward", micro_batch=action.micro_batch) if before >= 0 else None

    def _arrive(self, number: int, action: Action) -> None:
        self._arrived.add(action)
        self._go(number)

    def _send(self, key: Key) -> None:
        """Put the next message of one rank to another on the wire; messages between the same two go in turn."""
        action, began = self._waiting[key].popleft(), self._clock.now
        work, is_ahead = self._work, action.kind == "forward"
        seconds, after = work.transfer if is_ahead else work.transfer_back, work.landing
        if self._wire:
            nbytes = work.message if is_ahead else work.message_back
            seconds, after = nbytes / self._wire.alone(key), self._wire.latency(key) + work.landing

        def sent() -> None:
            del self._sending[key]
            # Of the sender's stage: a forward comes from the one before, a backward from the one after.
            stage, now = action.stage - 1 if is_ahead else action.stage + 1, self._clock.now
            self.spans.append(
                Span(rank=key[1], stage=stage, kind="send", micro_batch=action.micro_batch, start=began, end=now,
                     to=key[2])
            )  # fmt: skip
            if self._waiting[key]:
                self._send(key)
            else:
                self._share_wires()
            self._clock.start(after, came)

        def came() -> None:
            self._ranks[key[1]].is_held = False
            self._arrive(key[2], action)
            self._go(key[1])
            self._share_cores()

        self._sending[key] = self._clock.start(seconds, sent)
        self._share_wires()

    def _share_wires(self) -> None:
        """Let all that is on the wires share them."""
        if self._wire is None:
            return
        lanes = enumerate(self._exchanges.lanes)
        exchanging = {n: lane for n, lane in lanes if lane.exchange and self._wire.carries(("sync", n, n))}
        active = frozenset(self._sending) | {("sync", n, n) for n in exchanging}
        if not self._sending:
            speeds = dict.fromkeys(active, 1.0)  # ranks' own exchanges share no link
        else:
            speeds = self._wire.speeds(active)
        for key, job in self._sending.items():
            self._clock.set_rate(job, speeds[key])
        for number, lane in exchanging.items():
            lane.share = speeds["sync", number, number]
            self._exchanges.adjust(number)
