"""What does a run of months meet? Failures of many causes and state in tiers, for the drive loop that real runs use."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from supernode.errors import SpecError
from supernode.schema.event import Event, Kept, Launch, RankLost, RankReady, RanksEnded, Restored
from supernode.schema.plan import Plan
from supernode.simulation.cluster import Moment, SimulatedBackend

SOURCES = ("memory", "partner", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a job is interrupted.

    Attributes:
        rate: interruptions of the job per second.
        source: the nearest place that still has the state: `memory`, `partner` or `disk`.
        pause: seconds until all ranks have their state again.
    """

    name: str
    rate: float
    source: str
    pause: float

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise SpecError(f"`source` of {self.name} is {self.source!r}", hint=f"choose one of {', '.join(SOURCES)}.")
        if not (0 <= self.rate < math.inf and 0 <= self.pause < math.inf):
            raise SpecError(
                f"{self.name} comes {self.rate} times/s, for {self.pause} s", hint="give finite numbers of 0 or more."
            )


class MonthsBackend(SimulatedBackend):
    """Ranks in virtual time whose failures have causes, and whose state is in memory, at a partner and on disk.

    What a failure leaves decides where the next launch goes on from; the controller only says which checkpoint is on
    disk, as with real ranks.

    Attributes:
        met: interruptions so far, by cause; one that comes within a pause counts, too.
    """

    def __init__(
        self, plan: Plan, *, causes: Sequence[Cause], step_seconds: float, seed: int = 0, keep_every: int = 1,
        keep_seconds: float = 0.0, save_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """Take the numbers of the job.

        Args:
            causes: of interruptions, independent of each other, each at a constant rate.
            step_seconds: of one step.
            keep_every: steps between two copies into the memory of the own and the partner's node; 0 for none.
            keep_seconds: that such a copy stops training.
            save_seconds: that a checkpoint on disk stops training; it is written as often as the job says.

        Raises:
            SpecError: a number is outside its limits.
        """
        if keep_every < 0 or not 0 <= keep_seconds < math.inf:
            raise SpecError(
                f"state is kept every {keep_every} steps, in {keep_seconds} s", hint="give numbers of 0 or more."
            )
        super().__init__(plan, seed=seed, step_seconds=step_seconds, save_seconds=save_seconds)
        self.met: Counter[str] = Counter()
        self._causes, self._rate = tuple(causes), sum(cause.rate for cause in causes)
        self._dice = random.Random(seed)
        self._keep_every, self._keep_seconds = keep_every, keep_seconds
        self._kept = 0
        self._last: Cause | None = None
        self._source, self._from = "start", 0

    def launch(self, command: Launch) -> None:
        """Start the ranks from the newest state that the last failure has left."""
        on_disk = self._step_of(command.checkpoint)
        last = self._last
        if last is None or last.source == "disk" or self._kept <= on_disk:
            self._source, self._from = "disk" if command.checkpoint else "start", on_disk
            self._kept = 0
        else:
            self._source, self._from = last.source, self._kept
        self._start = last.pause if last is not None else 0.0
        super().launch(command)
        if self._rate:
            after = self._dice.expovariate(self._rate)
            cause = self._dice.choices(self._causes, weights=[each.rate for each in self._causes])[0]
            rank = self._dice.randrange(command.plan.ranks)
            lost = RankLost(rank=rank, incarnation=command.incarnation, reason=cause.name)
            self._failure, self._coming = (self._clock + after, lost), cause

    def poll(self, timeout: float) -> list[Event]:
        """Return what happens next, as simulated ranks do, and remember what is in memory and what failed."""
        events = super().poll(timeout)
        for event in events:
            if isinstance(event, Kept):
                self._kept = event.step
            elif isinstance(event, RankLost):
                self.met[event.reason] += 1
                self._last = self._coming
        return events

    def in_memory(self) -> int:
        """Return the newest step whose state the last failure has left in memory, -1 for none."""
        return -1 if self._last is None or self._last.source == "disk" else self._kept or -1

    def _live(self, plan: Plan, incarnation: int, step: int) -> Iterator[Moment]:
        job, step, now = plan.job, self._from, self._clock + self._start
        seconds = self._seconds_of(plan)
        yield now, Restored(incarnation=incarnation, step=step, source=self._source)
        for rank in range(plan.ranks):
            yield now, RankReady(rank=rank, incarnation=incarnation, seconds=self._start)
        while step < job.steps and not self._stopping:
            step += 1
            now += seconds
            yield now, self._step_done(plan, incarnation, step, seconds)
            if self._keep_every and step % self._keep_every == 0:
                now += self._keep_seconds
                yield now, Kept(step=step)
            if self._stopping or step == job.steps or job.checkpoint.is_due(step):
                now += self._save
                yield now, self._saved(plan, step)
        yield now, RanksEnded(incarnation=incarnation, step=step)
