"""Which strategy is best? Evaluates every one of a space, in blocks of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supernode.errors import CapacityError
from supernode.forecast.efficiency import CardModel
from supernode.forecast.times import StepParts, step_parts
from supernode.registry import lookup
from supernode.search.front import Front
from supernode.search.offload import Room, holding, moved, waiting
from supernode.search.space import OVERLAPS, Block, Space, row_table, strategy_at
from supernode.units import count_of
from supernode.workload.shape import Numbers
from supernode.workload.strategy import Software, Strategies, make_strategies

DEGREES = ("cards", "tensor", "context", "expert", "pipeline", "data")
OBJECTIVES = {"time": 0, "memory": 1, "energy": 2, "cost": 3}
"""Columns of a point: seconds of a step, bytes of the fullest card, joules and USD of a step."""
Points = tuple[Numbers, Numbers, Numbers, Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a card costs while it works and while it waits, with its share of node, switches, supplies and cooling.

    Attributes:
        idle: watts while it waits.
        full: watts while it computes.
        price: USD per second that it is there.
        tariff: USD per joule.
    """

    idle: float
    full: float
    price: float
    tariff: float

    def energy(self, cards: Numbers | float, *, seconds: Numbers | float, working: Numbers | float) -> Numbers:
        """Return the joules of a step on so many cards.

        Args:
            seconds: of the step.
            working: of them, the seconds in which a card computes; what `working` returns.
        """
        return np.asarray(cards * self.idle * seconds + cards * (self.full - self.idle) * working)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One strategy, and what it comes to.

    Attributes:
        axes: value of each of `space.AXES`.
        time: seconds of a step.
        memory: bytes of the fullest card.
        energy: joules of a step.
        cost: USD of a step; None where the hardware has no price.
    """

    axes: dict[str, float]
    time: float
    memory: float
    energy: float
    cost: float | None

    def ways(self, space: Space) -> Strategies:
        """Return it as a strategy of the time model."""
        names = [name for name in self.axes if name not in ("cards", "offload", *OVERLAPS)]
        return make_strategies(
            batch=space.batch, sequence=space.sequence, precision=space.precision,
            **{name: self.axes[name] for name in names},
            **space.stages(np.asarray(self.axes["pipeline"]), np.asarray(self.axes["interleave"])),
        )  # fmt: skip

    def software(self, space: Space) -> Software:
        """Return what the trainer has to do."""
        overlaps: dict[str, Any] = {name: bool(self.axes[name]) for name in OVERLAPS}
        return space.working(replace(space.software, **overlaps), self.ways(space))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        best: one choice for each set of degrees, best first.
        front: those that no other beats in time, memory, energy and cost; empty where it was not asked for.
        strategies: in the space, each with its time, memory, energy and cost computed.
        fitting: of them, the ones that fit.
    """

    best: tuple[Choice, ...]
    front: tuple[Choice, ...]
    strategies: int
    fitting: int


@dataclass(slots=True)
class _Tally:
    """Where a search stands.

    Attributes:
        groups: set of degrees of each row of the space.
        best: least score of each set of degrees.
    """

    table: dict[str, Numbers]
    groups: NDArray[np.int64]
    best: Numbers
    front: Front | None
    strategies: int = 0
    fitting: int = 0


def search(
    space: Space, card: CardModel, room: Room, bill: Bill, *, objective: str = "time", top: int = 5, front: bool = True
) -> Found:
    """Return the best strategies of a space, one for each set of degrees, and the Pareto front.

    Ties go to the one that offloads least, then to the one that takes least memory, then to the first of the space.

    Args:
        objective: a name in `OBJECTIVES`.
        front: find the Pareto front as well.

    Raises:
        CapacityError: nothing fits.
    """
    column = lookup(objective, OBJECTIVES, kind="objective")
    tally = _begin(space, front=front)
    for block in space.blocks(table=tally.table):
        _take(space, card, room, bill, block, column=column, tally=tally)
    if not np.isfinite(tally.best).any():
        raise CapacityError(
            f"none of {tally.strategies:,} strategies on {count_of(max(space.cards), 'card')} fits into "
            f"{room.memory / 1e9:.0f} GB a card",
            hint="take more cards, cards with more memory, or a smaller batch.",
        )
    places = np.argsort(tally.best, kind="stable")[:top]
    best = [
        winner(space, card, room, bill, np.flatnonzero(tally.groups == group), column=column, table=tally.table)
        for group in places
        if np.isfinite(tally.best[group])
    ]
    best.sort(key=lambda choice: (getattr(choice, objective), choice.memory, *choice.axes.values()))
    return Found(
        best=tuple(best), front=_front_choices(space, tally), strategies=tally.strategies, fitting=tally.fitting,
    )  # fmt: skip


def _begin(space: Space, *, front: bool) -> _Tally:
    table = row_table(space)
    degrees = np.stack([table[name] for name in DEGREES], axis=1)
    unique, groups = np.unique(degrees, axis=0, return_inverse=True)
    return _Tally(
        table=table, groups=groups.ravel(), best=np.full(len(unique), np.inf),
        front=Front.empty(columns=len(OBJECTIVES), marks=5 + len(OVERLAPS)) if front else None,
    )  # fmt: skip


