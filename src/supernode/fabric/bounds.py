"""What is the most that a network can carry? The exact optimum for small ones, cuts, and the bisection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack, kron
from scipy.sparse import eye_array as eye

from supernode.errors import RunError, SpecError
from supernode.fabric.network import Floats, Ints, Network

MOST_CUT_VERTICES = 20  # 2^19 cuts take a second


def optimum(network: Network, source: Ints, target: Ints, demand: Floats | None = None) -> float:
    """Return the largest λ such that every flow gets λ times its demand, whatever ways they take.

    Solves the multi-commodity flow exactly by HiGHS, the flows of one source as one commodity; for up to some
    10,000 sources × links.

    Args:
        demand: (F,); None asks one of each.

    Raises:
        RunError: the solver gives up.
    """
    wanted = np.ones(source.size) if demand is None else demand
    roots, row = np.unique(source, return_inverse=True)
    up, size = network.up, network.vertices
    incidence = _incidence(network)
    # Of each commodity, what enters a vertex less what leaves it is λ times what the vertex wants, the root left out.
    need = np.zeros((roots.size, size))
    np.add.at(need, (row, target), wanted)
    rows = np.concatenate([k * size + np.flatnonzero(np.arange(size) != root) for k, root in enumerate(roots)])
    balance = hstack([kron(eye(roots.size), incidence), csr_array(-need.reshape(-1, 1))]).tocsr()[rows]
    share = hstack([kron(np.ones((1, roots.size)), eye(up.size)), csr_array((up.size, 1))])
    cost = np.zeros(roots.size * up.size + 1)
    cost[-1] = -1.0
    scale = network.bandwidth[up].max()
    solved = linprog(
        cost, A_ub=share, b_ub=network.bandwidth[up] / scale, A_eq=balance, b_eq=np.zeros(rows.size), method="highs"
    )
    if not solved.success:
        raise RunError(
            f"HiGHS found no optimum: {solved.message}", hint="try fewer flows, or `adaptive` with its bound."
        )
    return float(-solved.fun * scale)


def _incidence(network: Network) -> csr_array:
    """Return (V, links that are up), 1 where a link enters a vertex, −1 where it leaves."""
    up = network.up
    links, ones = np.arange(up.size), np.ones(up.size)
    place = (np.concatenate([network.head[up], network.tail[up]]), np.concatenate([links, links]))
    return csr_array((np.concatenate([ones, -ones]), place), shape=(network.vertices, up.size))


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A part of the vertices, and what can leave it.

    Attributes:
        inside: (V,) which vertices.
        bandwidth: bytes/s of the links that leave it.
        demand: of the flows that must leave it.
    """

    inside: Ints
    bandwidth: float
    demand: float

    @property
    def ratio(self) -> float:
        """λ that the cut allows."""
        return self.bandwidth / self.demand if self.demand > 0 else np.inf


def tightest_cut(network: Network, source: Ints, target: Ints, demand: Floats | None = None) -> Cut:
    """Return the cut that allows least, by trying all.

    Raises:
        SpecError: more vertices than can be tried.
    """
    if network.vertices > MOST_CUT_VERTICES:
        raise SpecError(
            f"{network.vertices} vertices have too many cuts to try",
            hint=f"take at most {MOST_CUT_VERTICES}, or `cut` with a part of your own.",
        )
    wanted = np.ones(source.size) if demand is None else demand
    # Every subset without the last vertex and its complement are two cuts, one for each direction.
    number = np.arange(1, 1 << (network.vertices - 1))
    leaves = np.zeros((2, number.size))
    asks = np.zeros((2, number.size))
    sides = [(number >> vertex) & 1 for vertex in range(network.vertices)]
    for total, tails, heads, values in (
        (leaves, network.tail, network.head, network.bandwidth),
        (asks, source, target, wanted),
    ):
        for tail, head, value in zip(tails.tolist(), heads.tolist(), values.tolist(), strict=True):
            total[0] += value * (sides[tail] & ~sides[head] & 1)
            total[1] += value * (sides[head] & ~sides[tail] & 1)
    ratio = np.divide(leaves, asks, out=np.full_like(leaves, np.inf), where=asks > 0)
    way, best = np.unravel_index(int(np.argmin(ratio)), ratio.shape)
    inside = np.array([sides[vertex][best] for vertex in range(network.vertices)])
    return Cut(
        inside=inside if way == 0 else 1 - inside, bandwidth=float(leaves[way, best]), demand=float(asks[way, best])
    )


def cut(network: Network, inside: Ints, source: Ints, target: Ints, demand: Floats | None = None) -> Cut:
    """Return what a part of the vertices lets out, and what flows want out of it."""
    member = np.zeros(network.vertices, dtype=np.int64)
    member[inside] = 1
    wanted = np.ones(source.size) if demand is None else demand
    return Cut(
        inside=member,
        bandwidth=float(network.bandwidth[(member[network.tail] == 1) & (member[network.head] == 0)].sum()),
        demand=float(wanted[(member[source] == 1) & (member[target] == 0)].sum()),
    )


def hop_bound(network: Network, source: Ints, target: Ints, hops: Floats, demand: Floats | None = None) -> float:
    """Return λ above which the links together have too little bandwidth for all hops that flows must make."""
    wanted = np.ones(source.size) if demand is None else demand
    return float(network.bandwidth.sum() / (wanted * hops).sum())
