"""Which way do gradients meet? What is predicted to be quick, corrected by a short measurement that all ranks agree on.

The start of a run is short, so a measurement has a budget: sizes are tried from small to large, the ways take turns,
and what would cost too much is told from the slope between the sizes below. What is left of the budget goes to the
sizes at which ways are close.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.registry import lookup
from supernode.schema.plan import WayTaken
from supernode.ways.cut import CHUNKS
from supernode.ways.describe import FABRIC_NAMES, between_hosts, described
from supernode.ways.hierarchy import Between, Hierarchy
from supernode.ways.hosts import Hosts, find_hosts
from supernode.ways.meeting import Coarse, Executed, Meeting, Own, Work, ordered
from supernode.ways.trial import CONTENDS, PROBES, ROUNDS, Trial

BUDGET = 2.0
"""Seconds that trying may take in all, about."""
ALIKE, ALIKE_UNTRIED = 0.03, 0.5
"""Ways this close, where both were tried and where not, are told apart by the prediction, then by their bytes between
hosts; by their times they could not."""
FINE = CHUNKS * 2**20
"""Bytes from which fine chunks are taken where neither was tried: each then takes far longer than the waking for it."""
EXECUTED_CHUNK = 4 * 2**20
"""Bytes that an executed schedule has under way in one go; its messages are this over the pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a planner's table says: `fabric.choice.Table` as plain data.

    Attributes:
        sizes: bytes, ascending.
        times: seconds by algorithm, one a size: `flat_ring`, `ring`, `halving`, `multi_ring` and so on.
    """

    sizes: tuple[float, ...]
    times: Mapping[str, tuple[float, ...]]

    def seconds(self, algorithm: str, nbytes: float) -> float:
        """Return the time at the nearest size; infinite for an algorithm that is not in the table."""
        row = self.times.get(algorithm)
        if row is None:
            return math.inf
        nearest = min(range(len(row)), key=lambda at: abs(math.log(self.sizes[at] / max(nbytes, 1.0))))
        return row[nearest]

    def is_near_best(self, algorithm: str) -> bool:
        """Tell whether an algorithm is, at any size, about as quick as the quickest."""
        return any(
            self.seconds(algorithm, size) <= CONTENDS * min(row[at] for row in self.times.values())
            for at, size in enumerate(self.sizes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is taken for which size, and why; the same on all ranks.

    Attributes:
        sizes: bytes, ascending.
        seconds: by way, for each size: measured, or told from smaller sizes where `measured` says so.
        measured: whether each size was tried; empty where nothing was, and the prediction or the job decided.
        taken: the way for each size.
        spent: seconds that it took to find out.
    """

    sizes: tuple[int, ...]
    seconds: Mapping[str, tuple[float, ...]]
    measured: tuple[bool, ...]
    taken: tuple[str, ...]
    spent: float

    def way(self, nbytes: int) -> str:
        """Return what is taken for a tensor: the choice at the nearest size."""
        nearest = min(range(len(self.sizes)), key=lambda at: abs(math.log(self.sizes[at] / max(nbytes, 1))))
        return self.taken[nearest]

    def text(self) -> str:
        """Return it as a table, milliseconds, the choice marked; `~` where it was not tried."""
        lines = ["way".ljust(20) + "".join(f"{size / 2**20:>11.3g} MiB" for size in self.sizes)]
        for name, row in self.seconds.items():
            cells = [
                f"{'' if tried else '~'}{seconds * 1e3:.4g}{'*' if name == taken else ' '}".rjust(15)
                for seconds, tried, taken in zip(row, self.measured, self.taken, strict=True)
            ]
            lines.append(name.ljust(20) + "".join(cells))
        return "\n".join(lines)


