"""Which ways are there to run a model on so many cards? All valid strategies, as rectangular blocks of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supernode.errors import SpecError
from supernode.search.offload import EVERY_OFFLOAD
from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import (
    FULL,
    GPIPE,
    INTERLEAVED,
    NO_RECOMPUTE,
    ONE_F_ONE_B,
    SELECTIVE,
    ZERO_BUBBLE,
    Software,
    Strategies,
)

Grid = dict[str, NDArray[np.int64]]
ROW_AXES = ("cards", "tensor", "context", "expert", "pipeline", "schedule", "interleave", "micro_batch")
SWITCHES = ("sequence_parallel", "recompute", "sharding")
OVERLAPS = ("overlaps_tensor", "overlaps_data", "overlaps_pipeline")
AXES = (*ROW_AXES, "data", *SWITCHES, "offload", *OVERLAPS)
# Below this a card's part of a sequence is too short for ring attention to hide anything.
SHORTEST_PART = 256
BLOCK_ROWS = 1024  # so that a few arrays of one offload (24 × 1024 × 8 bytes) lie in a core's caches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Strategies that differ in rows (last dim) and in switches (dims before it), each combination being valid.

    Attributes:
        rows: place of each row in the whole space, for ties and to find it again.
        ways: dims (sequence_parallel, recompute, sharding, row), each field of extent 1 where it does not vary.
        offloads: what may be offloaded, each with all the rest.
        software: with what is overlapped.
        cards: of each row.
    """

    rows: NDArray[np.int64]
    ways: Strategies
    offloads: tuple[int, ...]
    software: Software
    cards: Numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of (offload, sequence_parallel, recompute, sharding, row)."""
        ways = self.ways
        switches = (ways.sequence_parallel.size, ways.recompute.size, ways.sharding.size)
        return (len(self.offloads), *switches, self.rows.size)

    @property
    def strategies(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def pick(self, option: int, flat: int) -> dict[str, float]:
        """Return the strategy at a place of the flattened dims behind the offload, axis by axis."""
        *switches, row = (int(i) for i in np.unravel_index(flat, self.shape[1:]))
        return {
            "cards": float(self.cards[row]),
            **{name: float(getattr(self.ways, name)[row]) for name in (*ROW_AXES[1:], "data")},
            **{name: float(getattr(self.ways, name).flat[i]) for name, i in zip(SWITCHES, switches, strict=True)},
            "offload": float(option),
            **{name: float(getattr(self.software, name)) for name in OVERLAPS},
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """The strategies of a model on so many cards.

    Degrees divide what they spread: tensor the heads and feed-forward widths, context the sequence, expert the experts
    and the cards of a stage, data × micro-batch the batch. Stages hold the same number of layers, or would if the
    embedding and the head counted as layers (Llama 3 405B: 126 + 2). Interleaved schedules want micro-batches by
    the stageful (Megatron-LM). Options that change nothing are left out: sharding over one card, selective
    recomputation where attention never writes its scores.

    Attributes:
        model: of one shape.
        cards: card counts to consider.
        batch: samples of one step.
        sequence: tokens of a sample.
        software: what the trainer does; what overlaps is varied if `overlaps` has both.
        precision: index into `PRECISIONS`.
        spare: layers that embedding and head may stand for.
        schedules: pipeline schedules.
        shardings: ZeRO stages.
        offloads: what may lie in host memory.
        overlaps: whether the tensor, data and pipeline axes' traffic is overlapped; None for what the software does.
        most_tensor: largest tensor degree.
        most_context: largest context degree.
        most_expert: largest expert degree.
        most_pipeline: most stages.
        sequence_parallels: whether norms and residuals may be spread over the tensor axis: 0, 1.
        only_recomputes: what may be computed again; None for all that changes something.
        does: what the program does besides, as it follows from the strategies; None for nothing.
        allows: tells which strategies the program takes together; None for all.
        is_filled: a step has at least as many micro-batches as there are stages.
        cut: layers of the fullest pipeline rank but the last, and of the last, for a pipeline degree and an
            interleaving; None for stages of equal layers.
    """

    model: ModelShape
    cards: tuple[int, ...]
    batch: int
    sequence: int
    software: Software = field(default_factory=Software)
    precision: int = 1
    spare: int = 2
    schedules: tuple[int, ...] = (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE)
    shardings: tuple[int, ...] = (0, 1, 2, 3)
    offloads: tuple[int, ...] = EVERY_OFFLOAD
    overlaps: tuple[bool, ...] | None = None
    most_tensor: int = 1024
    most_context: int = 64
    most_expert: int = 1024
    most_pipeline: int = 1024
    sequence_parallels: tuple[int, ...] = (0, 1)
    only_recomputes: tuple[int, ...] | None = None
    is_filled: bool = False
    allows: Callable[[Strategies], NDArray[np.bool_]] | None = None
    does: Callable[[Software, Strategies], Software] | None = None
    cut: Callable[[int, int], tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if not self.cards or min(self.cards) < 1 or self.batch < 1 or self.sequence < 1:
            raise SpecError(
                f"a space of {self.cards} cards, batch {self.batch}, sequence {self.sequence}", hint="give 1 or more."
            )

    @property
    def recomputes(self) -> tuple[int, ...]:
        """What may be computed again."""
        if self.only_recomputes is not None:
            return self.only_recomputes
        return (NO_RECOMPUTE, FULL) if self.software.flash else (NO_RECOMPUTE, SELECTIVE, FULL)

    @property
    def strategies(self) -> int:
        """How many there are, without walking through them."""
        return sum(block.strategies for block in self.blocks())

    def blocks(
        self, *, table: dict[str, Numbers] | None = None, rows: NDArray[np.int64] | None = None, size: int = BLOCK_ROWS
    ) -> Iterator[Block]:
        """Yield all strategies once, fewest cards first, or only those of some rows of what `row_table` returned."""
        table = row_table(self) if table is None else table
        chosen = np.arange(table["cards"].size) if rows is None else rows
        is_spread = table["tensor"][chosen] > 1
        is_copied = (table["data"] * table["context"])[chosen] > 1
        is_staged = table["pipeline"][chosen] > 1
        for cards in sorted(set(self.cards)):
            here = table["cards"][chosen] == cards
            for spread, copied, staged in product((True, False), repeat=3):
                alike = (is_spread == spread) & (is_copied == copied) & (is_staged == staged)
                kind = chosen[here & alike]
                for start in range(0, kind.size, size):
                    rows_here = kind[start : start + size]
                    yield from self._alike(table, rows_here, spread=spread, copied=copied, staged=staged)

    def stages(self, pipeline: Numbers, interleave: Numbers) -> dict[str, Numbers]:
        """Return the layers of the fullest pipeline ranks as strategies have them; nothing where all hold as many."""
        if self.cut is None:
            return {}
        held = [self.cut(int(p), int(v)) for p, v in zip(np.ravel(pipeline), np.ravel(interleave), strict=True)]
        most, last = np.array(held, dtype=float).T.reshape(2, *np.shape(pipeline))
        return {"fullest": most, "last": last}

    def working(self, software: Software, ways: Strategies) -> Software:
        """Return the software with what it does on strategies."""
        return self.does(software, ways) if self.does is not None else software

    def _alike(
        self, table: dict[str, Numbers], rows: NDArray[np.int64], *, spread: bool, copied: bool, staged: bool
    ) -> Iterator[Block]:
        """Yield the blocks of rows that have the same switches, one for each way to overlap."""
        part = {name: numbers[rows] for name, numbers in table.items()}
        cards = part.pop("cards")
        ways = Strategies(
            **part, **self.stages(part["pipeline"], part["interleave"]),
            batch=np.asarray(float(self.batch)), sequence=np.asarray(float(self.sequence)),
            precision=np.asarray(float(self.precision)),
            sequence_parallel=_dim(self.sequence_parallels if spread else (0,), 2), recompute=_dim(self.recomputes, 1),
            sharding=_dim(self.shardings if copied else (0,), 0),
        )  # fmt: skip
        matters = (spread, copied, staged)
        usual = [bool(getattr(self.software, name)) for name in OVERLAPS]
        varied = [self.overlaps if self.overlaps and m else (u,) for u, m in zip(usual, matters, strict=True)]
        for choice in product(*varied):
            overlaps: dict[str, Any] = dict(zip(OVERLAPS, choice, strict=True))
            software = self.working(replace(self.software, **overlaps), ways)
            yield Block(rows=rows, ways=ways, offloads=self.offloads, software=software, cards=cards)


def _dim(values: tuple[int, ...], after: int) -> Numbers:
    """Return values along a dim with `after` further switches and the rows behind it."""
    return np.asarray(values, dtype=float).reshape(-1, *[1] * (after + 1))


def strategy_at(space: Space, table: dict[str, Numbers], row: int, *, switches: Sequence[int]) -> dict[str, float]:
    """Return a row of the table with the switches at these places, axis by axis."""
    axes = {name: float(numbers[row]) for name, numbers in table.items()}
    spread, recompute, sharding = switches
    # Where a switch does not matter, its first value stands alone.
    return {
        **axes,
        "sequence_parallel": float(space.sequence_parallels[spread] if axes["tensor"] > 1 else 0),
        "recompute": float(space.recomputes[recompute]),
        "sharding": float(space.shardings[sharding] if axes["data"] * axes["context"] > 1 else 0),
    }


def divisors(number: int) -> list[int]:
    """Return what divides a number, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def row_table(space: Space) -> dict[str, Numbers]:
    """Return the valid rows of a space, axis by axis, in the order of `ROW_AXES`, first axis slowest."""
    model, layers = space.model, int(space.model.layers)
    together = reduce(math.gcd, [int(n) for n in (model.heads, model.mlp_width, model.mamba_heads) if n > 1] or [1])
    parts = sorted({d for extra in range(space.spare + 1) for d in divisors(layers + extra) if d <= layers})
    candidates: dict[str, list[int]] = {
        "cards": sorted(set(space.cards)),
        "tensor": [t for t in divisors(together) if t <= space.most_tensor],
        "context": _contexts(space),
        "expert": [e for e in divisors(int(model.experts)) if e <= space.most_expert] if model.mixtures else [1],
        "pipeline": [stages for stages in parts if stages <= space.most_pipeline],
    }
    grid = _combined(candidates)
    grid = _keep(grid, grid["cards"] % (grid["tensor"] * grid["context"] * grid["pipeline"]) == 0)
    grid["data"] = grid["cards"] // (grid["tensor"] * grid["context"] * grid["pipeline"])
    stage = grid["cards"] // grid["pipeline"]
    kv = int(model.key_value_heads)
    fits = (stage % grid["expert"] == 0) & (space.sequence % (grid["tensor"] * grid["context"]) == 0)
    fits &= (kv % grid["tensor"] == 0) | (grid["tensor"] % kv == 0)
    grid = _keep(grid, fits & (space.batch % grid["data"] == 0))
    inner = {"schedule": sorted(space.schedules), "interleave": parts, "micro_batch": divisors(space.batch)}
    grid = _combined(inner, within=grid)
    grid = _keep(grid, _runs(space, grid, layers))
    return {name: numbers.astype(float) for name, numbers in grid.items()}


