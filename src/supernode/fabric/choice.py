"""Which algorithm for which collective? Costs all that fit, by size, in a table to print, draw or override."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from supernode.collectives.outline import (
    Outline,
    binomial,
    chain,
    double_tree,
    exchange,
    flat_ring,
    hierarchical,
    in_network,
    multi_ring,
)
from supernode.errors import SpecError
from supernode.fabric.level import OURS, Assumptions, Level, outline_time
from supernode.registry import lookup

Sizes = tuple[int, ...]
Candidate = Callable[[str, Sizes], Outline]

REDUCING: Mapping[str, Candidate] = {
    "flat_ring": flat_ring,
    "ring": lambda kind, sizes: hierarchical(kind, sizes),
    "direct": lambda kind, sizes: hierarchical(kind, sizes, ("direct",) * len(sizes)),
    "halving": lambda kind, sizes: hierarchical(kind, sizes, ("halving",) * len(sizes)),
    "direct_then_ring": lambda kind, sizes: hierarchical(kind, sizes, ("direct",) + ("ring",) * (len(sizes) - 1)),
    "direct_then_halving": lambda kind, sizes: hierarchical(kind, sizes, ("direct",) + ("halving",) * (len(sizes) - 1)),
    "multi_ring": multi_ring,
}

CANDIDATES: Mapping[str, Mapping[str, Candidate]] = {
    "all_reduce": {
        **REDUCING,
        "double_tree": lambda _, sizes: double_tree(_only(sizes)),
        "in_network": lambda _, sizes: in_network(_only(sizes)),
    },
    "reduce_scatter": REDUCING,
    "all_gather": REDUCING,
    "all_to_all": {
        "direct": lambda _, sizes: exchange(sizes),
        "ring": lambda _, sizes: exchange(sizes, ("ring",) * len(sizes)),
    },
    "broadcast": {
        "binomial": lambda _, sizes: binomial(_only(sizes)),
        "chain": lambda _, sizes: chain(_only(sizes)),
    },
}
"""Algorithms of each collective; over several levels, one method a level."""

IN_NETWORK = "in_network"


def _only(sizes: Sizes) -> int:
    if len(sizes) != 1:
        raise SpecError(f"one tree over levels of {list(sizes)}", hint="cost its schedule, or give one level.")
    return sizes[0]


def collective_time(
    kind: str,
    nbytes: float | npt.NDArray[np.float64],
    levels: Sequence[Level],
    *,
    algorithm: str,
    left: float = 1.0,
    given: Assumptions = OURS,
) -> float | npt.NDArray[np.float64]:
    """Return the time of a collective by one algorithm; an array of sizes gives an array.

    Args:
        nbytes: of one card's whole buffer: the vector of an all-reduce, the result of an all-gather.
        left: part of the bytes that a compressor leaves.

    Raises:
        SpecError: an unknown name, or an algorithm that does not fit the levels.
    """
    if not 0 < left <= 1:
        raise SpecError(f"a compressor leaves {left} of the bytes", hint="give a part above 0 and at most 1.")
    build = lookup(algorithm, lookup(kind, CANDIDATES, kind="collective"), kind="algorithm")
    outline = build(kind, tuple(level.size for level in levels))
    if algorithm == "multi_ring" and {level.kind for level in levels} != {"ring"}:
        raise SpecError("a multi-ring beside a torus", hint="choose `ring`, which goes over any levels.")
    return outline_time(outline, levels, np.asarray(nbytes, dtype=np.float64) * left, given=given)


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Times of all algorithms that fit, by size. A algorithms, S sizes.

    Attributes:
        kind: of the collective.
        sizes: (S,) bytes, ascending.
        algorithms: names, in the order of the rows.
        times: (A, S) seconds.
        overrides: from a number of bytes on, ascending, take an algorithm whatever it costs; an empty name gives the
            choice back.
    """

    kind: str
    sizes: npt.NDArray[np.float64]
    algorithms: tuple[str, ...]
    times: npt.NDArray[np.float64]
    overrides: tuple[tuple[float, str], ...] = ()

    def best(self, nbytes: float) -> str:
        """Return the algorithm for a size: as overridden, else the quickest at the nearest size of the table."""
        for least, name in reversed(self.overrides):
            if nbytes >= least:
                if name:
                    return name
                break
        nearest = int(np.argmin(np.abs(np.log(self.sizes) - math.log(max(nbytes, 1.0)))))
        return self.algorithms[int(np.argmin(self.times[:, nearest]))]

    def overridden(self, least: float, algorithm: str) -> Table:
        """Return the table with an algorithm taken from so many bytes on.

        Raises:
            SpecError: no such algorithm in the table.
        """
        if algorithm:
            lookup(algorithm, dict.fromkeys(self.algorithms), kind="algorithm")
        rest = [entry for entry in self.overrides if entry[0] != least]
        return replace(self, overrides=tuple(sorted([*rest, (least, algorithm)])))

    def text(self) -> str:
        """Return the table for a terminal, times in microseconds, the choice marked."""
        lines = [f"{self.kind}, µs".ljust(20) + "".join(f"{_bytes(size):>12}" for size in self.sizes)]
        for name, row in zip(self.algorithms, self.times, strict=True):
            marks = ["*" if self.best(size) == name else " " for size in self.sizes]
            lines.append(
                name.ljust(20) + "".join(f"{time * 1e6:>11.1f}{mark}" for time, mark in zip(row, marks, strict=True))
            )
        return "\n".join(lines)

    def svg(self, *, width: int = 640, height: int = 400) -> str:
        """Return a drawing of the times over the sizes, both axes logarithmic."""
        x = _scaled(self.sizes, 60, width - 150)
        y = _scaled(self.times.ravel(), height - 40, 20).reshape(self.times.shape)
        drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="11">']
        for index, (name, row) in enumerate(zip(self.algorithms, y, strict=True)):
            colour = f"hsl({index * 360 // len(self.algorithms)} 70% 40%)"
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, row, strict=True))
            drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}"><title>{name}</title></polyline>')
            drawn.append(f'<text x="{width - 140}" y="{20 + 14 * index}" fill="{colour}">{name}</text>')
        for a, size in zip(x, self.sizes, strict=True):
            drawn.append(f'<text x="{a:.1f}" y="{height - 20}" text-anchor="middle">{_bytes(size)}</text>')
        for time, b in ((self.times.min(), y.max()), (self.times.max(), y.min())):
            drawn.append(f'<text x="4" y="{b:.1f}">{time * 1e6:.3g} µs</text>')
        return "\n".join([*drawn, "</svg>"])


