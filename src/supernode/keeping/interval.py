"""How many steps apart should state be kept, in memory and on disk, so that the least work is lost?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from supernode.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What keeping state in one place costs, and what it is kept for.

    Attributes:
        stall: seconds that training stands still for it.
        took: seconds until it is there; no other begins before.
        between_failures: mean seconds between failures of the whole run that nothing nearer survives; infinite for
            none.
    """

    stall: float
    took: float
    between_failures: float

    def __post_init__(self) -> None:
        if not (0 <= self.stall < math.inf and 0 <= self.took < math.inf and self.between_failures > 0):
            raise SpecError(
                f"a save that stalls {self.stall} s and takes {self.took} s, failures {self.between_failures} s apart",
                hint="give finite seconds of 0 or more, and failures a time above 0 apart.",
            )


def best_every(tiers: tuple[Cost, ...], *, step: float) -> tuple[int, ...]:
    """Return the steps between saves of each tier, nearest first: √(2 · stall · between_failures) of time.

    What lies farther is never written more often than what lies nearer, as each save passes through the nearer. A tier
    that is for no failure is written as seldom as can be said, 10⁹ steps apart.

    Args:
        step: seconds.

    Raises:
        SpecError: a step takes no time.

    Source: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; for stalls that
    are long beside the time between failures Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 22(3), 2006, equation 37.

    >>> best_every((Cost(stall=3.0, took=20.0, between_failures=86_400.0),), step=1.0)
    (718,)
    """
    if not 0 < step < math.inf:
        raise SpecError(f"a step of {step} s", hint="give the seconds that a step takes.")
    found: list[int] = []
    for tier in tiers:
        seconds = max(_daly(tier.stall, tier.between_failures), tier.took)
        steps = round(seconds / step) if seconds / step < _MOST else _MOST
        if tier.took > steps * step:  # Rounded down below what it takes.
            steps += 1
        found.append(min(max(steps, found[-1] if found else 1), _MOST))
    return tuple(found)


_MOST = 10**9


def _daly(stall: float, between_failures: float) -> float:
    """Return the seconds of work between saves."""
    if math.isinf(between_failures):
        return math.inf
    if stall >= 2 * between_failures:
        return between_failures
    ratio = stall / (2 * between_failures)
    return math.sqrt(2 * stall * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall
