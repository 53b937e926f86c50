"""What happened and what is to be done: the facts that a journal keeps, and the commands that answer them.

A run's state is a fold over its events, so an event holds all that a controller needs to go on after its own death.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from supernode.schema.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A controller took the run up: for the first time, or again.

    Attributes:
        plan: what is to run now.
        checkpoints: (step, name) of the checkpoints on disk, oldest first; the newest whole one is gone on from.
        spares: cards that the run holds besides those of its plan.
    """

    plan: Plan
    checkpoints: tuple[tuple[int, str], ...] = ()
    spares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """A rank is loaded and has met the others.

    Attributes:
        seconds: since the ranks were launched.
        met_seconds: of these, until its first collective was done.
    """

    rank: int
    incarnation: int
    seconds: float
    met_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One optimizer step ended.

    Attributes:
        step: steps done, 1 after the first.
        loss: mean over the samples (tokens) of the step.
        seconds: wall time of the step on the reporting rank.
        parts: seconds by part of the step: data, compute, sync, optimizer, wait.
        norm: of the whole gradient, before clipping.
        rate: learning rate.
        skipped: its gradients overflowed in float16, so that no weight has moved.
    """

    step: int
    incarnation: int
    loss: float
    seconds: float
    tokens: int
    norm: float
    rate: float
    parts: Mapping[str, float]
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What the ranks' passes took of late.

    Attributes:
        busy: seconds of forward and backward in a step, by rank: the median since the last look.
    """

    step: int
    incarnation: int
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """Which ranks are slow now: how many times their peers' time each takes. Empty: none any more."""

    step: int
    ranks: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """Work is to move: once the ranks have saved and left, they start again with this plan."""

    step: int
    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The model was tried on held-out data after `step` steps."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A whole checkpoint is on disk.

    Attributes:
        nbytes: written anew for it.
        seconds: that training stood still for it.
        took: seconds until it was on disk, training going on.
    """

    step: int
    checkpoint: str
    nbytes: int
    seconds: float
    took: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaved:
    """A checkpoint did not get to disk; the run goes on, and earlier ones are as they were."""

    step: int
    reason: str
    hint: str = ""
    kind: str = "CheckpointError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The state of all ranks after `step` steps is in memory, and copied to partners where there are any."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The ranks of a launch go on from here.

    Attributes:
        source: `memory` of the ranks' own nodes, a `partner`'s, `disk`, or the `start`.
    """

    incarnation: int
    step: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A checkpoint is not whole or not there, so another one is used.

    Attributes:
        others: (step, name) of the checkpoints that the disk has instead, oldest first. The word that one was saved is
            lost with the rank that should have said it.
    """

    checkpoint: str
    reason: str
    others: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank is gone or silent: a card failed, the process was killed, the node died.

    Attributes:
        blamed: its own card counts as the cause; else `rank` is only who told of it.
    """

    rank: int
    incarnation: int
    reason: str
    blamed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """Copies that must be alike are not: some card computes or remembers wrongly, and says nothing.

    Attributes:
        step: steps done when it was found.
        ranks: that differ from the most; all of them where no most agree.
        what: differs: weights or gradients, and among which ranks.
    """

    step: int
    incarnation: int
    ranks: tuple[int, ...]
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A card is not used any more; the ranks start again with this plan.

    Attributes:
        plan: on the cards that the run uses from now on; None: it waits for the card.
        spares: that are left.
    """

    card: int
    reason: str
    plan: Plan | None
    spares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardChecked:
    """A card that the run waits for has passed a check, or has not within the time that was left to it."""

    card: int
    is_up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spiked:
    """A loss lies far above what it has been of late.

    Attributes:
        usual: running mean before it.
        deviation: running standard deviation before it.
    """

    step: int
    loss: float
    usual: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank met an error of the user's making; starting it again would meet it again."""

    rank: int
    incarnation: int
    kind: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnded:
    """Every rank of the incarnation has left, as it should: done, or stopped after a checkpoint."""

    incarnation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """A person wants the run to stop: after a checkpoint, or `now`."""

    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something worth keeping that changes nothing: a baseline, a sample of text, a drill."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The controller is done with the run.

    Attributes:
        outcome: `finished`, `stopped` (resumable), or `failed` (resumable once the cause is gone).
        message: why, for people.
    """

    outcome: str
    message: str = ""
    hint: str = ""
    kind: str = ""


Event = (
    Started | RankReady | StepDone | Timed | Slowed | Replanned | Evaluated | Saved | Unsaved | Kept | Restored
    | Rejected | RankLost | Diverged | Fenced | CardChecked | Spiked | RankFailed | RanksEnded | StopAsked | Noted
    | Ended
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start every rank of `plan` from `checkpoint` (empty: from the start), or from memory where that is newer.

    Attributes:
        keep: ranks that live keep their processes, and begin again in them.
    """

    incarnation: int
    plan: Plan
    checkpoint: str
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRanks:
    """End every rank that is left, at once."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRank:
    """Kill one rank on purpose (a drill)."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Check a card again and again, for at most so many seconds, and tell what came of it."""

    card: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Note what was concluded, as an event of its own."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class AskToStop:
    """Tell the ranks to save after the step that they are in and leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Write the report and let go of the run."""

    ended: Ended


Command = Launch | KillRanks | KillRank | Await | Tell | AskToStop | Finish

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Started, RankReady, StepDone, Timed, Slowed, Replanned, Evaluated, Saved, Unsaved, Kept, Restored, Rejected,
        RankLost, Diverged, Fenced, CardChecked, Spiked, RankFailed, RanksEnded, StopAsked, Noted, Ended,
    )
}  # fmt: skip
"""Every event by the name that the journal keeps."""
