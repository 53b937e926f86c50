"""When is what is under way through? A virtual clock whose jobs may go faster or slower meanwhile."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Job:
    """Something under way.

    Attributes:
        left: seconds of it at rate 1, as of `since`.
        done: called when it is through.
        rate: seconds of it that pass in a second.
        version: counts the changes, so that what was foreseen before is known to be void.
    """

    left: float
    done: Callable[[], None]
    rate: float = 1.0
    since: float = 0.0
    version: int = 0


class Clock:
    """Virtual time, and the jobs in it; of jobs that end at once, the one foreseen first goes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Job]] = []
        self._count = 0

    def start(self, seconds: float, done: Callable[[], None]) -> Job:
        """Begin a job of so many seconds at rate 1."""
        job = Job(left=seconds, done=done, since=self.now)
        self._foresee(job)
        return job

    def set_rate(self, job: Job, rate: float) -> None:
        """Let a job go on at another rate, above 0."""
        if rate == job.rate:
            return
        job.left = max(0.0, job.left - (self.now - job.since) * job.rate)
        job.since, job.rate = self.now, rate
        job.version += 1
        self._foresee(job)

    def run(self) -> None:
        """Let time pass until nothing is under way."""
        while self._heap:
            time, _, version, job = heapq.heappop(self._heap)
            if version == job.version:
                self.now = time
                job.version += 1
                job.done()

    def _foresee(self, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + job.left / job.rate, self._count, job.version, job))
