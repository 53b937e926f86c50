"""What came of a run: predicted beside measured, and everything that happened on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from supernode.schema.event import Unsaved
from supernode.schema.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One line of the run's diary. `time`: seconds since the run was accepted."""

    time: float
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What losses have been of late, the newest counting most.

    Attributes:
        is_high: the newest was a spike.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    is_high: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A fold over a run's events: what `status` shows and the controller decides from.

    Attributes:
        outcome: `running`, or as in `Ended`; `lost` where the controller died.
        incarnation: times that the ranks were launched.
        restarts: launches since the last new state in memory or on disk.
        step: steps done and not lost.
        checkpoints: (step, name) of the checkpoints thought whole, oldest first.
        losses: training loss by step; a step done twice keeps the last value.
        repeats: steps done again after a failure, and whether each gave the same loss.
        spent_tokens: that all steps trained on, those done again counted again; samples, for a user's data set.
        spent_seconds: in steps, of which `repeat_seconds` in steps done again.
        launch_seconds: from launches to the ranks being ready; `ready_seconds` is the newest launch's so far.
        busy: by rank, seconds of a step's passes at the last look.
        slow: ranks that are slow, and how many times their peers' time they take.
        moving: the plan that the ranks start again with once they have saved and left; None most of the time.
        moves: times that work has moved since a person began the run or went on with it.
        skipped: steps whose gradients overflowed in float16, so that no weight moved.
        source: where the ranks have their state from: `memory`, a `partner`'s, `disk` or the `start`.
        unsaved: the newest checkpoint that did not get to disk, unless a later one has.
        spares: cards that the run holds besides those of its plan.
        fenced: cards that are not used any more.
        awaited: the card that the run waits for; None most of the time.
        card_losses: Unix times of the losses of late, by card.
        usual: what losses have been of late.
        furthest: newest step whose state was ever in memory or on disk since a person began the run or went on with it.
        started: Unix time at which the run was accepted.
        updated: Unix time of the newest event.
    """

    plan: Plan
    outcome: str = "running"
    message: str = ""
    hint: str = ""
    kind: str = ""
    incarnation: int = 0
    restarts: int = 0
    ready: int = 0
    step: int = 0
    checkpoints: tuple[tuple[int, str], ...] = ()
    losses: Mapping[int, float] = field(default_factory=dict)
    held_out: Mapping[int, float] = field(default_factory=dict)
    step_seconds: Mapping[int, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    rate: float = 0.0
    norm: float = 0.0
    repeats: Sequence[tuple[int, bool]] = field(default_factory=list)
    failures: int = 0
    stopping: bool = False
    drilled: bool = False
    saves: int = 0
    skipped: int = 0
    spent_seconds: float = 0.0
    spent_tokens: int = 0
    repeat_seconds: float = 0.0
    save_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    launch_seconds: float = 0.0
    ready_seconds: float = 0.0
    busy: tuple[float, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    moving: Plan | None = None
    moves: int = 0
    source: str = ""
    unsaved: Unsaved | None = None
    spares: tuple[int, ...] = ()
    fenced: tuple[int, ...] = ()
    awaited: int | None = None
    card_losses: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    usual: Usual = field(default_factory=Usual)
    furthest: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    started: float = 0.0
    updated: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run, summed up.

    Attributes:
        predicted: seconds of a step by part, as planned.
        measured: median seconds of a step, and the mean by part.
        wall: seconds by what they went to: steps, repeated steps, starting, saving, evaluating, other.
        tokens_per_second: over the steps alone.
        folder: of the run; `report.html` lies in it.
    """

    name: str
    outcome: str
    machine: str
    layout: str
    steps: int
    loss: float | None
    held_out_loss: float | None
    bigram_loss: float | None
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    wall: Mapping[str, float]
    tokens_per_second: float | None
    failures: int
    repeats: int
    repeats_identical: int
    losses: Mapping[int, float]
    held_out: Mapping[int, float]
    incidents: tuple[Incident, ...]
    sample: str = ""
    skipped: int = 0
    folder: str = ""
