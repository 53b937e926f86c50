"""Which parts of the user's own module does `recompute: full` compute again, as far as its trace tells?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from supernode.schema.job import JobSpec
from supernode.schema.trace import ModelTrace, TracedPart

LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parts that are computed again together.

    Attributes:
        names: of the parts.
        last: the part whose output the unit hands on; empty for a stage.
    """

    names: frozenset[str]
    last: str


def asked_units(job: JobSpec, trace: ModelTrace) -> tuple[Unit, ...]:
    """Return what of a module a job has computed again; a tensor axis makes it a graph, and so may stages."""
    if job.parallelism.recompute == "none":
        return ()
    return units_of(trace, is_graph=job.parallelism.tensor > 1 or trace.is_cut_anywhere)


def units_of(trace: ModelTrace, *, is_graph: bool) -> tuple[Unit, ...]:
    """Return what is computed again as one, in the order in which it is met; all other parts are kept.

    A stage of a graph is one unit. Else units are the repeated layers, as `parallel.recompute` finds them; of a
    sequence without any, runs of about √n children, the last of which is kept.
    """
    kinds = {part.name: part.kind for part in trace.parts if part.name != LOSS}
    if is_graph:
        return (Unit(names=frozenset(kinds), last=""),)
    kinds |= {"": "Sequential"} if trace.children else {}
    groups = [[layer] for layer in _repeated("", kinds)] or _runs(trace.children)

    def within(roots: list[str]) -> frozenset[str]:
        return frozenset(name for name in kinds if any(f"{name}.".startswith(f"{root}.") for root in roots))

    return tuple(Unit(names=within(group), last=group[-1]) for group in groups)


def kept_bytes(
    parts: Sequence[TracedPart], units: Sequence[Unit], samples: float, *, given: float
) -> tuple[float, float]:
    """Return the bytes that a stage keeps of a micro-batch, and those of its largest unit, which lives for a moment.

    Args:
        given: bytes that the stage is given; 0 where that is not known: a layer or a run is then taken to be given as
            much as it hands on, a whole stage nothing.
    """
    again = frozenset(name for unit in units for name in unit.names)
    kept, largest = sum(part.kept.of(samples) for part in parts if part.name not in again), 0.0
    for unit in units:
        mine = {part.name: part for part in parts if part.name in unit.names}
        if mine:
            handed = mine.get(unit.last, next(reversed(mine.values()))).output.of(samples) if unit.last else 0.0
            kept += given or handed
            given = handed
            largest = max(largest, sum(part.kept.of(samples) for part in mine.values()))
    return kept, largest


def _repeated(name: str, kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield the outermost layers that repeat."""
    for child in _children(name, kinds):
        below = _children(child, kinds)
        if kinds[child] == "ModuleList" and len(below) > 1 and len({kinds[one] for one in below}) == 1:
            yield from below
        elif kinds.get(name) == "Sequential" and below:
            yield child
        else:
            yield from _repeated(child, kinds)


def _children(name: str, kinds: Mapping[str, str]) -> list[str]:
    prefix = f"{name}." if name else ""
    return [one for one in kinds if one.startswith(prefix) and one != name and "." not in one[len(prefix) :]]


def _runs(children: tuple[str, ...]) -> list[list[str]]:
    size = max(1, math.ceil(math.sqrt(len(children))))
    return [list(children[start : start + size]) for start in range(0, len(children), size)][:-1]
