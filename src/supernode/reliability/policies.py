"""Spare, shrink or wait: what does a job do with a machine whose nodes come and go, and what is left of it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from supernode.errors import SpecError
from supernode.reliability.chains import Floats, occupancy


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Nodes that a job wants.

    Attributes:
        nodes: that the job has cards of.
        spares: besides these, up and idle.
        rate: failures per second of one.
        repair: seconds until it is back.
        pause: seconds that each change of the job's nodes stops it.
        grain: nodes that the job shrinks and grows by: those of one copy of the model.
    """

    nodes: int
    spares: int = 0
    rate: float
    repair: float
    pause: float
    grain: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.grain <= self.nodes and self.nodes % self.grain == 0 and self.spares >= 0):
            raise SpecError(
                f"{self.nodes} nodes in copies of {self.grain}, and {self.spares} spares",
                hint="let the copies fill the nodes, and give 0 spares or more.",
            )
        if not all(0 <= each < float("inf") for each in (self.rate, self.repair, self.pause)):
            raise SpecError(
                f"a node fails {self.rate} times/s for {self.repair} s, with pauses of {self.pause} s",
                hint="give finite numbers of 0 or more.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a policy leaves.

    Attributes:
        work: part of what the job's nodes would do if none ever failed.
        owned: the same, over all nodes that were bought, spares too.
        pauses: per second.
    """

    work: float
    owned: float
    pauses: float


def _spare(fleet: Fleet, up: Floats) -> Floats:
    """All its nodes, or none: whatever is short is waited for."""
    return np.where(up >= fleet.nodes, 1.0, 0.0)


def _shrink(fleet: Fleet, up: Floats) -> Floats:
    """As many whole copies of the model as there are nodes for."""
    return np.asarray(np.minimum(up, fleet.nodes) // fleet.grain * fleet.grain / fleet.nodes)


POLICIES: Mapping[str, Callable[[Fleet, Floats], Floats]] = {
    "wait": _spare,
    "spare": _spare,
    "shrink": _shrink,
    "spare, then shrink": _shrink,
}
"""What a policy makes of the nodes that are up. Waiting and shrinking have no spares, the others take them first."""


def outcome(fleet: Fleet, policy: str) -> Outcome:
    """Return what a policy leaves in the long run; lost steps are another matter (`tiers`).

    Each node is up or down whatever the others do. The job pauses when one of its nodes fails, and once more when it
    grows again; a spare that fails stops nothing.

    Raises:
        SpecError: nobody knows the policy.
    """
    if policy not in POLICIES:
        raise SpecError(f"no policy {policy!r}", hint=f"choose one of {', '.join(POLICIES)}.")
    spares = fleet.spares if "spare" in policy else 0
    parts = occupancy(fleet.nodes + spares, fleet.rate, fleet.repair)
    up = fleet.nodes + spares - np.arange(len(parts), dtype=float)
    share = POLICIES[policy](fleet, up)
    used = share * fleet.nodes
    falls = float((parts * used).sum()) * fleet.rate
    # Each growth undoes a fall that changed the share; where a spare took over, nothing grows.
    fewer = POLICIES[policy](fleet, up - 1)
    grows = float((parts * up * fleet.rate * (fewer < share)).sum())
    pauses = falls + (grows if policy.endswith("shrink") else 0.0)
    work = float((parts * share).sum()) / (1 + pauses * fleet.pause)
    return Outcome(work=work, owned=work * fleet.nodes / (fleet.nodes + spares), pauses=pauses)


def drawn_share(fleet: Fleet, policy: str, *, seconds: float, lives: int, rng: np.random.Generator) -> Floats:
    """Draw lives of the nodes one by one; return the share of the job's work that each allows, pauses left out."""
    total = fleet.nodes + (fleet.spares if "spare" in policy else 0)
    shares = np.empty(lives)
    for life in range(lives):
        moments, changes = [], []
        for _ in range(total):
            at, turns = 0.0, []
            while at < seconds:
                at += rng.exponential(1 / fleet.rate)
                turns.append(at)
                at += rng.exponential(fleet.repair)
                turns.append(at)
            kept = [turn for turn in turns if turn < seconds]
            moments += kept
            changes += [-1 if place % 2 == 0 else 1 for place in range(len(kept))]
        order = np.argsort(moments)
        times = np.concatenate([[0.0], np.asarray(moments)[order], [seconds]])
        up = total + np.concatenate([[0.0], np.cumsum(np.asarray(changes, dtype=float)[order])])
        shares[life] = float((np.diff(times) * POLICIES[policy](fleet, up)).sum()) / seconds
    return shares
