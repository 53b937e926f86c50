"""What do ranks say, and which of them are lost? Words and silences of processes, turned into events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from supernode.backends.rank import Rank
from supernode.schema.event import (
    Diverged,
    Evaluated,
    Event,
    Kept,
    Noted,
    RankFailed,
    RankLost,
    RankReady,
    Saved,
    StepDone,
    Timed,
    Unsaved,
)

BACK_SECONDS = 2.0
"""How long a rank that was told to begin again may take to let go of what it did."""
_START_SECONDS = 120.0
_BLAME_SECONDS = 0.5
"""How long a rank that lost a peer waits for that peer's own end, which tells more."""
_FACTS = (StepDone, Evaluated, Saved, Unsaved, Kept, Noted)
"""What a rank or keeper says that does not end with it."""

Saving = Callable[[int, dict[str, Any], float, int], None]
"""Told of a save that ranks have handed over: step, manifest, seconds that they stood still, incarnation."""


class Ranks:
    """The ranks of a launch, as the controller's side hears of them.

    Args:
        saving: told of saves.

    Attributes:
        incarnation: of the newest launch.
        launched: when it was, by `time.monotonic`.
        events: that nobody has taken yet.
    """

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._ranks: dict[int, Rank] = {}
        self._unexplained: tuple[float, RankLost] | None = None
        self.incarnation = 0
        self.memory_lost = ""
        self.launched = 0.0
        self.events: deque[Event] = deque()

    def __iter__(self) -> Iterator[Rank]:
        return iter(list(self._ranks.values()))

    def __contains__(self, number: object) -> bool:
        return number in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def get(self, number: int) -> Rank | None:
        """Return a rank by its number."""
        return self._ranks.get(number)

    def add(self, rank: Rank) -> None:
        """Take a new process in."""
        self._ranks[rank.number] = rank

    def remove(self, rank: Rank) -> None:
        """Let go of one."""
        self._ranks.pop(rank.number, None)

    def begin(self, incarnation: int) -> None:
        """Hear of a new launch from now on; what is said of earlier ones loses nobody any more."""
        self.hear_all()
        self.incarnation, self._unexplained = incarnation, None

    def clear(self) -> None:
        """Forget all, and of what is still to be told all but what stays true without them."""
        self._ranks.clear()
        self.events = deque(event for event in self.events if isinstance(event, _FACTS))
        self._unexplained = None

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call."""
        if self._unexplained is not None and time.monotonic() > self._unexplained[0]:
            self.events.append(self._unexplained[1])
            self._unexplained = None
        found = list(self.events)
        self.events.clear()
        return found

    def hear(self, rank: Rank) -> None:
        """Take in what a rank has said."""
        while (message := rank.line.take()) is not None:
            self._take(rank, message)

    def hear_all(self) -> None:
        """Take in what ranks said and nobody has read yet: what they found out counts, whatever becomes of them."""
        for rank in self:
            self.hear(rank)

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        kind, incarnation = message.pop("kind"), message.pop("incarnation")
        message.pop("fds")
        rank.pulse(message if kind == "pulse" else {})
        if kind == "pulse":
            return
        if kind == "step":
            self.events.append(StepDone(incarnation=incarnation, **message))
        elif kind == "evaluated":
            self.events.append(Evaluated(**message))
        elif kind == "saving":
            self._saving(message["step"], message["manifest"], message["stall"], incarnation)
        elif kind == "unsaved":
            self.events.append(
                Unsaved(
                    step=message["step"], reason="the save before it is still on its way to disk",
                    hint="save less often with `checkpoint.every`, or to a faster disk.",
                )
            )  # fmt: skip
        elif kind == "note":
            self.events.append(Noted(**message))
        if incarnation == self.incarnation:
            self._take_current(rank, kind, message)

    def _take_current(self, rank: Rank, kind: str, message: dict[str, Any]) -> None:
        """Take in what is of the launch that goes on."""
        rank.heard, rank.spoke = time.monotonic(), True
        since = rank.heard - self.launched
        if kind == "met":
            rank.met_seconds, rank.has_met = since, True
        elif kind == "ready":
            self.events.append(
                RankReady(
                    rank=rank.number, incarnation=self.incarnation, seconds=since, met_seconds=rank.met_seconds
                )
            )  # fmt: skip
        elif kind == "timed":
            self.events.append(Timed(incarnation=self.incarnation, step=message["step"], busy=tuple(message["busy"])))
        elif kind == "diverged":
            self.events.append(
                Diverged(
                    incarnation=self.incarnation, step=message["step"], ranks=tuple(message["ranks"]),
                    what=message["what"],
                )
            )  # fmt: skip
        elif kind == "memory_lost":
            self.memory_lost = rank.lost_peer = message["message"]
            self._unexplained = time.monotonic(), self._lost(rank, rank.lost_peer, blamed=False)
        elif kind == "peer_lost":
            rank.lost_peer = message["message"]
            if self._unexplained is None:
                lost = self._lost(rank, f"lost a peer: {rank.lost_peer}", blamed=False)
                self._unexplained = time.monotonic() + _BLAME_SECONDS, lost
        elif kind == "failed":
            rank.failed = message
        elif kind == "done":
            rank.done = True
        rank.step = message.get("step", rank.step)

    def exited(self, rank: Rank, code: int) -> None:
        """Judge a rank's end by the last words it sent and its exit code."""
        self.hear(rank)
        rank.told_end = True
        if rank.failed or not rank.done or code:
            self.hear_all()  # What others said comes first: what to go on from is decided when the loss is heard.
        if rank.failed:
            self._unexplained = None
            self.events.append(
                RankFailed(
                    rank=rank.number, incarnation=self.incarnation, kind=rank.failed["error"],
                    message=rank.failed["message"], hint=rank.failed["hint"],
                )
            )  # fmt: skip
        elif (not rank.done or code) and not rank.is_lost:
            self.lose(rank, f"killed by signal {-code}" if code < 0 else f"exit code {code}")

    def lose(self, rank: Rank, reason: str) -> None:
        """Count a rank as lost."""
        rank.is_lost = True
        self._unexplained = None
        self.events.append(self._lost(rank, reason))

    def lose_all(self, reason: str) -> None:
        """Count all ranks as lost by what is no card's fault."""
        self.events.append(RankLost(rank=0, incarnation=self.incarnation, reason=reason, blamed=False))

    def _lost(self, rank: Rank, reason: str, *, blamed: bool = True) -> RankLost:
        return RankLost(rank=rank.number, incarnation=self.incarnation, reason=reason, blamed=blamed)

    @property
    def are_done(self) -> bool:
        """Whether all have left as they should."""
        return bool(self._ranks) and all(rank.told_end and rank.done for rank in self)

    @property
    def late(self) -> list[Rank]:
        """Ranks that do not begin again, as they were told to."""
        return [rank for rank in self._alive if rank.is_late(BACK_SECONDS)]

    @property
    def _alive(self) -> list[Rank]:
        return [rank for rank in self if not rank.told_end and not rank.is_lost]

    def missed(self, *, frozen: float, silence: float) -> Rank | None:
        """Return a rank that lives and does not go on, which now counts as lost; None for none.

        Args:
            frozen: seconds without a sign of life from one rank.
            silence: seconds without progress of any rank, of which the one that the others wait for is returned.
        """
        alive = self._alive
        for rank in alive:
            if rank.is_frozen(frozen):
                self.lose(rank, f"frozen: no sign of life for {frozen:g} s")
                return rank
        if not alive:
            return None
        behind = min(alive, key=lambda rank: (rank.has_pulse, rank.waits, rank.step, rank.heard))
        silent = time.monotonic() - max(rank.heard for rank in alive)
        # Before their first word the server may still be importing torch.
        limit = silence if all(rank.spoke for rank in alive) else max(silence, _START_SECONDS)
        if silent <= limit:
            return None
        for rank in alive:
            rank.heard = time.monotonic()
        waiting = [str(rank.number) for rank in alive if rank.waits and rank is not behind]
        told = f"ranks {', '.join(waiting)} wait for it in a collective" if waiting else "no rank went on"
        place = f" ({behind.at})" if behind.at else ""
        self.lose(behind, f"{told} for {silent:.0f} s; it is at step {behind.step}{place}")
        return behind