def _bytes(size: float) -> str:
    power = min(3, max(0, (int(size).bit_length() - 1) // 10))
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _scaled(values: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.float64]:
    logs = np.log(np.maximum(values, 1e-12))
    return np.asarray(low + (high - low) * (logs - logs.min()) / max(float(np.ptp(logs)), 1e-12), dtype=np.float64)


def table(kind: str, levels: Sequence[Level], sizes: Sequence[float] = (), *, switch_adds: bool = False) -> Table:
    """Return what all algorithms cost that fit the levels.

    Args:
        sizes: bytes; empty takes powers of four from 1 KiB to 1 GiB.
        switch_adds: whether switches can add, so that in-network reduction is a choice.
    """
    nbytes = np.asarray(sorted(sizes) or [4.0**power for power in range(5, 16)], dtype=np.float64)
    rows = {}
    for name in lookup(kind, CANDIDATES, kind="collective"):
        if name == IN_NETWORK and not switch_adds:
            continue
        try:
            time = collective_time(kind, nbytes, levels, algorithm=name)
        except SpecError:
            continue  # this one has no closed form on these levels
        rows[name] = np.broadcast_to(time, nbytes.shape)
    if not rows:
        raise SpecError(f"no {kind} has a closed form on these levels", hint="cost its schedule over flows.")
    return Table(kind=kind, sizes=nbytes, algorithms=tuple(rows), times=np.stack(list(rows.values())))


def choose(kind: str, nbytes: float, levels: Sequence[Level], *, switch_adds: bool = False) -> str:
    """Return the quickest algorithm for a size on these levels."""
    return table(kind, levels, [nbytes], switch_adds=switch_adds).best(nbytes)
