"""How often is a group of like parts short of what is needed, and for how long? Closed forms of repairable groups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supernode.errors import SpecError

Floats = NDArray[np.float64]
MOST_UNITS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Like parts, of which some must work; each fails and is repaired on its own, at constant rates.

    Attributes:
        units: that there are, all of them powered.
        needed: that must work.
        rate: failures per second of one.
        repair: seconds on average until one is back; 0 for one that a restart sets right.
        common: part of one unit's failures that takes all units of a group with a reserve at once (the beta factor).
        count: groups of this kind, all of which are needed.
        stops: whether a failure of one that can be spared still stops the work until another takes its place.
    """

    name: str
    units: int
    needed: int
    rate: float
    repair: float
    common: float = 0.0
    count: int = 1
    stops: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.needed <= self.units <= MOST_UNITS or self.count < 1:
            raise SpecError(
                f"{self.needed} of {self.units} units of {self.name} are needed, in {self.count} groups",
                hint=f"need 1 or more, have as many or more, up to {MOST_UNITS:,}, in 1 group or more.",
            )
        if not (0 <= self.rate < math.inf and 0 <= self.repair < math.inf and 0 <= self.common <= 1):
            raise SpecError(
                f"{self.name} fails at a rate of {self.rate}, is repaired in {self.repair} s, and {self.common} of its "
                "failures are common",
                hint="give finite numbers of 0 or more, and `common` of at most 1.",
            )

    @property
    def reserve(self) -> int:
        """Units that can be spared."""
        return self.units - self.needed

    @property
    def failures(self) -> float:
        """Failures per second of any unit of any of its groups while all work."""
        return self.count * self.units * self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a thing stands in the long run.

    Attributes:
        unavailability: part of the time in which it does not work.
        frequency: times per second that it stops working.
    """

    unavailability: float
    frequency: float

    @property
    def availability(self) -> float:
        """Part of the time in which it works."""
        return 1 - self.unavailability

    @property
    def mtbf(self) -> float:
        """Seconds that it works between two outages, on average."""
        return self.availability / self.frequency if self.frequency else math.inf

    @property
    def outage(self) -> float:
        """Seconds of one outage, on average."""
        return self.unavailability / self.frequency if self.frequency else 0.0


NEVER = Standing(unavailability=0.0, frequency=0.0)


def occupancy(units: int, rate: float, repair: float) -> Floats:
    """Return the part of the time in which 0, 1, … of the units are down, each repaired as soon as it fails.

    Each unit is down with probability λr / (1 + λr), whatever the others do: the number is binomial.
    """
    down = rate * repair / (1 + rate * repair)
    if down <= 0:
        return np.concatenate([np.ones(1), np.zeros(units)])
    places = np.arange(units + 1)
    ways = [math.lgamma(units + 1) - math.lgamma(j + 1) - math.lgamma(units - j + 1) for j in range(units + 1)]
    parts: Floats = np.exp(np.array(ways) + places * math.log(down) + (units - places) * math.log1p(-down))
    return parts


def standing(group: Group) -> Standing:
    """Return how all groups of this kind stand together.

    A group is down while more of its units are than can be spared; units fail in the meantime, too. A common failure
    takes all units at once and is repaired as one is.

    Source: Birolini, "Reliability Engineering", section 6; the frequency of a k-out-of-n group is the probability that
    no more can be spared, times the rate at which the next fails. Beta factor: IEC 61508-6, annex D.

    >>> pair = standing(Group(name="pair", units=2, needed=1, rate=0.01, repair=1.0))
    >>> round(pair.mtbf), round(standing(Group(name="one", units=1, needed=1, rate=0.01, repair=1.0)).mtbf)
    (5100, 100)
    """
    common = group.common if group.reserve else 0.0
    alone = group.rate * (1 - common)
    parts = occupancy(group.units, alone, group.repair)
    short = float(parts[group.reserve + 1 :].sum())
    often = float(parts[group.reserve]) * group.needed * alone
    own = Standing(unavailability=short, frequency=often)
    shared = group.rate * common
    together = Standing(
        unavailability=shared * group.repair / (1 + shared * group.repair),
        frequency=shared / (1 + shared * group.repair),
    )
    return series([own, together], count=group.count)


def series(standings: Iterable[Standing], *, count: int = 1) -> Standing:
    """Return how a thing stands that needs all of these, independent of each other, so many times over."""
    each = list(standings)
    logs = sum(math.log1p(-one.unavailability) for one in each if one.unavailability < 1) * count
    if any(one.unavailability >= 1 for one in each):
        return Standing(unavailability=1.0, frequency=0.0)
    works = math.exp(logs)
    often = count * sum(one.frequency / one.availability for one in each) * works
    return Standing(unavailability=-math.expm1(logs), frequency=often)
