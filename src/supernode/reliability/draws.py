"""What do drawn lives of a machine say? Failures and repairs of all its groups by chance, many lives at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from supernode.errors import SpecError
from supernode.reliability.chains import Floats, Group, Standing

MOST_EVENTS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lives:
    """Drawn lives, one entry each.

    Attributes:
        seconds: that each life was watched.
        down: seconds in which the machine lacked something.
        outages: how often that began.
        failures: units that failed.
    """

    seconds: float
    down: Floats
    outages: Floats
    failures: Floats

    @property
    def standing(self) -> Standing:
        """Return how the machine stood, over all lives."""
        watched = self.seconds * len(self.down)
        return Standing(unavailability=float(self.down.sum()) / watched, frequency=float(self.outages.sum()) / watched)

    @property
    def errors(self) -> Standing:
        """Return the standard errors of the two, from how lives differ."""
        many = len(self.down) ** 0.5
        return Standing(
            unavailability=float((self.down / self.seconds).std(ddof=1)) / many,
            frequency=float((self.outages / self.seconds).std(ddof=1)) / many,
        )


def draw(groups: Sequence[Group], *, seconds: float, lives: int, rng: np.random.Generator) -> Lives:
    """Draw lives of a thing that needs all groups, from all units working.

    Every unit fails and is repaired at its own rate; a common failure takes all units at once. Nothing here
    uses the closed forms.

    Raises:
        SpecError: more events than can be drawn in a minute.
    """
    flat = [group for group in groups for _ in range(group.count) if group.rate > 0 and group.repair > 0]
    expected = sum(2 * group.units * group.rate for group in flat) * seconds
    if not (seconds > 0 and lives >= 2) or expected * lives > MOST_EVENTS:
        raise SpecError(
            f"{lives} lives of {seconds} s would hold {expected * lives:,.0f} failures and repairs",
            hint=f"draw 2 lives or more, of some length, with at most {MOST_EVENTS:,} events in all.",
        )
    units = np.array([group.units for group in flat], dtype=float)
    reserve = np.array([group.reserve for group in flat], dtype=float)
    shared = np.array([group.common if group.reserve else 0.0 for group in flat])
    rate = np.array([group.rate for group in flat])
    alone, common = rate * (1 - shared), rate * shared
    mend = 1 / np.array([group.repair for group in flat])
    kinds = len(flat)
    gone = np.zeros((lives, kinds))
    clock = np.zeros(lives)
    down, outages, failures = np.zeros(lives), np.zeros(lives), np.zeros(lives)
    short = np.zeros(lives, dtype=bool)
    # Whether a common failure has a group, which comes and goes beside what happens to single units.
    whole = np.zeros((lives, kinds), dtype=bool)
    every = np.arange(lives)
    while (clock < seconds).any():
        rates = [(units - gone) * alone, gone * mend, np.where(whole, mend, common)]
        steps = np.cumsum(np.concatenate(rates, axis=1), axis=1)
        total = steps[:, -1]
        after = rng.exponential(1 / total)
        down += np.where(short, np.clip(np.minimum(clock + after, seconds) - clock, 0, None), 0.0)
        clock = clock + after
        live = clock < seconds
        event = (steps <= (rng.random(lives) * total)[:, None]).sum(axis=1)
        which, what = event % kinds, event // kinds
        fails, mends, turns = live & (what == 0), live & (what == 1), live & (what == 2)
        gone[every[fails], which[fails]] += 1
        gone[every[mends], which[mends]] -= 1
        whole[every[turns], which[turns]] ^= True
        failures += fails | (turns & whole[every, which])
        before, short = short, np.asarray(((gone > reserve) | whole).any(axis=1))
        outages += live & short & ~before
    return Lives(seconds=seconds, down=down, outages=outages, failures=failures)
