"""How available is a machine to a job on all its cards? What breaks, what interrupts, what is an outage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from supernode.errors import SpecError
from supernode.hardware.failing import Failing, failing
from supernode.hardware.machine import Machine
from supernode.reliability.chains import Standing, series, standing
from supernode.reliability.parts import COMMON, EVERYTHING, NOTHING, WORDS, Parts, Redundancy, parts_of

PAUSE = 10.0
"""Seconds from a failure until the ranks compute again, a spare in place: an estimate for a whole machine."""
BY_HAND = 3 / 419
"""Part of interruptions that need people: 3 of Llama 3's 419 (arXiv:2407.21783, section 3.3.4)."""
HAND = 3600.0
"""Seconds until people have set right what recovery could not: an estimate."""
MTBF, AVAILABILITY = 200_000 * 3600.0, 0.99995
"""What is claimed: seconds between failures of the machine, and the part of the time in which it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """How a machine serves a job that needs all its cards.

    Attributes:
        redundancy: what it has more than it needs.
        parts: what can fail.
        groups: how each group of parts stands, by name; `people` is what recovery does not set right by itself.
        outages: how the machine stands: down while it lacks a card that no spare replaces, power, cooling, control, or
            the people whom a recovery needs.
        interruptions: per second: work stops and goes on from its last state, with a spare where a node is gone.
        pause: seconds that one interruption takes.
    """

    machine: str
    cards: int
    redundancy: Redundancy
    parts: Parts
    groups: Mapping[str, Standing]
    outages: Standing
    interruptions: float
    pause: float

    @property
    def availability(self) -> float:
        """Part of the time in which all cards compute: neither an outage nor a pause."""
        return self.outages.availability / (1 + self.interruptions * self.pause)

    @property
    def longest_pause(self) -> float:
        """Seconds that an interruption may take for the claimed availability; negative if outages alone miss it."""
        return (self.outages.availability / AVAILABILITY - 1) / self.interruptions

    @property
    def is_as_claimed(self) -> tuple[bool, bool]:
        """Whether outages are as rare, and the service as available, as claimed."""
        return self.outages.mtbf >= MTBF, self.availability >= AVAILABILITY


def service(
    machine: Machine, redundancy: Redundancy, *, pause: float = PAUSE, rates: Mapping[str, Failing] | None = None,
    common: float = COMMON, by_hand: float = BY_HAND,
) -> Service:  # fmt: skip
    """Return how a machine serves.

    Args:
        pause: seconds that an interruption takes.
        rates: of each kind of part; by default the catalogue's.
        common: part of a unit's failures that takes its reserve along.
        by_hand: part of interruptions after which people must help.

    Raises:
        SpecError: a number is outside its limits, or the machine has no rates.
    """
    if not 0 <= pause < 1e9:
        raise SpecError(f"`pause` is {pause} s", hint="give finite seconds, 0 or more.")
    if not 0 <= by_hand <= 1:
        raise SpecError(f"`by_hand` is {by_hand}", hint="give a part, 0 to 1.")
    parts = parts_of(machine, redundancy, rates=rates, common=common)
    working = sum(group.count * group.needed * group.rate for group in parts.groups if group.stops)
    interruptions = parts.software + working
    helped = interruptions * by_hand
    people = Standing(unavailability=helped * HAND / (1 + helped * HAND), frequency=helped / (1 + helped * HAND))
    groups = {group.name: standing(group) for group in parts.groups} | {"people": people}
    return Service(
        machine=machine.name, cards=machine.card_count, redundancy=redundancy, parts=parts, groups=groups,
        outages=series(groups.values()), interruptions=interruptions, pause=pause,
    )  # fmt: skip


def ladder(
    machine: Machine,
    *,
    full: Redundancy = EVERYTHING,
    pause: float = PAUSE,
    by_hand: float = BY_HAND,
    rates: Mapping[str, Failing] | None = None,
) -> Iterator[tuple[str, Service]]:
    """Yield the service without any redundancy, with each alone, with all, and with all but each."""

    def of(redundancy: Redundancy) -> Service:
        return service(machine, redundancy, pause=pause, by_hand=by_hand, rates=rates)

    had = [name for name in WORDS if getattr(full, name) != getattr(NOTHING, name)]
    yield "none", of(NOTHING)
    for name in had:
        yield f"only {WORDS[name]}", of(replace(NOTHING, **{name: getattr(full, name)}))
    yield "all", of(full)
    for name in had:
        yield f"all but {WORDS[name]}", of(replace(full, **{name: getattr(NOTHING, name)}))


def scaled(rates: Mapping[str, Failing], *, rate: float = 1.0, repair: float = 1.0) -> dict[str, Failing]:
    """Return rates with all parts failing, and being repaired, so many times as often, and as long."""
    return {name: replace(kind, rate=kind.rate * rate, repair=kind.repair * repair) for name, kind in rates.items()}


def levers(
    machine: Machine,
    *,
    full: Redundancy = EVERYTHING,
    pause: float = PAUSE,
    by_hand: float = BY_HAND,
    rates: Mapping[str, Failing] | None = None,
) -> Iterator[tuple[str, Service]]:
    """Yield the service after one change at a time to a machine with all redundancies."""
    known = rates or failing()

    def of(redundancy: Redundancy = full, **changed: float | Mapping[str, Failing]) -> Service:
        usual: dict[str, object] = {"pause": pause, "by_hand": by_hand, "rates": known}
        return service(machine, redundancy, **(usual | changed))  # type: ignore[arg-type]

    for spares in (0, 1, 2, 3, 4, 8):
        yield f"{spares} spare nodes", of(replace(full, spares=spares))
    for many in (0, 1, 3, 10):
        yield f"{many} of 419 recoveries need people", of(by_hand=many / 419)
    yield "1 of 10,000 recoveries needs people", of(by_hand=1e-4)
    for seconds in (1.0, 10.0, 20.0, 60.0, 600.0):
        yield f"pauses of {seconds:.0f} s", of(pause=seconds)
    for common in (0.0, 0.01, 0.05, 0.1):
        yield f"{common:.0%} common causes", of(common=common)
    for hours in (4, 24, 72):
        # The catalogue's usual repair is a day; shorter ones are scaled alike.
        yield f"repairs of {hours} h instead of 24 h", of(rates=scaled(known, repair=hours / 24))
    for times in (0.1, 0.5, 2.0, 5.0):
        yield f"{times:g} × the failures", of(rates=scaled(known, rate=times))


def reached_with(
    machine: Machine, *, full: Redundancy = EVERYTHING, rates: Mapping[str, Failing] | None = None
) -> tuple[tuple[str, Service], ...]:
    """Return the steps, one on top of the other, that lead from no redundancy to what is claimed."""
    known = rates or failing()
    quick = scaled(known, repair=4 / 24)
    return (
        ("no redundancy", service(machine, NOTHING, rates=known)),
        ("all redundancies", service(machine, full, rates=known)),
        ("recovery never needs people", service(machine, full, rates=known, by_hand=0.0)),
        ("repairs of 4 h", service(machine, full, rates=quick, by_hand=0.0)),
        ("pauses of 2 s", service(machine, full, rates=quick, pause=2.0, by_hand=0.0)),
    )


def rarer_for(machine: Machine, *, mtbf: float = MTBF) -> float:
    """Return how many times more rarely all parts and software must fail for *interruptions* to be so far apart."""
    return service(machine, EVERYTHING).interruptions * mtbf
