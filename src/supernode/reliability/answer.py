"""How does a machine serve? Outages, goodput, policies and what would change them, in one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from supernode.advice.terms import NODE_STORE, SAVED_BYTES
from supernode.errors import SpecError
from supernode.hardware.machine import Machine
from supernode.reliability.parts import EVERYTHING, WORDS, Redundancy
from supernode.reliability.policies import POLICIES, Fleet, Outcome, outcome
from supernode.reliability.published import DISK
from supernode.reliability.service import (
    AVAILABILITY,
    BY_HAND,
    MTBF,
    PAUSE,
    Service,
    ladder,
    levers,
    rarer_for,
    service,
)
from supernode.reliability.tiers import Recovery, Tier, best, goodput, sweep

COPY = 20e9
"""Bytes/s of a card's state into its host's memory: an estimate, a third of PCIe 5."""
PARTNER = 10e9
"""Bytes/s of a card's state from another node: an estimate, a fifth of 400 Gbit/s."""
DETECT = 1.0
"""Seconds until a dead rank is known; `benchmarks/recovery.py` measures it on one computer."""
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of months in virtual time, decided by the controller that real runs have.

    Attributes:
        days: virtual.
        interruptions: by cause; those that came within a pause, too.
        useful: part of the time that went into steps that were kept.
        restored: launches by where they went on from.
    """

    days: float
    interruptions: Mapping[str, int]
    useful: float
    restored: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """How a machine serves, with and without what it has more than it needs.

    Attributes:
        service: as asked.
        ladder: without any redundancy, with each alone, with all, and without each, by name.
        levers: after one change at a time.
        rarer: times as rarely as all parts and software fail, they would have to, for interruptions (not outages) to be
            as far apart as claimed.
        recovery: tiers of checkpoints with their best intervals.
        goodput: part of the time up that goes into steps that are kept.
        intervals: (seconds between checkpoints on disk, goodput).
        policies: by name and spares, what each leaves.
        played: the same in virtual time; None where that was not asked for.
    """

    service: Service
    ladder: Mapping[str, Service]
    levers: Mapping[str, Service]
    rarer: float
    recovery: Recovery
    goodput: float
    intervals: Sequence[tuple[float, float]]
    policies: Mapping[str, Mapping[int, Outcome]]
    played: Played | None = None


def availability(
    machine: Machine, *, spares: int = EVERYTHING.spares, without: Sequence[str] = (), pause: float = PAUSE,
    by_hand: float = BY_HAND, parameters: float = 70e9, step: float = 10.0,
) -> Availability:  # fmt: skip
    """Reckon how a machine serves a job on all its cards.

    Args:
        spares: nodes beside those of the job.
        without: redundancies that it lacks, by name: supplies, paths, cooling, control, feeds, disks.
        pause: seconds from a failure until ranks compute again, loading left out.
        by_hand: part of interruptions after which people must help.
        parameters: of the model in training, 12 bytes of state each.
        step: seconds of a step.

    Raises:
        SpecError: an unknown redundancy, a number outside its limits, or a machine without rates.
        CapacityError: failures leave no time to work.
    """
    had = asked(spares, without)
    if not 0 < parameters < 1e18 or not 0 < step < 1e9:
        raise SpecError(
            f"{parameters:g} parameters, steps of {step:g} s", hint="give `--parameters 70B` and `--step 10s`, above 0."
        )
    stands = service(machine, had, pause=pause, by_hand=by_hand)
    recovery = recovery_of(machine, stands, parameters=parameters, step=step)
    node = stands.parts.groups[0]
    fleet = Fleet(nodes=machine.hosts, rate=node.rate, repair=node.repair, pause=recovery.pause)
    policies = {
        name: {many: outcome(replace(fleet, spares=many), name) for many in ((1, 2, 4, 8) if "spare" in name else (0,))}
        for name in POLICIES
    }
    return Availability(
        service=stands, ladder=dict(ladder(machine, full=had, pause=pause, by_hand=by_hand)),
        levers=dict(levers(machine, full=had, pause=pause, by_hand=by_hand)), rarer=rarer_for(machine),
        recovery=best(recovery), goodput=goodput(recovery), intervals=sweep(recovery, FACTORS), policies=policies,
    )  # fmt: skip


def asked(spares: int, without: Sequence[str]) -> Redundancy:
    """Return all redundancies but those named.

    Raises:
        SpecError: a name stands for none.
    """
    known = [name for name in WORDS if name != "spares"]
    for name in without:
        if name not in known:
            raise SpecError(f"no redundancy {name!r}", hint=f"`--without` takes {', '.join(known)}.")
    return replace(EVERYTHING, spares=spares, **dict.fromkeys(without, False))


def recovery_of(machine: Machine, stands: Service, *, parameters: float, step: float) -> Recovery:
    """Return the tiers of a job on all cards: from which failures each saves, what a save stops, what loading takes."""
    nbytes = SAVED_BYTES * parameters
    copy = nbytes / machine.card_count / COPY
    gone = stands.interruptions - stands.parts.software
    return Recovery(
        tiers=(
            Tier(name="memory", save=copy, restore=copy, rate=stands.parts.software),
            Tier(name="partner", save=0.0, restore=nbytes / machine.card_count / PARTNER, rate=gone * (1 - DISK)),
            # Written from memory, while training goes on.
            Tier(name="disk", save=copy, restore=nbytes / machine.hosts / NODE_STORE, rate=gone * DISK),
        ),
        step=step, detect=min(DETECT, stands.pause), restart=max(0.0, stands.pause - DETECT),
    )  # fmt: skip


def plain(found: Availability) -> dict[str, Any]:
    """Return the figures as JSON values; times in seconds."""
    tiers = found.recovery.tiers
    return {
        **_service(found.service), "claimed_mtbf_seconds": MTBF, "claimed_availability": AVAILABILITY,
        "mtbf_as_claimed": found.service.is_as_claimed[0], "availability_as_claimed": found.service.is_as_claimed[1],
        "longest_pause_seconds": found.service.longest_pause, "rarer_for_interruptions": found.rarer,
        "groups": {
            name: {"outages_per_second": one.frequency, "unavailability": one.unavailability}
            for name, one in found.service.groups.items()
        },
        "node_failures_per_second": dict(found.service.parts.node),
        "ladder": {name: _service(one) for name, one in found.ladder.items()},
        "levers": {name: _service(one) for name, one in found.levers.items()},
        "goodput": found.goodput, "recovery_seconds": found.recovery.pause,
        "tiers": [
            {"tier": tier.name, "interval_seconds": tier.interval or None,
             "save_seconds": tier.save, "restore_seconds": tier.restore, "failures_per_second": tier.rate}
            for tier in tiers
        ],
        "intervals": [list(point) for point in found.intervals],
        "policies": {
            name: {str(many): {"work": each.work, "per_owned_node": each.owned} for many, each in rows.items()}
            for name, rows in found.policies.items()
        },
        "played": None if found.played is None else {
            "days": found.played.days, "interruptions": dict(found.played.interruptions),
            "useful": found.played.useful, "restored": dict(found.played.restored),
        },
    }  # fmt: skip


def _service(one: Service) -> dict[str, Any]:
    return {
        "machine": one.machine, "cards": one.cards, "redundancy": one.redundancy.words,
        "part_failure_every_seconds": 1 / one.parts.failures, "interruption_every_seconds": 1 / one.interruptions,
        "pause_seconds": one.pause, "outage_every_seconds": one.outages.mtbf, "outage_seconds": one.outages.outage,
        "availability": one.availability, "availability_without_pauses": one.outages.availability,
    }  # fmt: skip
