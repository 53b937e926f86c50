"""What would a long run meet? A backend in virtual time, with failures, for the same drive loop that real runs use."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator

from supernode.errors import RunError, SpecError
from supernode.planning.memory import moments
from supernode.planning.work import ELEMENT_BYTES
from supernode.schema.event import (
    Await,
    CardChecked,
    Event,
    KillRanks,
    Launch,
    RankLost,
    RankReady,
    RanksEnded,
    Saved,
    StepDone,
)
from supernode.schema.plan import Plan

Moment = tuple[float, Event]
SAVED_BYTES = {"float32": 4, "float8": 2}
"""Of a moment in a checkpoint; one in 8 bits is saved in bfloat16 (`precision.moments`), others as the weights are."""


class SimulatedBackend:
    """Ranks that need no time: they get ready, step, save, fail and end when the virtual clock says so.

    Cards fail independently, at exponentially distributed times; a card that failed is replaced by the next launch.
    Losses are not simulated: every `StepDone` carries 0.
    """

    _life: Iterator[Moment]
    _next: Moment | None
    _failure: Moment | None

    def __init__(
        self,
        plan: Plan,
        *,
        mtbf: float = math.inf,
        seed: int = 0,
        save_seconds: float = 0.0,
        load_seconds: float = 0.0,
        launch_seconds: float = 0.0,
        step_seconds: float | None = None,
    ) -> None:
        """Take the numbers of the cluster.

        Args:
            mtbf: mean time between failures of one card, in seconds.
            save_seconds: that a checkpoint stops training.
            load_seconds: from the start of the ranks until a checkpoint is loaded.
            launch_seconds: until the ranks have started.
            step_seconds: of one step; None for what each launched plan predicts.

        Raises:
            SpecError: a number is not one, or the plan predicts no time and none is given.
        """
        for key, value in (("mtbf", mtbf), ("step_seconds", 1.0 if step_seconds is None else step_seconds)):
            if not value > 0:
                raise SpecError(f"`{key}` is {value}", hint="give seconds above 0.")
        for key, value in (("save", save_seconds), ("load", load_seconds), ("launch", launch_seconds)):
            if not (value >= 0 and math.isfinite(value)):
                raise SpecError(f"`{key}_seconds` is {value}", hint="give finite seconds, 0 or more.")
        self._mtbf, self._save, self._start = mtbf, save_seconds, launch_seconds + load_seconds
        self._step_seconds = step_seconds
        self._seconds_of(plan)
        self._random = random.Random(seed)
        self._clock = 0.0
        self._stopping = False
        self._incarnation = 0
        self._steps: dict[str, int] = {"": 0}
        self._end_life()

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._clock

    def launch(self, command: Launch) -> None:
        """Start every rank of the command's plan."""
        plan = command.plan
        self._stopping = False
        self._incarnation = command.incarnation
        self._life = self._live(plan, command.incarnation, self._step_of(command.checkpoint))
        self._next = next(self._life, None)
        self._failure = None
        if math.isfinite(self._mtbf):
            after = self._random.expovariate(plan.ranks / self._mtbf)
            self._failure = self._clock + after, self._lost(self._random.randrange(plan.ranks), "card failed")

    def kill_ranks(self, command: KillRanks) -> None:
        """End every rank of that launch; nothing more is heard of it."""
        if command.incarnation == self._incarnation:
            self._end_life()

    def in_memory(self) -> int:
        """Return -1: nodes keep nothing here."""
        return -1

    def kill_rank(self, rank: int) -> None:
        """Kill one rank now."""
        if self._next is not None:
            self._failure = self._clock, self._lost(rank, "killed on purpose")

    def await_card(self, command: Await) -> None:
        """Find the card in order at once: here it is replaced by the next launch."""
        self._life, self._failure = iter(()), None
        self._next = self._clock, CardChecked(card=command.card, is_up=True)

    def ask_to_stop(self) -> None:
        """Let the ranks save after the step that they are in and leave."""
        self._stopping = True

    def poll(self, timeout: float) -> list[Event]:
        """Return what happens next, all of one moment, and let the clock go there.

        Args:
            timeout: seconds that pass where nothing is to come; otherwise time goes as far as it must.
        """
        failure, coming = self._failure, self._next
        if failure is not None and (coming is None or failure[0] <= coming[0]):
            self._clock = max(self._clock, failure[0])
            self._end_life()
            return [failure[1]]
        if coming is None:
            self._clock += max(0.0, timeout)
            return []
        self._clock = coming[0]
        events = []
        while self._next is not None and self._next[0] == self._clock:
            events.append(self._next[1])
            self._next = next(self._life, None)
        return events

    def close(self) -> None:
        """Let go of everything."""
        self._end_life()

    def _live(self, plan: Plan, incarnation: int, step: int) -> Iterator[Moment]:
        """Yield what undisturbed ranks report, and when; the request to stop is looked at after every step."""
        job, now = plan.job, self._clock + self._start
        step_seconds = self._seconds_of(plan)
        for rank in range(plan.ranks):
            yield now, RankReady(rank=rank, incarnation=incarnation, seconds=self._start)
        while step < job.steps and not self._stopping:
            step += 1
            now += step_seconds
            yield now, self._step_done(plan, incarnation, step, step_seconds)
            if self._stopping or step == job.steps or job.checkpoint.is_due(step):
                now += self._save
                yield now, self._saved(plan, step)
        yield now, RanksEnded(incarnation=incarnation, step=step)

    def _step_done(self, plan: Plan, incarnation: int, step: int, seconds: float) -> StepDone:
        return StepDone(
            step=step,
            incarnation=incarnation,
            loss=0.0,
            seconds=seconds,
            tokens=plan.tokens_per_step,
            norm=0.0,
            rate=0.0,
            parts={},
        )

    def _saved(self, plan: Plan, step: int) -> Saved:
        name = f"step-{step:08d}"
        self._steps[name] = step
        element = ELEMENT_BYTES[plan.job.precision]
        nbytes = plan.parameters * (element + moments(plan.job) * SAVED_BYTES.get(plan.job.optimizer.state, element))
        return Saved(step=step, checkpoint=name, nbytes=nbytes, seconds=self._save)

    def _lost(self, rank: int, reason: str) -> RankLost:
        return RankLost(rank=rank, incarnation=self._incarnation, reason=reason)

    def _end_life(self) -> None:
        self._life, self._next, self._failure = iter(()), None, None

    def _seconds_of(self, plan: Plan) -> float:
        if self._step_seconds is not None:
            return self._step_seconds
        if plan.step is None:
            raise SpecError(
                f"{plan.job.name} trains your own module, and nothing predicts its step",
                hint="give `step_seconds`, measured on a short run.",
            )
        return plan.step.total

    def _step_of(self, checkpoint: str) -> int:
        """Return the step that a checkpoint holds: its own by memory, another's by the number that ends its name."""
        if checkpoint in self._steps:
            return self._steps[checkpoint]
        number = re.search(r"(\d+)\D*$", checkpoint)
        if not number:
            raise RunError(f"no step is known of checkpoint {checkpoint!r}", hint="end its name with its step.")
        return int(number[1])
