"""Which way do gradients meet? What is predicted to be quick, corrected by a short measurement that all ranks agree on.

The start of a run is short, so a measurement has a budget: sizes are tried from small to large, the ways take turns,
and what would cost too much is told from the slope between the sizes below. What is left of the budget goes to the
sizes at which ways are close.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.collectives.grid import flat, hierarchical, multi_ring, unequal
from supernode.collectives.message import Schedule
from supernode.errors import SpecError
from supernode.registry import lookup
from supernode.syncing.hierarchy import Between, Hierarchy
from supernode.syncing.hosts import Hosts, find_hosts
from supernode.syncing.meeting import Coarse, Executed, Meeting, Own, Work, ordered

PROBES = (64 * 2**10, 2**20)
"""Bytes that are tried before the sizes asked for, so that no first try is a long one."""
BUDGET = 1.0
"""Seconds that trying may take in all, about."""
ROUNDS, MOST_ROUNDS = 3, 12
"""How often a size is tried at first, and at most."""
CONTENDS, CONTENDS_COLD = 1.25, 2.5
"""A way goes on being tried while it takes no more than so many times the quickest: once warm, and the first time."""
ALIKE = 0.03
"""Ways this close are told apart by the prediction, as noise would."""
COARSE = (1, 4)
"""Chunks of the hierarchies tried besides the fine one."""
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
) -> Chosen:
    """Return the meeting for tensors of these sizes; all ranks of the group call this at the same time.

    Args:
        sizes: bytes of the tensors that will meet.
        algorithm: of `ALGORITHMS`; all but `auto` are taken as they are.
        predicted: leaves out what it says is slow, takes in schedules it says are quick, and decides between ways that
            were measured alike; with a budget of 0 it decides alone.
        budget: seconds to try them for, about.
        hosts: who is where, if known already; the token of one `find_hosts` serves one meeting.

    Raises:
        SpecError: the algorithm is unknown or does not fit the hosts.
    """
    begun = time.perf_counter()
    hosts = find_hosts(group) if hosts is None else hosts
    with ExitStack() as stack:
        ways = lookup(algorithm, ALGORITHMS, kind="algorithm")(group, hosts, predicted)
        made: dict[str, Meeting] = {}
        for way in ways:
            made[way.name] = way
            stack.callback(way.close)
        classes = sorted({size for size in sizes if size > 0}) or [PROBES[-1]]
        if len(made) == 1 or group.size() == 1 or budget <= 0:
            choice = _without_trying(made, classes, predicted)
        else:
            choice = _try(group, made, classes, predicted, budget, begun)
        return Chosen(made, choice, hosts, stack.pop_all())
    raise AssertionError


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
        ways += [whole, *(Coarse(whole, chunks) for chunks in COARSE)]
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

FABRIC_NAMES = {"given": "flat_ring", "ordered": "flat_ring", "hierarchical": "ring"}
"""What the fabric calls our ways; hierarchies of any chunks are one to it."""


def described(algorithm: str, hosts: Hosts) -> Schedule:
    """Return the description of an all-reduce over these hosts, its ranks numbered host by host.

    Raises:
        SpecError: the hosts have different numbers of ranks, and the algorithm wants a grid.
    """
    sizes = set(hosts.sizes)
    if algorithm == "flat_ring":
        return flat("all_reduce", sum(hosts.sizes))
    if algorithm == "ring" and len(sizes) > 1:
        return unequal(hosts.sizes)
    if len(sizes) > 1:
        raise SpecError(
            f"a {algorithm} over hosts of {', '.join(map(str, hosts.sizes))} ranks",
            hint="set `communication.algorithm` to `hierarchical`, which takes hosts of different sizes.",
        )
    grid = (hosts.sizes[0], len(hosts.sizes))
    if algorithm == "multi_ring":
        return multi_ring("all_reduce", grid)
    return hierarchical("all_reduce", grid, (algorithm,) * 2)


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


class _Trial:
    """Tries ways, in step with the other ranks; all decisions rest on numbers that the ranks share."""

    def __init__(self, group: dist.ProcessGroup, ways: Mapping[str, Meeting], budget: float, begun: float) -> None:
        self._group, self._ways, self._budget, self._begun = group, ways, budget, begun
        self._samples: dict[int, dict[str, list[float]]] = {}
        self._expected: dict[int, dict[str, float]] = {}
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self.spent = 0.0

    def tried(self, size: int) -> bool:
        """Tell whether a size was tried, or is only expected."""
        return any(self._samples[size].values())

    def seconds(self, size: int) -> dict[str, float]:
        """Return the time of each way: the median, without the first time, which touches memory that later ones find.

        A way that was not tried at this size has what was expected of it.
        """
        return {
            way: statistics.median(seen[1:] or seen) if seen else self._expected[size][way]
            for way, seen in self._samples[size].items()
        }

    def meet(self, size: int) -> None:
        """Try a size larger than all before, as far as the budget allows."""
        self._expected[size] = self._expect(size)
        self._samples[size] = {way: [] for way in self._ways}
        is_first = len(self._samples) == 1
        for number in range(ROUNDS):
            turn = self._contenders(size, CONTENDS if number > 1 else CONTENDS_COLD)
            if (number and len(turn) < 2) or not self._round(size, turn, always=is_first):
                return

    def refine(self, sizes: Sequence[int]) -> None:
        """Spend what is left of the budget on ways that are close."""
        is_moving = True
        while is_moving:
            is_moving = False
            for size in sizes:
                turn = self._contenders(size, CONTENDS)
                few = self.tried(size) and min(len(self._samples[size][way]) for way in turn) < MOST_ROUNDS
                if len(turn) > 1 and few and self._round(size, turn):
                    is_moving = True

    def _contenders(self, size: int, times: float) -> list[str]:
        seconds = self.seconds(size)
        return [way for way, value in seconds.items() if value <= times * min(seconds.values())]

    def _round(self, size: int, turn: Sequence[str], *, always: bool = False) -> bool:
        """Try some ways once; returns False if there is no time for it."""
        seconds = self.seconds(size)
        if not always and self.spent + sum(seconds[way] for way in turn) > self._budget:
            return False
        for way in turn:
            self._samples[size][way].append(self._once(self._ways[way], size))
        return True

    def _expect(self, size: int) -> dict[str, float]:
        """Return what each way would take: on the line through the two sizes before."""
        if not self._samples:
            return dict.fromkeys(self._ways, 0.0)
        *before, last = self._samples
        now = self.seconds(last)
        if not before:
            return {way: value * size / last for way, value in now.items()}
        then = self.seconds(before[-1])
        slope = {way: max(0.0, now[way] - then[way]) / (last - before[-1]) for way in self._ways}
        return {way: now[way] + slope[way] * (size - last) for way in self._ways}

    def _tensor(self, way: Meeting, nbytes: int) -> Tensor:
        """Return a tensor that is like those to come; hierarchies of any chunks share one."""
        name = way.name.partition("/")[0], nbytes
        if name not in self._tensors:
            self._tensors[name] = way.empty(max(1, nbytes // 4))
        return self._tensors[name]

    def _once(self, way: Meeting, nbytes: int) -> float:
        """Return the seconds of a sum, from when all are there until the last has it; the same on all ranks."""
        tensor = self._tensor(way, nbytes)
        dist.all_reduce(torch.zeros(1), group=self._group)
        begun = time.perf_counter()
        way.start(tensor).wait()
        ended = time.perf_counter()
        told = torch.tensor([ended - begun, ended - self._begun], dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        self.spent = float(told[1])
        return float(told[0])


def _try(
    group: dist.ProcessGroup, ways: Mapping[str, Meeting], sizes: Sequence[int], predicted: Predicted | None,
    budget: float, begun: float,
) -> Choice:  # fmt: skip
    """Return the choice by trying."""
    trial = _Trial(group, ways, budget, begun)
    for size in sorted({*sizes, *(probe for probe in PROBES if probe < max(sizes))}):
        trial.meet(size)
    trial.refine(sizes)
    found = [trial.seconds(size) for size in sizes]
    taken = []
    for size, seconds in zip(sizes, found, strict=True):
        alike = [way for way in ways if seconds[way] <= min(seconds.values()) * (1 + ALIKE)]
        taken.append(min(alike, key=lambda way: (_predicted_seconds(predicted, way, size), seconds[way])))
    return Choice(
        sizes=tuple(sizes), seconds={way: tuple(seconds[way] for seconds in found) for way in ways},
        measured=tuple(trial.tried(size) for size in sizes), taken=tuple(taken), spent=trial.spent,
    )  # fmt: skip
