"""Which links are there, and what does each carry? Cards and switches as vertices, links as arrays, faults as masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from supernode.errors import CapacityError, SpecError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Edge = tuple[int, int, float, float]
"""Two ends, bytes/s in each direction, seconds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Vertices and directed links. V vertices, L links; a link and its way back are two.

    Attributes:
        cards: the first so many vertices; the rest are switches.
        vertices: V.
        tail: (L,) vertex that a link leaves.
        head: (L,) vertex that it enters.
        bandwidth: (L,) bytes/s; 0 where the link is down.
        latency: (L,) seconds.
        half: (L,) bytes of a message at which the link reaches half of its bandwidth.
        overhead: seconds that each message keeps its sender busy beside.
        sizes: of the grid whose axes were joined level by level, innermost first; empty elsewhere.
    """

    cards: int
    vertices: int
    tail: Ints
    head: Ints
    bandwidth: Floats
    latency: Floats
    half: Floats
    overhead: float = 0.0
    sizes: tuple[int, ...] = ()

    @property
    def links(self) -> int:
        """L."""
        return self.tail.size

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        key = self.tail * self.vertices + self.head
        order = np.argsort(key)
        return key[order], order

    def find(self, tail: npt.ArrayLike, head: npt.ArrayLike) -> Ints:
        """Return the links from tails to heads.

        Raises:
            SpecError: two vertices that no link joins.
        """
        key, order = self._sorted
        wanted = np.atleast_1d(np.asarray(tail, dtype=np.int64) * self.vertices + np.asarray(head, dtype=np.int64))
        at = np.minimum(np.searchsorted(key, wanted), max(0, key.size - 1))
        missing = np.flatnonzero(key[at] != wanted) if key.size else np.arange(wanted.size)
        if missing.size:
            a, b = divmod(int(wanted[missing[0]]), self.vertices)
            raise SpecError(
                f"no link from {self.name(a)} to {self.name(b)}", hint=f"{self.name(a)} has {self._around(a)}."
            )
        return order[at]

    def name(self, vertex: int) -> str:
        """Return `card 3` or `switch 0`."""
        return f"card {vertex}" if vertex < self.cards else f"switch {vertex - self.cards}"

    def _around(self, vertex: int) -> str:
        return "links to " + (", ".join(self.name(int(b)) for b in self.head[self.tail == vertex][:12]) or "nobody")

    @cached_property
    def up(self) -> Ints:
        """The links that carry anything."""
        return np.flatnonzero(self.bandwidth > 0)

    def graph(self, weight: Floats) -> csr_array:
        """Return the links that are up as a (V, V) matrix of weights, each above 0."""
        size = (self.vertices, self.vertices)
        return csr_array((weight[self.up], (self.tail[self.up], self.head[self.up])), shape=size)

    def slowed(
        self, *, cards: Mapping[int, float] | None = None, links: Mapping[tuple[int, int], float] | None = None
    ) -> Network:
        """Return the network with stragglers.

        Args:
            cards: vertices, and the part of all their links' bandwidth that is left.
            links: pairs of vertices, and the part of the link between them that is left, both ways.
        """
        left = np.ones(self.links)
        for vertex, part in (cards or {}).items():
            left[(self.tail == vertex) | (self.head == vertex)] *= _part(part)
        for (a, b), part in (links or {}).items():
            left[np.concatenate([self.find(a, b), self.find(b, a)])] *= _part(part)
        return replace(self, bandwidth=self.bandwidth * left)

    def without(self, *, links: Iterable[tuple[int, int]] = (), vertices: Iterable[int] = ()) -> Network:
        """Return the network after links (both ways) and vertices, with all their links, have failed."""
        return self.slowed(cards=dict.fromkeys(vertices, 0.0), links=dict.fromkeys(links, 0.0))

    def check_reach(self, source: Ints, target: Ints) -> None:
        """Check that every source reaches its target.

        Raises:
            CapacityError: some do not; the message names who is cut off and the links that are down around them.
        """
        _, part = connected_components(self.graph(np.ones(self.links)), directed=True, connection="strong")
        lost = np.flatnonzero(part[source] != part[target])
        if not lost.size:
            return
        a, b = int(source[lost[0]]), int(target[lost[0]])
        small = min((part == part[a], part == part[b]), key=np.count_nonzero)
        down = np.flatnonzero((self.bandwidth <= 0) & (small[self.tail] != small[self.head]) & small[self.tail])
        inside = [self.name(int(vertex)) for vertex in np.flatnonzero(small)]
        cut = ", ".join(f"{self.name(int(self.tail[i]))} – {self.name(int(self.head[i]))}" for i in down[:8])
        raise CapacityError(
            f"{self.name(a)} cannot reach {self.name(b)}: {', '.join(inside[:8])}"
            f"{' …' if len(inside) > 8 else ''} cut off by the links that are down: {cut or 'none was ever there'}",
            hint="repair one of them, or leave the cards out.",
        )


def _part(part: float) -> float:
    if not 0 <= part <= 1:
        raise SpecError(f"{part} of a link is left", hint="give a part from 0 (down) to 1 (whole).")
    return part


def from_edges(
    edges: Sequence[Edge],
    *,
    cards: int,
    vertices: int = 0,
    half: float = 0.0,
    overhead: float = 0.0,
    sizes: tuple[int, ...] = (),
) -> Network:
    """Return the network of a list of edges; edges between the same ends become one link of their joint bandwidth.

    Args:
        cards: how many of the vertices are cards, numbered from 0.
        vertices: how many there are; 0 takes the highest number in the edges.

    Raises:
        SpecError: no positive bandwidth, a negative latency, or an end that is no vertex.
    """
    table = np.array(edges, dtype=np.float64).reshape(-1, 4)
    ends = table[:, :2].astype(np.int64)
    count = vertices or max(cards, int(ends.max(initial=-1)) + 1)
    _check_edges(table, ends, vertices=count)
    key, which = np.unique(
        np.concatenate([ends[:, 0] * count + ends[:, 1], ends[:, 1] * count + ends[:, 0]]), return_inverse=True
    )
    latency = np.full(key.size, np.inf)
    np.minimum.at(latency, which, np.tile(table[:, 3], 2))
    return Network(
        cards=cards,
        vertices=count,
        tail=key // count,
        head=key % count,
        bandwidth=np.bincount(which, weights=np.tile(table[:, 2], 2), minlength=key.size).astype(np.float64),
        latency=latency,
        half=np.full(key.size, half),
        overhead=overhead,
        sizes=sizes,
    )


def _check_edges(table: Floats, ends: Ints, *, vertices: int) -> None:
    if table.size and (ends.min() < 0 or ends.max() >= vertices or (ends[:, 0] == ends[:, 1]).any()):
        raise SpecError(
            "an edge has an end that is no vertex, or two equal ends", hint=f"number them 0 to {vertices - 1}."
        )
    if not (np.isfinite(table).all() and (table[:, 2] > 0).all() and (table[:, 3] >= 0).all()):
        raise SpecError("an edge without bandwidth, or of negative latency", hint="give bytes/s above 0, and seconds.")
