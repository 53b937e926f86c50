"""What do months on a machine come to, decided by the controller that real runs have? `supernode availability`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from supernode.control.drive import drive
from supernode.errors import SpecError
from supernode.hardware.assemble import build_machine
from supernode.hardware.machine import Machine
from supernode.planning.planner import make_plan
from supernode.reliability import answer
from supernode.reliability.answer import Availability, Played
from supernode.reliability.months import Cause, MonthsBackend
from supernode.reliability.tiers import Recovery
from supernode.scheduling.controller import Controller
from supernode.schema.event import Event, Started, StopAsked
from supernode.schema.job import JobSpec
from supernode.schema.lasting import CheckpointSpec, RecoverySpec
from supernode.simulation.goodput import DAY

MOST_DAYS, MOST_PLAYED = 400.0, 1_000_000  # about 20 seconds
STANDING = 16
"""Ranks that are played; each stands for its part of the cards."""


def availability(machine: Machine, *, days: float = 0.0, seed: int = 0, **asked: Any) -> Availability:
    """Reckon how a machine serves (`answer.availability`), and play so many days of it where there are any.

    Raises:
        SpecError: a number is outside its limits, or the machine has no rates.
        CapacityError: failures leave no time to work.
    """
    if not 0 <= days <= MOST_DAYS:
        raise SpecError(f"`days` is {days:g}", hint=f"play 0 to {MOST_DAYS:.0f} days.")
    found = answer.availability(machine, **asked)
    return replace(found, played=play_recovery(found.recovery, days=days, seed=seed)) if days else found


def play_recovery(recovery: Recovery, *, days: float, seed: int) -> Played:
    """Play a job whose tiers have their intervals."""
    tiers, pause = recovery.tiers, recovery.detect + recovery.restart
    causes = [
        Cause(name=name, rate=tier.rate, source=tier.name, pause=pause + tier.restore)
        for tier, name in zip(tiers, ("software", "node", "node and partner"), strict=True)
    ]
    return play(
        causes, days=days, step=recovery.step, keep_every=_steps(tiers[0].interval, recovery.step),
        keep_seconds=tiers[0].save, save_every=_steps(tiers[-1].interval, recovery.step), save_seconds=tiers[-1].save,
        seed=seed,
    )  # fmt: skip


def play(
    causes: Sequence[Cause], *, days: float, step: float, save_every: int, save_seconds: float = 0.0,
    keep_every: int = 0, keep_seconds: float = 0.0, seed: int = 0,
) -> Played:  # fmt: skip
    """Play so many days of a job; each of a few ranks stands for its part of the cards.

    Raises:
        SpecError: more steps than can be played in a minute.
    """
    if not 0 < days <= MOST_DAYS or days * DAY / step > MOST_PLAYED:
        raise SpecError(
            f"{days:g} days of steps of {step:g} s",
            hint=f"play above 0 and up to {MOST_DAYS:.0f} days, of at most {MOST_PLAYED:,} steps; `--step` lengthens "
            "them.",
        )
    end = days * DAY
    job = JobSpec(
        steps=MOST_PLAYED * 2, batch=STANDING, checkpoint=CheckpointSpec(every=save_every),
        recovery=RecoverySpec(most_restarts=1000),
    )  # fmt: skip
    plan = make_plan(job, build_machine(card_count=STANDING, card="H100"))
    backend = MonthsBackend(
        plan, causes=causes, step_seconds=step, seed=seed, keep_every=keep_every, keep_seconds=keep_seconds,
        save_seconds=save_seconds,
    )  # fmt: skip
    controller, restored = Controller(), _Restored()
    drive(
        Started(plan=plan), controller=controller, backend=backend, record=restored,
        asked=lambda: StopAsked(now=True) if backend.now() >= end else None,
    )  # fmt: skip
    assert controller.state is not None
    return Played(
        days=backend.now() / DAY, interruptions=dict(backend.met), restored=restored.sources,
        useful=controller.state.step * step / backend.now(),
    )  # fmt: skip


class _Restored:
    """A record that keeps only from where launches went on."""

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}

    def append(self, event: Event, time: float) -> None:
        """Count the sources."""
        source: Any = getattr(event, "source", None)
        if source is not None:
            self.sources[source] = self.sources.get(source, 0) + 1


def _steps(interval: float, step: float) -> int:
    return max(1, round(interval / step)) if interval else MOST_PLAYED * 2
