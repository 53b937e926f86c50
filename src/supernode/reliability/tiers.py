"""How often should each tier of checkpoints be written, and what of the time is left? Closed form, and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from supernode.errors import CapacityError, SpecError
from supernode.reliability.chains import Floats

SECONDS_OF_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place that state is kept in, and the failures that are gone on from it.

    Attributes:
        name: `memory` of the own node, a `partner`'s, `disk`.
        save: seconds that one save stops training.
        restore: seconds to load from it.
        rate: failures per second of the whole job after which it is the nearest place that still has the state.
        interval: seconds of work between two saves; 0 for the best, and of what `best` returns, for never: no failure
            needs it.
    """

    name: str
    save: float
    restore: float
    rate: float
    interval: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= each < math.inf for each in (self.save, self.restore, self.rate, self.interval)):
            raise SpecError(
                f"tier {self.name} saves in {self.save} s every {self.interval} s, loads in {self.restore} s, for "
                f"{self.rate} failures/s",
                hint="give finite numbers of 0 or more.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A job's tiers, nearest first, and what a failure costs besides loading.

    Attributes:
        step: seconds of a step; no interval is shorter.
        detect: seconds until a failure is known.
        restart: seconds from then until state can be loaded: a spare in place, ranks started, met.
    """

    tiers: tuple[Tier, ...]
    step: float
    detect: float
    restart: float

    def __post_init__(self) -> None:
        if (
            not self.tiers
            or not 0 < self.step < math.inf
            or not all(0 <= each < math.inf for each in (self.detect, self.restart))
        ):
            raise SpecError(
                f"{len(self.tiers)} tiers, steps of {self.step} s, found in {self.detect} s, restarted in "
                f"{self.restart} s",
                hint="give a tier or more, a step above 0 and finite times of 0 or more.",
            )

    @property
    def pause(self) -> float:
        """Seconds from a failure until work goes on, on average."""
        rate = self.rate
        loads = sum(tier.rate * tier.restore for tier in self.tiers) / rate if rate else 0.0
        return self.detect + self.restart + loads

    @property
    def rate(self) -> float:
        """Failures per second, of all kinds."""
        return sum(tier.rate for tier in self.tiers)


def best(recovery: Recovery) -> Recovery:
    """Return the tiers with the intervals at which the least time is lost, to first order.

    A tier by itself is written every √(2 · save / rate), its rate being of failures that nothing nearer survives. A
    tier that would then be written more often than the one before it is written with it, at what is best for both:
    what is saved farther away comes by way of what is nearer. Intervals that are given stay; none is below a step.

    Source: Young, CACM 17(9), 1974, for each; Vaidya, "A case for two-level distributed recovery schemes", SIGMETRICS
    1995, for why several. The sum of save / interval + rate · interval / 2 over growing intervals is least where
    neighbours in the wrong order are pooled (Barlow and others, 1972).

    >>> disk = Tier(name="disk", save=3.0, restore=0.0, rate=1 / 86_400)
    >>> round(best(Recovery(tiers=(disk,), step=1.0, detect=0.0, restart=0.0)).tiers[0].interval)
    720
    """
    pools: list[tuple[list[Tier], float]] = []
    for tier in recovery.tiers:
        pool = [tier]
        while not tier.interval and pools and not pools[-1][0][0].interval and _alone(pool) < pools[-1][1]:
            pool = pools.pop()[0] + pool
        pools.append((pool, _alone(pool)))
    found = []
    for pool, wanted in pools:
        for tier in pool:
            steps = (tier.interval or wanted) / recovery.step
            whole = max(1, round(steps)) * recovery.step if math.isfinite(steps) else math.inf
            found.append(replace(tier, interval=whole) if math.isfinite(whole) else tier)
    return replace(recovery, tiers=tuple(found))


def _alone(pool: Sequence[Tier]) -> float:
    """Return the best interval of tiers that are written together; infinite where they are never needed."""
    rate = sum(tier.rate for tier in pool)
    return math.sqrt(2 * sum(tier.save for tier in pool) / rate) if rate else math.inf


def goodput(recovery: Recovery) -> float:
    """Return the part of the time that goes into work that is kept, in the long run.

    Saves slow the work down by their part; each failure costs its pause and, on average, half an interval of its tier.
    It is exact where failures within a pause, and two within an interval, are rare; `drawn` shows how rare.

    Raises:
        CapacityError: nothing is left.
    """
    tiers = best(recovery).tiers
    slow = 1 + sum(tier.save / tier.interval for tier in tiers if tier.interval)
    pauses = sum(tier.rate * (recovery.detect + recovery.restart + tier.restore) for tier in tiers)
    # Time up is 1 / (1 + pauses) of all; a failure that comes within a pause begins it anew.
    up = 1 / (1 + pauses)
    lost = sum(tier.rate * tier.interval / 2 for tier in tiers if tier.rate)
    kept = up * (1 / slow - lost)
    if kept <= 0:
        raise CapacityError(
            f"{recovery.rate * SECONDS_OF_DAY:.3g} failures a day, each {recovery.pause:.3g} s and what was done since "
            "the last save, leave no time",
            hint="save and restart faster, or take fewer or more reliable cards.",
        )
    return kept


def drawn(recovery: Recovery, *, seconds: float, lives: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw lives of a job; return the part of each that was kept, and how often it failed.

    Failures come at constant rates, also within pauses, which then begin anew; each throws work back to the last save
    of its tier. Saves are spread evenly over the work.
    """
    tiers = best(recovery).tiers
    rates = np.array([tier.rate for tier in tiers])
    pace = 1 / (1 + sum(tier.save / tier.interval for tier in tiers if tier.interval))
    spans = np.array([tier.interval or math.inf for tier in tiers])
    pauses = recovery.detect + recovery.restart + np.array([tier.restore for tier in tiers])
    counts = rng.poisson(rates.sum() * seconds, lives)
    most = int(counts.max(initial=0))
    times = np.sort(np.where(np.arange(most) < counts[:, None], rng.uniform(0, seconds, (lives, most)), np.inf), axis=1)
    odds = rates / rates.sum() if rates.sum() else np.ones_like(rates) / len(rates)
    kinds = rng.choice(len(tiers), size=(lives, most), p=odds)
    done, ready = np.zeros(lives), np.zeros(lives)
    for at in range(most):
        when, kind = times[:, at], kinds[:, at]
        hit = np.isfinite(when)
        reached = done + np.where(hit, np.clip(when - ready, 0, None) * pace, 0.0)
        span = spans[kind]
        back = np.where(np.isfinite(span), np.floor(reached / span) * np.where(np.isfinite(span), span, 1), 0.0)
        done = np.where(hit, back, done)
        ready = np.where(hit, when + pauses[kind], ready)
    done = done + np.clip(seconds - ready, 0, None) * pace
    return done / seconds, counts.astype(float)


def sweep(recovery: Recovery, factors: Sequence[float]) -> list[tuple[float, float]]:
    """Return the goodput with the farthest tier written at so many times its best interval."""
    tiers = best(recovery).tiers
    return [
        (
            tiers[-1].interval * factor,
            goodput(replace(recovery, tiers=(*tiers[:-1], replace(tiers[-1], interval=tiers[-1].interval * factor)))),
        )
        for factor in factors
    ]
