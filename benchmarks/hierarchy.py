"""Is what we pick for a sum over hosts as quick as the links allow, and never slower than gloo's own ring?

Hosts are emulated (`hosts`), their links limited in turn. In each setting the ways take turns: gloo's ring with the
ranks as given, gloo's ring host by host, and what `ways.choose` picked after its short measurement. Ratios are taken
within a round, and the median over the rounds is kept. Tensors live on from round to round, as buckets do; the pick's
are those that it lends (`Meeting.empty`). The bound is 2 (h − 1) / h of the tensor over the goodput of a
link, as one TCP stream has it just before; it is told against the nominal rate too.

A link binds where the bound is above the time that the same pick takes over unlimited links. Where the pick is the very
call that it is compared with, the ratio is measured all the same and is about noise: such cells say so.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import harness
from hosts import MBIT, Hosts, emulated
from supernode.ways.choose import Chosen, choose
from supernode.ways.describe import between_hosts
from supernode.ways.hosts import find_hosts
from supernode.ways.meeting import Meeting, ordered

MIB = 2**20
SHAPES = ((2, 2), (2, 4), (4, 2), (4, 4))
"""Hosts, and ranks on each."""
RATES = (None, 200.0, 100.0, 1000.0)
"""Mbit/s; unlimited first, as the rest is compared with it; then where links bind most."""
SIZES = (16, 4, 64, 1)
"""MiB of float32; what is judged by the bound first, should time run short."""
CELL, CELL_FULL = 1.8, 60.0
"""Seconds that a size may be measured for, if that gives `LEAST_ROUNDS`."""
ROUND, ROUND_FULL = 6.0, 60.0
"""Seconds beyond which one round of the pick and gloo's ordered ring is left out."""
LONG = 1.0
"""Seconds from which a way takes long enough for its first time to count, and a bad order to be seen only once."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 101
SURE = 0.004
"""Standard error of the mean ratio at which no further round is taken."""
LIMIT = 575.0
"""Seconds after which nothing further is begun, unless `--full`."""
PATIENCE = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One size in one setting.

    Attributes:
        rate: of a link, Mbit/s; None where unlimited.
        goodput: bytes/s that one stream has on a link.
        pick: what the library took.
        is_same: whether that is the very call of one of the alternatives.
        seconds: by way, each round's; a way that is one with another has its numbers.
        over: by alternative, the median over rounds of the pick's time over its time.
        bytes_over_description: payload on all cards over what the description of the pick sends between hosts.
        equal: whether all ways gave the same numbers (to round-off), and each the same bits on all ranks.
    """

    hosts: int
    ranks: int
    interleaved: bool
    rate: float | None
    mib: int
    goodput: float
    pick: str
    is_same: bool
    seconds: dict[str, list[float]]
    over: dict[str, float]
    bytes_over_description: dict[str, float]
    equal: bool

    @property
    def bound(self) -> float:
        """Seconds that the bytes take on the slow tier at its goodput."""
        return 2 * (self.hosts - 1) / self.hosts * self.mib * MIB / self.goodput

    @property
    def median(self) -> float:
        """Seconds of the pick."""
        return statistics.median(self.seconds["pick"])