def _contexts(space: Space) -> list[int]:
    most = min(space.most_context, max(1, space.sequence // SHORTEST_PART))
    return [2**power for power in range(most.bit_length()) if 2**power <= most] if space.model.attentions else [1]


def _runs(space: Space, grid: Grid, layers: int) -> NDArray[np.bool_]:
    """Return which schedules, interleavings and micro-batches go with the degrees beside them."""
    stages, parts = grid["pipeline"], grid["pipeline"] * grid["interleave"]
    schedule = grid["schedule"]
    samples = grid["data"] * grid["micro_batch"]
    whole = space.batch % samples == 0
    spare = -layers % parts
    is_even = (parts <= layers) & (spare <= space.spare)
    by_stageful = (space.batch // samples) % stages == 0
    if space.is_filled:
        whole &= space.batch // samples >= stages
    interleaved = (schedule == INTERLEAVED) & (stages > 1) & (grid["interleave"] > 1) & by_stageful
    # One stage has no pipeline, so that one name stands for all schedules.
    alone = schedule == min(space.schedules, key=lambda s: (s != ONE_F_ONE_B, s))
    plain = (schedule != INTERLEAVED) & (stages > 1) | alone & (stages == 1)
    kept: NDArray[np.bool_] = whole & is_even & (interleaved | plain & (grid["interleave"] == 1))
    return kept


def _combined(axes: dict[str, list[int]], within: Grid | None = None) -> Grid:
    """Return every combination of the axes' values, within every row of a table if there is one."""
    grids = np.meshgrid(*(np.asarray(values, dtype=np.int64) for values in axes.values()), indexing="ij")
    flat = {name: grid.ravel() for name, grid in zip(axes, grids, strict=True)}
    if within is None:
        return flat
    inner, outer = grids[0].size, next(iter(within.values())).size
    return {
        **{name: np.repeat(numbers, inner) for name, numbers in within.items()},
        **{name: np.tile(numbers, outer) for name, numbers in flat.items()},
    }


def _keep(grid: Grid, which: NDArray[np.bool_]) -> Grid:
    return {name: numbers[which] for name, numbers in grid.items()}
