"""Which choices does no other beat in everything? The Pareto front of a stream of points, exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from supernode.workload.shape import Numbers

# Points of the front against which newcomers are tried before the exact comparison.
SCOUTS = 8
# Newcomers that are gathered before they are compared with the whole front.
GATHERED = 8192


def pareto(points: Numbers) -> NDArray[np.int64]:
    """Return the places of the points that no other is as small as in every column; of equal ones, the first.

    >>> pareto(np.array([[1.0, 4.0], [2.0, 3.0], [2.0, 5.0], [1.0, 4.0]])).tolist()
    [0, 1]
    """
    left = np.lexsort(points.T[::-1])
    kept = []
    while left.size:
        first = left[0]  # nothing that follows is smaller in the first column in which they differ
        kept.append(first)
        left = left[np.any(points[left] < points[first], axis=1)]
    return np.sort(np.asarray(kept, dtype=np.int64))


@dataclass(slots=True)
class Front:
    """The front of the points seen so far.

    Attributes:
        points: one row each, smaller being better in every column.
        marks: what each point stands for, one row of whole numbers each.
    """

    points: Numbers
    marks: NDArray[np.int64]
    _waiting: list[tuple[Numbers, NDArray[np.int64]]] = field(default_factory=list)
    _scouts: Numbers = field(default_factory=lambda: np.zeros((0, 0)))

    @classmethod
    def empty(cls, *, columns: int, marks: int) -> Front:
        """Return a front without points."""
        return cls(points=np.zeros((0, columns)), marks=np.zeros((0, marks), dtype=np.int64))

    @property
    def scouts(self) -> Numbers:
        """A few points that beat most of what comes, the best of all first."""
        return self._scouts

    def survivors(self, points: Numbers) -> NDArray[np.bool_]:
        """Return which points no scout beats."""
        alive = np.ones(len(points), dtype=bool)
        for scout in self._scouts:
            alive[alive] = np.any(points[alive] < scout, axis=1)
        return alive

    def offer(self, points: Numbers, marks: NDArray[np.int64]) -> None:
        """Take points into account."""
        self._waiting.append((points, marks))
        if not len(self._scouts) or sum(len(some) for some, _ in self._waiting) > GATHERED:
            self.settle()

    def settle(self) -> None:
        """Compare what waits with the front."""
        points = np.concatenate([self.points, *(some for some, _ in self._waiting)])
        marks = np.concatenate([self.marks, *(some for _, some in self._waiting)])
        self._waiting.clear()
        kept = pareto(points)
        self.points, self.marks = points[kept], marks[kept]
        self._scouts = self._chosen()

    def _chosen(self) -> Numbers:
        """Return the points with the least product of all columns, then some spread over the second."""
        if not len(self.points):
            return self._scouts
        middle = int(np.argmin(np.sum(np.log(np.maximum(self.points, 1e-300)), axis=1)))
        order = np.argsort(self.points[:, 1], kind="stable")
        spread = order[np.linspace(0, len(order) - 1, min(SCOUTS, len(order))).astype(int)]
        return self.points[[middle, *(place for place in spread if place != middle)]]