class Bench:
    """What one rank does: the settings of one placement, in step with the others."""

    def __init__(
        self, rank: int, cards: Hosts, where: tuple[int, ...], *, interleaved: bool, deadline: float, full: bool
    ) -> None:
        self.rank, self.cards, self.where, self.interleaved, self.full = rank, cards, where, interleaved, full
        self.deadline = deadline
        self.group = dist.group.WORLD
        self.found = find_hosts(self.group)
        self.skipped: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def go(self) -> tuple[list[dict[str, Any]], list[str], list[str]]:
        """Return the cells, what was left out, and what was chosen why."""
        well = ordered(self.group, self.found, f"{self.found.token}-bench")
        cells: list[dict[str, Any]] = []
        why = []
        for rate in RATES:
            goodput = self._limit(rate)
            chosen = choose(self.group, [size * MIB for size in SIZES])
            why.append(f"{rate or 'unlimited'}: tried for {chosen.choice.spent:.2f} s\n{chosen.choice.text()}")
            for mib in SIZES:
                label = f"{len(self.cards)}x{len(self.where) // len(self.cards)} {self._order} {rate} {mib} MiB"
                if self._shared(time.monotonic() > self.deadline):
                    self.skipped.append(f"{label}: no time left")
                    continue
                cell = self._cell(rate, goodput, mib, well, chosen)
                if cell is None:
                    self.skipped.append(f"{label}: a round takes too long")
                else:
                    cells.append(asdict(cell))
                    if self.rank == 0:
                        harness.say(f"{label}: {tell(cell)}")
            dist.barrier()
            chosen.close()
        return cells, self.skipped, why

    @property
    def _order(self) -> str:
        return "interleaved" if self.interleaved else "in order"

    def _limit(self, rate: float | None) -> float:
        """Limit the links; return their goodput."""
        goodput = torch.zeros(1, dtype=torch.float64)
        dist.barrier()
        if self.rank == 0:
            self.cards.limit(rate and rate * MBIT)
            goodput += self.cards.goodput()
        dist.broadcast(goodput, 0)
        return float(goodput)

    def _shared(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def _cell(self, rate: float | None, goodput: float, mib: int, well: Meeting, chosen: Chosen) -> Cell | None:
        nbytes = mib * MIB
        pick = chosen.choice.way(nbytes)
        calls: dict[str, Callable[[torch.Tensor], Any]] = {"ordered": well.start}
        self.tensors = {"pick": chosen.empty(nbytes // 4), "ordered": torch.zeros(nbytes // 4)}
        if not self.found.are_in_order:
            self.tensors["given"] = torch.zeros(nbytes // 4)
            calls["given"] = lambda tensor: dist.all_reduce(tensor, async_op=True)
        calls["pick"] = chosen.start
        # What each way sends between hosts, in parts of the tensor, as its description says.
        described_bytes = {way: between_hosts(pick if way == "pick" else way, self.found) for way in calls}
        hosts = len(self.cards)
        # Each way's time is at least its bytes on a card.
        least = {way: described_bytes[way] / hosts * nbytes / goodput for way in calls}
        if least["pick"] + least["ordered"] > (ROUND_FULL if self.full else ROUND):
            return None
        same, over, first = self._check(calls, nbytes, described_bytes)
        seconds: dict[str, list[float]] = {way: [first[way]] if first[way] > LONG else [] for way in calls}
        turn = [way for way in calls if way != "given" or first[way] < LONG]
        budget = CELL_FULL if self.full else CELL
        begun = time.monotonic()
        for number in range(MOST_ROUNDS):
            for way in turn if number % 2 == 0 else turn[::-1]:
                seconds[way].append(self._once(way, calls[way]))
            spent = self._shared(time.monotonic() - begun)
            ratios = [a / b for a, b in zip(seconds["pick"], seconds["ordered"], strict=False)]
            enough = len(ratios) >= LEAST_ROUNDS
            if enough and (spent > budget or statistics.stdev(ratios) / math.sqrt(len(ratios)) < SURE):
                break
        seconds.setdefault("given", seconds["ordered"])
        ratio = {
            way: statistics.median(a / b for a, b in zip(seconds["pick"], seconds[way], strict=False))
            for way in ("given", "ordered")
        }
        return Cell(
            hosts=hosts, ranks=len(self.where) // hosts, interleaved=self.interleaved, rate=rate, mib=mib,
            goodput=goodput, pick=pick, is_same=pick in ("given", "ordered"), seconds=seconds, over=ratio,
            bytes_over_description=over, equal=same,
        )  # fmt: skip

    def _once(self, way: str, call: Callable[[torch.Tensor], Any]) -> float:
        """Return the seconds from when all are there until the last has the sum."""
        tensor = self.tensors[way]
        self._fill(tensor)
        dist.barrier()
        begun = time.perf_counter()
        call(tensor).wait()
        return self._shared(time.perf_counter() - begun)

    def _fill(self, tensor: torch.Tensor) -> None:
        """Write numbers of which no two ranks have the same."""
        torch.arange(tensor.numel(), dtype=torch.float32, out=tensor).remainder_(1009).mul_(0.1 + self.rank)

    def _check(
        self, calls: dict[str, Callable[[torch.Tensor], Any]], nbytes: int, described_bytes: dict[str, float]
    ) -> tuple[bool, dict[str, float], dict[str, float]]:
        """Return whether all ways agree, and of each its payload over its description and the seconds of this time."""
        over, seconds = {}, {}
        idle = self._payload(lambda: self._shared(0.0))[0]
        right = torch.arange(nbytes // 4, dtype=torch.float32).remainder_(1009)
        right *= sum(0.1 + rank for rank in range(len(self.where)))
        equal = True
        for way, call in calls.items():
            payload, seconds[way] = self._payload(lambda way=way, call=call: self._once(way, call))
            tensor = self.tensors[way]
            over[way] = (payload - idle) / (described_bytes[way] * nbytes)
            digest = xxhash.xxh64_intdigest(tensor.numpy()) >> 12  # exact as a float64
            alike = self._shared(digest) == -self._shared(-digest)
            equal = equal and alike and torch.allclose(right, tensor, rtol=1e-5)
        return not self._shared(not equal), over, seconds

    def _payload(self, act: Callable[[], Any]) -> tuple[int, Any]:
        """Return the payload that leaves all cards during an act of all ranks, and what the act returns."""
        dist.barrier()
        before = self.cards.counts() if self.rank == 0 else []
        dist.barrier()
        result = act()
        dist.barrier()
        after = self.cards.counts() if self.rank == 0 else []
        return sum((b - a).payload for a, b in zip(before, after, strict=True)), result


def tell(cell: Cell) -> str:
    """Return a line for whoever watches."""
    times = ", ".join(f"{way} {statistics.median(values) * 1e3:.1f}" for way, values in cell.seconds.items())
    ratios = ", ".join(f"{value:.3f} of {way}" for way, value in cell.over.items())
    share = f", {cell.bound / cell.median:.3f} of the bound" if cell.rate else ""
    return (
        f"{cell.pick}: ms {times}; {ratios}{share}; {len(cell.seconds['pick'])} rounds; "
        f"bytes {cell.bytes_over_description['pick']:.4f}{'' if cell.equal else '; RESULTS DIFFER'}"
    )


def summary(cells: list[Cell]) -> dict[str, Any]:
    """Return the figures that are judged, and the rows that explain them."""
    unlimited = {
        (cell.hosts, cell.ranks, cell.interleaved, cell.mib): cell.median for cell in cells if cell.rate is None
    }
    rows = []
    slow, alternatives = [], []
    for cell in cells:
        free = unlimited.get((cell.hosts, cell.ranks, cell.interleaved, cell.mib))
        binds = cell.rate is not None and free is not None and cell.bound > free
        share = cell.bound / cell.median if cell.rate else None
        worst = max(cell.over.values())
        alternatives.append(worst)
        if binds and cell.mib >= 16 and share is not None:
            slow.append(share)
        rows.append(
            {
                "hosts": cell.hosts, "ranks": cell.ranks, "interleaved": cell.interleaved, "mbit": cell.rate,
                "mib": cell.mib, "pick": cell.pick, "same_call": cell.is_same, "binds": binds,
                "ms": {way: round(statistics.median(values) * 1e3, 3) for way, values in cell.seconds.items()},
                "rounds": len(cell.seconds["pick"]), "of_bound": share and round(share, 4),
                "of_nominal": share and round(share * cell.goodput / (cell.rate * MBIT), 4),  # type: ignore[operator]
                "over": {way: round(value, 4) for way, value in cell.over.items()},
                "bytes_over_description": {k: round(v, 5) for k, v in cell.bytes_over_description.items()},
                "equal": cell.equal, "goodput_mbit": round(cell.goodput / MBIT, 2),
            }
        )  # fmt: skip
    bytes_over = [value for cell in cells for value in cell.bytes_over_description.values()]
    return {
        "worst_of_bound_slow": round(min(slow), 4) if slow else None,
        "worst_over_best_alternative": round(max(alternatives), 4) if alternatives else None,
        "worst_over_best_alternative_other_call": max(
            (round(max(cell.over.values()), 4) for cell in cells if not cell.is_same), default=None
        ),
        "over_best_alternative_median": round(statistics.median(alternatives), 4) if alternatives else None,
        "bytes_over_description": round(max(bytes_over), 5) if bytes_over else None,
        "bytes_over_description_least": round(min(bytes_over), 5) if bytes_over else None,
        "all_equal": all(cell.equal for cell in cells),
        "cells": len(cells),
        "cells_slow": len(slow),
        "rows": rows,
    }


def main() -> None:
    """Measure all settings."""
    options = harness.parser(__doc__)
    options.add_argument("--shapes", default="", help="only these, as in 2x2,4x2")
    flags = options.parse_args()
    chosen = {tuple(map(int, word.split("x"))) for word in flags.shapes.split(",") if word}
    shapes = [shape for shape in SHAPES if not chosen or shape in chosen]
    settings = list(itertools.product(shapes, (False, True)))
    begun = time.monotonic()
    cells: list[Cell] = []
    skipped: list[str] = []
    why: dict[str, list[str]] = {}
    for number, ((hosts, ranks), interleaved) in enumerate(settings):
        where = tuple(rank % hosts if interleaved else rank // ranks for rank in range(hosts * ranks))
        # Every setting has its share of what is left, so that the last ones are not the ones left out.
        left = LIMIT * len(settings) / (2 * len(SHAPES)) - (time.monotonic() - begun)
        deadline = math.inf if flags.full else time.monotonic() + left / (len(settings) - number)
        with emulated(hosts) as cards:

            def rank_(rank: int, cards: Hosts = cards, where: tuple[int, ...] = where, interleaved: bool = interleaved,
                      deadline: float = deadline) -> Any:  # fmt: skip
                return Bench(rank, cards, where, interleaved=interleaved, deadline=deadline, full=flags.full).go()

            told, left_out, reasons = cards.run(rank_, where, patience=PATIENCE)[0]
        cells += [Cell(**one) for one in told]
        skipped += left_out
        why[f"{hosts}x{ranks} {'interleaved' if interleaved else 'in order'}"] = reasons
    result = summary(cells)
    harness.finish(
        {**result, "skipped": skipped, "choices": why, "seconds": round(time.monotonic() - begun, 1),
         "machine": harness.machine("torch")},
        flags,
    )  # fmt: skip


if __name__ == "__main__":
    main()