class Chosen:
    """Several ways to meet, one for each size of tensor.

    Attributes:
        choice: which, and why.
        hosts: who is where.
    """

    name = "chosen"

    def __init__(self, ways: Mapping[str, Meeting], choice: Choice, hosts: Hosts, rest: ExitStack) -> None:
        self.choice, self.hosts = choice, hosts
        self._ways, self._rest = ways, rest

    def start(self, flat: Tensor, key: str = "") -> Work:
        """Begin a sum by the way of its size."""
        return self._ways[self.choice.way(flat.numel() * flat.element_size())].start(flat, key)

    def empty(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor as the way of its size wants it; see `Meeting.empty`."""
        return self._ways[self.choice.way(elements * dtype.itemsize)].empty(elements, dtype)

    def close(self) -> None:
        """Let go of all ways."""
        self._rest.close()


def choose(
    group: dist.ProcessGroup,
    sizes: Sequence[int],
    *,
    algorithm: str = "auto",
    predicted: Predicted | None = None,
    budget: float = BUDGET,
    hosts: Hosts | None = None,
    known: WayTaken | None = None,
    agree: Callable[[WayTaken], WayTaken] = lambda own: own,
) -> Chosen:
    """Return the meeting for tensors of these sizes; all ranks of the group call this at the same time.

    Args:
        sizes: bytes of the tensors that will meet.
        algorithm: of `ALGORITHMS`; all but `auto` are taken as they are.
        predicted: leaves out what it says is slow, takes in schedules it says are quick, and decides between ways that
            were measured alike; with a budget of 0 it decides alone.
        budget: seconds to try them for, about.
        hosts: who is where, if known already; the token of one `find_hosts` serves one meeting.
        known: what an earlier launch took; taken again where the hosts are as they were.
        agree: given what this group would take, returns what it shall; groups that sum at once should not differ.

    Raises:
        SpecError: the algorithm is unknown or does not fit the hosts.
    """
    hosts = find_hosts(group) if hosts is None else hosts
    with ExitStack() as stack:
        ways = lookup(algorithm, ALGORITHMS, kind="algorithm")(group, hosts, predicted)
        made: dict[str, Meeting] = {}
        for way in ways:
            made[way.name] = way
            stack.callback(way.close)
        classes = sorted({size for size in sizes if size > 0}) or [PROBES[-1]]
        if known is not None and known.hosts == hosts.sizes and set(known.taken) <= set(made):
            choice = _as_told(known)
        elif len(made) == 1 or group.size() == 1 or budget <= 0:
            choice = _without_trying(made, classes, predicted)
        else:
            choice = _try(group, made, classes, predicted, hosts, budget)
        own = WayTaken(hosts=hosts.sizes, sizes=choice.sizes, taken=choice.taken)
        shall = agree(own)
        if shall != own and set(shall.taken) <= set(made):
            choice = _as_told(shall)
        stack.pop_all()
    return _settled(group, made, choice, hosts)


def _as_told(told: WayTaken) -> Choice:
    """Return a choice that was made before, or elsewhere."""
    return Choice(sizes=told.sizes, seconds={}, measured=(), taken=told.taken, spent=0.0)


def _settled(group: dist.ProcessGroup, ways: Mapping[str, Meeting], choice: Choice, hosts: Hosts) -> Chosen:
    """Return the meeting, and let go of the ways that are not taken."""
    dist.all_reduce(torch.zeros(1), group=group)  # By now nobody is still making or trying one of them.
    # A coarse hierarchy is one with the fine one.
    needed = {name.partition("/")[0] for name in choice.taken}
    rest = ExitStack()
    for name, way in ways.items():
        if name.partition("/")[0] in needed:
            rest.callback(way.close)
        else:
            way.close()
        if isinstance(way, Hierarchy):
            way.take_back()
    return Chosen(ways, choice, hosts, rest)


def _flat(group: dist.ProcessGroup, hosts: Hosts, predicted: Predicted | None) -> list[Meeting]:
    return [ordered(group, hosts, hosts.token)]


def _tiers(group: dist.ProcessGroup, hosts: Hosts, predicted: Predicted | None) -> list[Meeting]:
    return [Hierarchy(group, hosts, hosts.token)]


def _torus(group: dist.ProcessGroup, hosts: Hosts, predicted: Predicted | None) -> list[Meeting]:
    schedule = described("multi_ring", hosts)
    return [Executed("multi_ring", schedule, group, hosts, chunk=EXECUTED_CHUNK)]


def _auto(group: dist.ProcessGroup, hosts: Hosts, predicted: Predicted | None) -> list[Meeting]:
    """Return all ways that fit, without those that the prediction rules out."""
    ways: list[Meeting] = [Own(group)] if not hosts.are_in_order else []
    ways.append(ordered(group, hosts, hosts.token))
    if max(hosts.sizes) > 1:
        whole = Hierarchy(group, hosts, hosts.token)
        ways += [whole, Coarse(whole, 1)]
    if predicted is not None:
        for name in ("halving", "direct", "multi_ring"):
            if predicted.is_near_best(name) and len(set(hosts.sizes)) == 1:
                ways.append(Executed(name, described(name, hosts), group, hosts, chunk=EXECUTED_CHUNK))
    return ways


ALGORITHMS: Mapping[str, Callable[[dist.ProcessGroup, Hosts, Predicted | None], list[Meeting]]] = {
    "auto": _auto,
    "flat": _flat,
    "hierarchical": _tiers,
    "torus": _torus,
}
"""What a job may say, and the ways to choose from then."""


def compressed(group: dist.ProcessGroup, between: Between, *, hosts: Hosts | None = None) -> Hierarchy:
    """Return the hierarchy in which a compressor takes the place of the sum between hosts."""
    hosts = find_hosts(group) if hosts is None else hosts
    return Hierarchy(group, hosts, hosts.token, between=between)


def _predicted_seconds(predicted: Predicted | None, way: str, nbytes: float) -> float:
    if predicted is None:
        return math.inf
    name = way.partition("/")[0]
    return predicted.seconds(FABRIC_NAMES.get(name, name), nbytes)


def _without_trying(ways: Mapping[str, Meeting], sizes: Sequence[int], predicted: Predicted | None) -> Choice:
    """Return the choice as predicted; without a prediction, the ring host by host."""
    default = "ordered" if "ordered" in ways else next(iter(ways))
    rows = {way: tuple(_predicted_seconds(predicted, way, size) for size in sizes) for way in ways}
    taken = [
        min(ways, key=lambda way: (rows[way][at], way != default)) if len(ways) > 1 else default
        for at in range(len(sizes))
    ]
    return Choice(sizes=tuple(sizes), seconds=rows, measured=(False,) * len(sizes), taken=tuple(taken), spent=0.0)


def _try(
    group: dist.ProcessGroup, ways: Mapping[str, Meeting], sizes: Sequence[int], predicted: Predicted | None,
    hosts: Hosts, budget: float,
) -> Choice:  # fmt: skip
    """Return the choice by trying."""
    trial = Trial(group, ways, budget)
    for size in sorted({*sizes, *(probe for probe in PROBES if probe < max(sizes))}):
        trial.meet(size, rounds=ROUNDS if size in sizes else 2)
    trial.refine(sizes)
    found = [trial.seconds(size) for size in sizes]
    taken = []
    for size, seconds in zip(sizes, found, strict=True):
        was_tried = trial.tried(size)
        most = min(seconds.values()) * (1 + (ALIKE if was_tried else ALIKE_UNTRIED))
        alike = {
            way: (
                _predicted_seconds(predicted, way, size), between_hosts(way, hosts),
                not was_tried and ("/" in way) == (size >= FINE), seconds[way],
            )
            for way in ways if seconds[way] <= most
        }  # fmt: skip
        taken.append(min(alike, key=alike.__getitem__))
    return Choice(
        sizes=tuple(sizes), seconds={way: tuple(seconds[way] for seconds in found) for way in ways},
        measured=tuple(trial.tried(size) for size in sizes), taken=tuple(taken), spent=trial.spent,
    )  # fmt: skip
