"""Where does a compact block fit on a torus? All shapes of a size, and all free places of a shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MOST_SNAKES = 48
"""Part-filled boxes that are tried for one size; whole ones all are."""
MOST_KEPT = 4096
"""Shapes that are remembered, and cards of a shape up to which its places are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A shape of cards on a torus: a box, or the first cards along a snake through one.

    Attributes:
        sizes: of the box.
        cards: how many of its places are filled.
        diameter: most hops between two of them along links inside; of a snake, of its box.
        links: fewest links inside of any card; 0 of a snake, whose cards must be counted.
    """

    sizes: tuple[int, ...]
    cards: int
    diameter: int
    links: int

    @property
    def is_whole(self) -> bool:
        """Whether every place of the box is filled."""
        return math.prod(self.sizes) == self.cards

    def offsets(self) -> Ints:
        """Return (cards, D) the places from the box's corner, neighbours one after the other."""
        return _kept_snake(self.sizes, self.cards) if self.cards <= MOST_KEPT else _snake(self.sizes, self.cards)

    def boxes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Return (corner, sizes) of the few boxes that the cards fill: slabs, rows and the rest of a row."""
        return _boxes(self.sizes, self.cards)


def _snake(sizes: tuple[int, ...], cards: int) -> Ints:
    """Return (cards, D) the first places along a snake through a box.

    Its slabs lie across the longest side, and its rows across the next: what is left over is smallest.
    """
    order = sorted(range(len(sizes)), key=lambda dim: -sizes[dim])
    offsets = np.empty((cards, len(sizes)), dtype=np.int64)
    rest, turns = np.arange(cards), np.zeros(cards, dtype=np.int64)
    for index, dim in enumerate(order):
        layer = math.prod(sizes[inner] for inner in order[index + 1 :])
        step, rest = np.divmod(rest, layer)
        offsets[:, dim] = np.where(turns % 2, sizes[dim] - 1 - step, step)
        turns = turns * sizes[dim] + step
    offsets.setflags(write=False)
    return offsets


_kept_snake = lru_cache(maxsize=MOST_KEPT // 8)(_snake)


@lru_cache(maxsize=MOST_KEPT)
def _boxes(sizes: tuple[int, ...], cards: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    if math.prod(sizes) == cards:
        return (((0,) * len(sizes), sizes),)
    offsets, start, boxes = _snake(sizes, cards), 0, []
    sides = sorted(sizes, reverse=True)
    for index in range(len(sides)):
        layer = math.prod(sides[index + 1 :])
        end = start + (cards - start) // layer * layer
        if end > start:
            low, high = offsets[start:end].min(axis=0), offsets[start:end].max(axis=0)
            boxes.append((tuple(low.tolist()), tuple((high - low + 1).tolist())))
        start = end
    return tuple(boxes)


class BoxSums:
    """Sums over boxes of a torus, all places at once, wrapped around; built once for one array."""

    def __init__(self, values: Ints | Flags, shape: tuple[int, ...]) -> None:
        self.shape = shape
        table = np.zeros([2 * size + 1 for size in shape], dtype=np.int32)
        inner = np.tile(values.reshape(shape).astype(np.int32), [2] * len(shape))
        for axis in range(len(shape)):
            np.cumsum(inner, axis=axis, out=inner)
        table[tuple(slice(1, None) for _ in shape)] = inner
        self._table = table

    def at(self, corner: tuple[int, ...], sizes: tuple[int, ...]) -> Ints:
        """Return, for each place, the sum over the box whose corner lies so far from it (modulo the torus)."""
        corner = tuple(start % size for start, size in zip(corner, self.shape, strict=True))
        table = self._table
        for axis, (start, size, whole) in enumerate(zip(corner, sizes, self.shape, strict=True)):
            before = (slice(None),) * axis
            high = table[(*before, slice(start + size, start + size + whole))]
            table = high - table[(*before, slice(start, start + whole))]
        return table.astype(np.int64)


class Blocks:
    """The blocks of one torus, remembered by size."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._sizes = np.stack(
            np.meshgrid(*[np.arange(1, size + 1) for size in shape], indexing="ij"), axis=-1
        ).reshape(-1, len(shape))
        self._volumes = self._sizes.prod(axis=1)
        wraps = self._sizes == np.array(shape)
        self._diameters = np.where(wraps, self._sizes // 2, self._sizes - 1).sum(axis=1)
        # A whole dim is a ring, whose cards have two links along it (a dim of two, one neighbour over two links).
        links = np.where(self._sizes == 1, 0, np.where(wraps, 2, 1))
        self._links = links.sum(axis=1)
        self._known: dict[int, tuple[Block, ...]] = {}

    def of(self, cards: int) -> tuple[Block, ...]:
        """Return the blocks of so many cards, least diameter first, whole boxes before snakes."""
        if cards not in self._known:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[cards] = tuple(self._of(cards))
        return self._known[cards]

    def of_sizes(self, sizes: tuple[int, ...]) -> tuple[Block, ...]:
        """Return the boxes of these sizes in every orientation that the torus has room for, the given one first."""
        padded = sizes + (1,) * (len(self.shape) - len(sizes))
        turned = dict.fromkeys(itertools.permutations(padded))
        fits = [turn for turn in turned if all(a <= b for a, b in zip(turn, self.shape, strict=True))]
        return tuple(self._block(int(np.flatnonzero((self._sizes == turn).all(axis=1))[0])) for turn in fits)

    def _of(self, cards: int) -> Iterator[Block]:
        whole = np.flatnonzero(self._volumes == cards)
        # A snake's box is needed to its last slab: without it, its cards would not fit.
        slab = self._volumes // self._sizes.max(axis=1)
        part = np.flatnonzero((self._volumes > cards) & (self._volumes - slab < cards))
        part = part[np.lexsort((self._volumes[part], self._diameters[part]))][:MOST_SNAKES]
        both = np.concatenate([whole, part])
        for index in both[np.lexsort((self._volumes[both], self._diameters[both]))]:
            yield self._block(int(index), cards)

    def _block(self, index: int, cards: int = 0) -> Block:
        volume = int(self._volumes[index])
        return Block(
            sizes=tuple(self._sizes[index].tolist()),
            cards=cards or volume,
            diameter=int(self._diameters[index]),
            links=int(self._links[index]) if cards in (0, volume) else 0,
        )

    def places(self, block: Block, free: BoxSums) -> Flags:
        """Return (C,) at which places all of the block's cards are free."""
        flags = np.ones(self.shape, dtype=np.bool_)
        for corner, sizes in block.boxes():
            flags &= free.at(corner, sizes) == math.prod(sizes)
        return flags.ravel()

    def exposure(self, block: Block, free: BoxSums) -> Ints:
        """Return (C,) how many free cards would touch the faces of the block's box: few means a tight fit."""
        touched = np.zeros(self.shape, dtype=np.int64)
        for dim, (size, whole) in enumerate(zip(block.sizes, self.shape, strict=True)):
            if size == whole:
                continue
            face = tuple(1 if axis == dim else side for axis, side in enumerate(block.sizes))
            for start in {size, whole - 1}:
                touched += free.at(tuple(start if axis == dim else 0 for axis in range(len(self.shape))), face)
        return touched.ravel()

    def cards(self, block: Block, place: int) -> Ints:
        """Return the cards of a block at a place, neighbours one after the other."""
        corner = np.array(np.unravel_index(place, self.shape))
        where = (block.offsets() + corner) % np.array(self.shape)
        return np.asarray(np.ravel_multi_index(tuple(where.T), self.shape), dtype=np.int64)
