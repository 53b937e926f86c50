"""Who is next to whom? The neighbours, links, places and distances of a machine's cards as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from supernode.errors import SpecError
from supernode.hardware.machine import DIRECT, Machine, Tier

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fabric:
    """The cards' fabric as arrays. C cards, P ports of a card, D dims of the torus.

    Attributes:
        kind: ring, torus, full_mesh, switched or hybrid.
        cards: how many.
        shape: sizes of the torus; empty elsewhere.
        peers: (C, P), the card behind each port; -1 where there is none. On a torus port 2d leads up along dim d and
            port 2d + 1 down. Behind switches a card has no neighbours, and P is 0.
        units: (P,), links that a port bundles: a dim of size two joins the same two cards twice, behind one port.
        link_bandwidth: bytes/s of one link, one direction; of the card's port where a switch is between.
        tiers: groups of cards, innermost first.
    """

    kind: str
    cards: int
    shape: tuple[int, ...]
    peers: Ints
    units: Ints
    link_bandwidth: float
    tiers: tuple[Tier, ...]

    @property
    def is_direct(self) -> bool:
        """Whether cards are joined to each other without a switch between."""
        return self.kind in DIRECT

    @cached_property
    def coordinates(self) -> Ints:
        """(C, D), place of each card on the torus, row-major; (C, 0) elsewhere."""
        if not self.shape:
            return np.zeros((self.cards, 0), dtype=np.int64)
        return np.stack(np.unravel_index(np.arange(self.cards), self.shape), axis=1).astype(np.int64)

    def neighbours(self, card: int) -> Ints:
        """Return the cards that one link leads to, ascending.

        Raises:
            SpecError: no such card.
        """
        self._check(card)
        row = self.peers[card]
        return np.unique(row[row >= 0])

    def links(self) -> tuple[Ints, Ints]:
        """Return the pairs of joined cards (L, 2), smaller number first, and the links that each pair bundles (L)."""
        card, port = np.nonzero(self.peers > np.arange(self.cards)[:, None])
        return np.stack([card, self.peers[card, port]], axis=1), self.units[port]

    def hops(self, source: int | Ints, target: int | Ints) -> Ints:
        """Return the fewest links between cards; arrays broadcast. Behind switches, up and down count one each."""
        for cards in (source, target):
            self._check(int(np.min(cards, initial=0)))
            self._check(int(np.max(cards, initial=0)))
        a, b = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
        if self.shape:
            sizes = np.asarray(self.shape)
            apart = np.abs(self.coordinates[a] - self.coordinates[b])
            return np.asarray(np.minimum(apart, sizes - apart).sum(axis=-1), dtype=np.int64)
        if self.kind == "full_mesh":
            return np.asarray(a != b, dtype=np.int64)
        levels = sum((a // tier.cards != b // tier.cards).astype(np.int64) for tier in self.tiers[:-1])
        return np.asarray(np.where(a == b, 0, 2 * (levels + 1)), dtype=np.int64)

    @property
    def diameter(self) -> int:
        """Most hops between two cards."""
        if self.shape:
            return sum(size // 2 for size in self.shape)
        return 0 if self.cards == 1 else 1 if self.kind == "full_mesh" else 2 * len(self.tiers)

    def _check(self, card: int) -> None:
        if not 0 <= card < self.cards:
            raise SpecError(f"card {card} of a machine of {self.cards}", hint=f"choose 0 to {self.cards - 1}.")


def build_fabric(machine: Machine) -> Fabric:
    """Return how a machine's cards are joined."""
    if machine.shape:
        neighbours, units = _torus(machine.shape)
    elif machine.topology == "full_mesh":
        neighbours, units = _full_mesh(machine.card_count)
    else:
        neighbours, units = np.zeros((machine.card_count, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
    return Fabric(
        kind=machine.topology,
        cards=machine.card_count,
        shape=machine.shape,
        peers=neighbours,
        units=units,
        link_bandwidth=machine.link_bandwidth,
        tiers=machine.tiers,
    )


def _torus(shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    cards = math.prod(shape)
    place = np.arange(cards, dtype=np.int64).reshape(shape)
    none = np.full(cards, -1, dtype=np.int64)
    ports, units = [], []
    for dim, size in enumerate(shape):
        ports.append(np.roll(place, -1, axis=dim).ravel() if size > 1 else none)
        ports.append(np.roll(place, 1, axis=dim).ravel() if size > 2 else none)
        units += [2 if size == 2 else 1, 1]
    return np.stack(ports, axis=1), np.array(units, dtype=np.int64)


def _full_mesh(cards: int) -> tuple[Ints, Ints]:
    others = np.arange(cards - 1, dtype=np.int64)[None, :]
    neighbours = others + (others >= np.arange(cards, dtype=np.int64)[:, None])
    return neighbours, np.ones(cards - 1, dtype=np.int64)