def _take(space: Space, card: CardModel, room: Room, bill: Bill, block: Block, *, column: int, tally: _Tally) -> None:
    """Evaluate a block and keep what may win."""
    for option, points, fits in outcomes(space, card, room, bill, block):
        tally.strategies += fits.size
        tally.fitting += int(np.count_nonzero(fits))
        score = np.where(fits, points[column], np.inf).min(axis=(0, 1, 2))
        np.minimum.at(tally.best, tally.groups[block.rows], score)
        if tally.front is not None:
            _offer(tally.front, block, option, points, fits)


def working(parts: StepParts) -> Numbers:
    """Return the seconds of a step in which a card computes, launches or updates, and draws its full power."""
    return parts.compute + parts.launch + parts.optimizer


def outcomes(
    space: Space, card: CardModel, room: Room, bill: Bill, block: Block
) -> Iterator[tuple[int, Points, NDArray[np.bool_]]]:
    """Yield each offload of a block, with its strategies' points and which of them fit.

    What depends on fewer axes is computed on their smaller grid; only the last sums run over all.
    """
    held = holding(space.model, block.ways, block.software)
    parts = step_parts(space.model, block.ways, card, block.software)
    base, at_work = parts.total, working(parts)
    passes = base - parts.optimizer - parts.step
    for option in block.offloads:
        away = moved(held, option)
        memory = np.broadcast_to(held.total - away, block.shape[1:])
        time = np.broadcast_to(base + waiting(held, option, block.ways, passes, room), block.shape[1:])
        fits = memory <= room.memory
        if space.allows is not None:
            fits = fits & space.allows(block.ways)
        if option:
            fits = fits & (away <= room.host_memory)
        energy = bill.energy(block.cards, seconds=time, working=at_work)
        cost = block.cards * bill.price * time + bill.tariff * energy
        yield option, (time, memory, energy, cost), fits


def _offer(front: Front, block: Block, option: int, points: Points, fits: NDArray[np.bool_]) -> None:
    """Offer a block's strategies to the front, those first tried against one point that beats most."""
    alive = fits
    if len(front.scouts):
        # Cards never decrease from block to block, so that what is as slow and takes as much energy costs as much.
        time, memory, energy, _ = front.scouts[0]
        alive = fits & ((points[0] < time) | (points[1] < memory) | (points[2] < energy))
    flat = np.flatnonzero(alive)
    if not flat.size:
        return
    some = np.stack([column.ravel()[flat] for column in points], axis=1)
    if len(front.scouts):
        living = front.survivors(some)
        some, flat = some[living], flat[living]
    if flat.size:
        overlaps = [int(getattr(block.software, name)) for name in OVERLAPS]
        places = np.stack(np.unravel_index(flat, block.shape[1:]), axis=1)
        places[:, -1] = block.rows[places[:, -1]]
        fixed = np.broadcast_to(np.asarray([option, *overlaps]), (flat.size, 1 + len(overlaps)))
        front.offer(some, np.concatenate([fixed, places], axis=1))


def winner(
    space: Space, card: CardModel, room: Room, bill: Bill, rows: NDArray[np.int64], *, column: int,
    table: dict[str, Numbers] | None = None,
) -> Choice:  # fmt: skip
    """Return the best strategy of some rows; of equal ones, the one that offloads and holds least.

    Raises:
        CapacityError: nothing fits.
    """
    best: tuple[tuple[float, ...], dict[str, float], list[float]] | None = None
    for block in space.blocks(table=table, rows=rows):
        for option, points, fits in outcomes(space, card, room, bill, block):
            score = np.where(fits, points[column], np.inf)
            if not score.min() < np.inf:
                continue
            equal = np.flatnonzero(score == score.min())
            flat = equal[np.argmin(points[1].ravel()[equal])]
            values = [float(numbers.ravel()[flat]) for numbers in points]
            axes = block.pick(option, int(flat))
            rank = (values[column], option.bit_count(), values[1], *axes.values())
            if best is None or rank < best[0]:
                best = rank, axes, values
    if best is None:
        raise CapacityError(
            f"none of these strategies fits into {room.memory / 1e9:.0f} GB a card", hint="take more cards."
        )
    return _choice(best[1], best[2])


def _choice(axes: dict[str, float], values: Sequence[float]) -> Choice:
    time, memory, energy, cost = (float(value) for value in values)
    return Choice(axes=axes, time=time, memory=memory, energy=energy, cost=cost)


def _front_choices(space: Space, tally: _Tally) -> tuple[Choice, ...]:
    """Return the front's choices, fastest first."""
    if tally.front is None:
        return ()
    tally.front.settle()
    order = np.argsort(tally.front.points[:, 0], kind="stable")
    made = []
    for place in order:
        option, *rest = (int(mark) for mark in tally.front.marks[place])
        overlaps, switches, row = rest[: len(OVERLAPS)], rest[len(OVERLAPS) : -1], rest[-1]
        axes = strategy_at(space, tally.table, row, switches=switches)
        axes |= {"offload": float(option), **dict(zip(OVERLAPS, map(float, overlaps), strict=True))}
        made.append(_choice(axes, tally.front.points[place]))
    return tuple(made)
