"""S10, S11: how soon does a failed job go on, and how rarely and how long does a machine of 512 cards fail?"""

from __future__ import annotations

from collections.abc import Mapping

from supernode.claims.claim import Setting, Shown, Sweep
from supernode.hardware.assemble import predefined
from supernode.hardware.failing import Failing, failing
from supernode.hardware.machine import Machine
from supernode.reliability.answer import recovery_of
from supernode.reliability.parts import EVERYTHING
from supernode.reliability.service import BY_HAND, PAUSE, Service, ladder, levers, reached_with, scaled, service
from supernode.reliability.tiers import Recovery, best

HOUR = 3600.0
PARAMETERS = 70e9
PAUSES = (2.0, 10.0, 60.0, 600.0)


def recovery_minutes(setting: Setting) -> Shown:
    """Return the minutes from a failure until the work lost to it is done again, averaged over failures."""
    machine = _machine()

    def ours(pause: float) -> float:
        stands = service(machine, EVERYTHING, pause=pause, rates=_rates(setting))
        return _lost(recovery_of(machine, stands, parameters=PARAMETERS, step=10.0)) / 60

    hourly = (HOUR + HOUR / 2) / 60
    return Shown(
        ours=ours(PAUSE),
        baseline=f"a checkpoint each hour and an hour to recover by hand: {hourly:.0f} minutes",
        sweep=Sweep(over="seconds from a failure until ranks compute", points=tuple((at, ours(at)) for at in PAUSES)),
        assumptions=(
            f"512 B200, {PARAMETERS / 1e9:.0f} B parameters; state in memory, at a partner node and on disk, each at "
            "its "
            "best interval; 1% of failures of nodes take the partner, too.",
            f"{PAUSE:.0f} s until ranks compute is an estimate for a whole machine; `benchmarks/recovery.py` measures "
            "it on one computer. `Minutes` is taken as at most ten.",
        ),
        by="failure rates of parts, tiers of checkpoints by closed form",
    )  # fmt: skip


def outage_hours(setting: Setting) -> Shown:
    """Return the hours between outages of a machine of 512 cards that has all redundancies."""
    stands, changed = service(_machine(), EVERYTHING, rates=_rates(setting)), _changed(setting)
    return Shown(
        ours=stands.outages.mtbf / HOUR,
        baseline=f"the same without any redundancy: {changed['none'].outages.mtbf / HOUR:,.0f} h",
        sweep=Sweep(
            over="with all redundancies, or one change",
            points=tuple((name, one.outages.mtbf / HOUR) for name, one in changed.items()),
        ),
        assumptions=(*_assumed(stands), _interrupted(stands)),
        by="failure rates of parts, closed form that drawn lives confirm",
    )  # fmt: skip


def unavailable(setting: Setting) -> Shown:
    """Return the part of the time in which not all cards compute: outages, and pauses of interruptions."""
    stands, changed = service(_machine(), EVERYTHING, rates=_rates(setting)), _changed(setting)
    points = [(name, 1 - one.availability) for name, one in changed.items()]
    points += [
        (f"up to: {name}", 1 - one.availability) for name, one in reached_with(_machine(), rates=_rates(setting))
    ]
    return Shown(
        ours=1 - stands.availability,
        baseline=f"the same without any redundancy: {1 - changed['none'].availability:.0%}",
        sweep=Sweep(over="with all redundancies, or one change", points=tuple(points)),
        assumptions=(
            *_assumed(stands),
            f"An interruption takes {PAUSE:.0f} s, an estimate; steps done again are not in.",
        ),
        by="failure rates of parts, closed form that drawn lives confirm",
    )  # fmt: skip


def _machine() -> Machine:
    return predefined("supernode-512")


def _rates(setting: Setting) -> Mapping[str, Failing]:
    return scaled(failing(), rate=setting.failures)


def _changed(setting: Setting) -> dict[str, Service]:
    rates = _rates(setting)
    return dict(ladder(_machine(), rates=rates)) | dict(levers(_machine(), rates=rates))


def _lost(recovery: Recovery) -> float:
    found = best(recovery)
    back = sum(tier.rate * tier.interval / 2 for tier in found.tiers) / found.rate
    return found.pause + back


def _assumed(stands: Service) -> tuple[str, ...]:
    return (
        f"512 B200 in 64 nodes on a 3D torus with {stands.redundancy.words}; a spare node can take any node's place.",
        "Cards, memory, hosts and software fail as often as in Llama 3's training (arXiv:2407.21783, table 5); "
        "supplies, cooling, feeds, repair times and 5% common causes are estimates (hardware/catalog/failures.yaml).",
        f"{BY_HAND:.2%} of interruptions need people for an hour: 3 of Llama 3's 419; the hour is an estimate.",
        "A failure of the machine is an outage: no restart helps.",
    )


def _interrupted(stands: Service) -> str:
    return (
        f"Work is interrupted for seconds each {1 / stands.interruptions / HOUR:,.0f} h, which no redundancy changes: "
        "200,000 h without any interruption is out of reach of 512 cards whose parts fail as published."
    )
