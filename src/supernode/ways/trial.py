"""How long does each way to meet take here? Tried from small tensors to large, within a budget, agreed by all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.ways.meeting import Meeting

PROBES = (64 * 2**10, 2**20)
"""Bytes that are tried before the sizes asked for, so that no first try is a long one."""
ROUNDS, MOST_ROUNDS = 3, 12
"""How often a size is tried at first, and at most."""
CONTENDS, CONTENDS_EARLY = 1.25, 4.0
"""A way goes on being tried while it takes no more than so many times the quickest: later, and the first
two times, of which one may have met other work on the computer."""


class Trial:
    """Tries ways, in step with the other ranks; all decisions rest on numbers that the ranks share."""

    def __init__(self, group: dist.ProcessGroup, ways: Mapping[str, Meeting], budget: float) -> None:
        self._group, self._ways, self._budget, self._begun = group, ways, budget, time.perf_counter()
        self._samples: dict[int, dict[str, list[float]]] = {}
        self._expected: dict[int, dict[str, float]] = {}
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self.spent = 0.0

    def tried(self, size: int) -> bool:
        """Tell whether a size was tried, or is only expected."""
        return any(self._samples[size].values())

    def seconds(self, size: int) -> dict[str, float]:
        """Return the time of each way: the median, without the first time, which touches memory that later ones find.

        Of two times it is the shorter one. A way that was not tried at this size has what was expected of it.
        """
        return {
            way: statistics.median(seen[1:]) if len(seen) > 2 else min(seen, default=self._expected[size][way])
            for way, seen in self._samples[size].items()
        }

    def meet(self, size: int, *, rounds: int) -> None:
        """Try a size larger than all before, as far as the budget allows."""
        self._expected[size] = self._expect(size)
        self._samples[size] = {way: [] for way in self._ways}
        is_first = len(self._samples) == 1
        for number in range(rounds):
            turn = self._contenders(size, CONTENDS if number > 1 else CONTENDS_EARLY)
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
        """Return what each way would take: on the line through the two sizes before, if there are two."""
        if not self._samples:
            return dict.fromkeys(self._ways, 0.0)
        *before, last = self._samples
        now = self.seconds(last)
        if not before:
            # A small tensor tells what a way costs at least, and nothing of its bandwidth.
            grown = min(now.values()) * (size / last - 1)
            return {way: value + grown for way, value in now.items()}
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
