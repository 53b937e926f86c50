"""How can flows share all paths well? Each shifts bytes to where links are less loaded, until no shift helps.

Links ask a price that rises steeply with their load. New paths are the cheapest at those prices; flows move their
bytes from dear to cheap paths in small steps. The prices also prove how far the result is from the best possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import csr_array

from supernode.fabric.network import Floats, Ints, Network
from supernode.fabric.routes import Routes, cheapest, checked, routes_from, spread, walk

GAP = 0.01  # stop when at most so far from the best possible
ROUNDS = 12  # of new paths
STEPS = 1500  # of shifting in a round
ENOUGH = 0.001  # of the busiest link's load: what further shifting in a round may still be worth
SCATTERED = 4  # paths of random prices, and random shortest ones, to begin with
STEEPNESS = (12.0, 40.0, 120.0)  # of the prices that look for new paths: flat ones find detours, steep ones relief


@dataclass(frozen=True, kw_only=True, eq=False)
class Balance:
    """What adaptive routing found.

    Attributes:
        routes: the ways, and how each flow is dealt out to them.
        throughput: every flow gets so many times its demand at once.
        bound: no routing whatever gives more.
    """

    routes: Routes
    throughput: float
    bound: float


def adaptive(network: Network, source: Ints, target: Ints) -> Routes:
    """Return the ways of flows of equal size, balanced over all paths.

    Raises:
        CapacityError: a target cannot be reached.
    """
    return balance(network, source, target).routes


def balance(network: Network, source: Ints, target: Ints, demand: Floats | None = None, *, gap: float = GAP) -> Balance:
    """Return routes by which all flows get nearly as much as any routing can give them, in proportion to demand.

    Args:
        demand: (F,), above 0; None takes one of each.
        gap: stop when the bound proves to be no further than this part away.

    Raises:
        CapacityError: a target cannot be reached.
    """
    source, target = checked(network, source, target)
    wanted = np.ones(source.size) if demand is None else np.asarray(demand, dtype=np.float64)
    taken = np.divide(1.0, network.bandwidth, out=np.zeros(network.links), where=network.bandwidth > 0)
    paths = _first(network, source, target)
    trial = share = np.ones(source.size)
    worst, bound, reach = float(np.max(paths.load(share * wanted) * taken)), 0.0, 1.0
    steep, steepest = 50.0, np.log(network.links) / (gap / 3)
    for _ in range(ROUNDS):
        used = paths.load(paths.widened(trial) * wanted[paths.flow]) * taken
        prices = [_prices(used, steepness) * taken for steepness in (*STEEPNESS, steep)]
        ways = [cheapest(network, source, target, price + 1e-13 * price.max()) for price in prices]
        costs = [wanted @ way[0] / (price @ network.bandwidth) for way, price in zip(ways, prices, strict=True)]
        bound = max(bound, *(float(cost) for cost in costs))
        if bound >= worst * (1 - gap):
            break
        paths = _grown(paths, network, source, target, ways)
        matrix = csr_array(paths.part.multiply((taken / worst)[:, None]).multiply(wanted[paths.flow][None, :]))
        mixed = _parted(paths.widened(share) + 0.02, paths.flow)
        trial, best, reach = _shift(matrix, paths.flow, mixed, steep=steep, reach=max(reach / 10, 1e-3))
        if best < 1:
            share, worst = trial, worst * best
        steep = min(steepest, steep * 1.6)
    return Balance(routes=_dealt(paths, share, network, source, target), throughput=1 / worst, bound=1 / bound)


def _dealt(paths: _Paths, share: Floats, network: Network, source: Ints, target: Ints) -> Routes:
    """Return the routes of flows that are dealt out to their ways."""
    entries = csr_array(paths.part.multiply(paths.widened(share)[None, :])).tocoo()
    flow = paths.flow[entries.col]
    return routes_from(network, source, target, link=entries.row, flow=flow, part=entries.data)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Paths:
    """P ways that flows may take. `part` (L, P): how much of the way goes over a link; `mark` (P,) tells ways apart."""

    flow: Ints
    part: csr_array
    mark: Floats
    lottery: Floats

    def load(self, amount: Floats) -> Floats:
        return np.asarray(self.part @ amount, dtype=np.float64)

    def widened(self, share: Floats) -> Floats:
        """Return shares for all ways, none for the new ones."""
        return np.concatenate([share, np.zeros(self.flow.size - share.size)])


def _first(network: Network, source: Ints, target: Ints) -> _Paths:
    """Return the even spread over all shortest paths as each flow's only way."""
    lottery = np.random.default_rng(0).random(network.links)
    part = spread(network, source, target).part
    return _Paths(flow=np.arange(source.size), part=part, mark=np.asarray(part.T @ lottery), lottery=lottery)


def _grown(
    paths: _Paths, network: Network, source: Ints, target: Ints, ways: Sequence[tuple[Floats, Ints, Ints]]
) -> _Paths:
    """Return the ways with the cheapest of several prices beside them; the first time, some random ones, too."""
    if paths.flow.size == source.size:
        dice = np.random.default_rng(1)
        for _ in range(SCATTERED):
            _, link, flow = cheapest(network, source, target, dice.uniform(1, 2, network.links))
            paths = _more(paths, link, flow, np.ones(link.size))
            paths = _more(paths, *walk(network, source, target, dice, single=True))
    for _, link, flow in ways:
        paths = _more(paths, link, flow, np.ones(link.size))
    return paths


def _more(paths: _Paths, link: Ints, flow: Ints, part: Floats) -> _Paths:
    """Return the ways with one more of each flow, unless it has that one already."""
    flows = int(paths.flow.max(initial=-1)) + 1
    fresh = csr_array((part, (link, flow)), shape=(paths.part.shape[0], flows))
    mark = np.asarray(fresh.T @ paths.lottery)
    known = np.unique(np.round(paths.mark, 9) + 1e3 * paths.flow)
    new = np.flatnonzero(~np.isin(np.round(mark, 9) + 1e3 * np.arange(flows), known) & (mark > 0))
    joint = np.concatenate([paths.flow, new])
    old, add = paths.part.tocoo(), fresh[:, new].tocoo()
    matrix = csr_array(
        (
            np.concatenate([old.data, add.data]),
            (np.concatenate([old.row, add.row]), np.concatenate([old.col, add.col + paths.flow.size])),
        ),
        shape=(paths.part.shape[0], joint.size),
    )
    return replace(paths, flow=joint, part=matrix, mark=np.concatenate([paths.mark, mark[new]]))


def _prices(used: Floats, steepness: float) -> Floats:
    rise = np.exp(steepness * (used / used.max() - 1))
    return np.asarray(np.maximum(rise / rise.sum(), 1e-9 / used.size), dtype=np.float64)


def _parted(amount: Floats, flow: Ints) -> Floats:
    """Return the amounts scaled so that each flow's make one."""
    return np.asarray(amount / np.bincount(flow, weights=amount)[flow], dtype=np.float64)


def _shift(matrix: csr_array, flow: Ints, share: Floats, *, steep: float, reach: float) -> tuple[Floats, float, float]:
    """Return better shares, the load of the busiest link, and the reach of the last step.

    Minimises log Σ exp(steep · load) / steep over the flows' shares, by accelerated mirror descent that starts afresh
    when it overshoots.

    Args:
        matrix: (L, P), load of each link when a flow takes one way only.
        reach: the steps' inverse length to begin with.

    Source: Tseng, "On accelerated proximal gradient methods for convex-concave optimization", 2008, algorithm 1;
        O'Donoghue and Candès, "Adaptive restart for accelerated gradient schemes", 2015.
    """
    back, flows = matrix.T.tocsr(), int(flow.max()) + 1
    here, lead, weight, before = share, share, 1.0, np.inf
    best, lowest = share, float((matrix @ share).max())
    for _ in range(STEPS):
        probe = (1 - weight) * here + weight * lead
        now, price = _softened(matrix @ probe, steep)
        if now > before and weight < 1:
            lead, weight, before = here, 1.0, np.inf
            continue
        before, slope = now, back @ price
        least = np.full(flows, np.inf)
        np.minimum.at(least, flow, slope)
        if slope @ probe - least.sum() < ENOUGH:
            break  # by convexity, no shares are better by more than this
        down = slope - least[flow]
        ahead, reach = _step(matrix, flow, down, here, lead, weight=weight, reach=reach, steep=steep, goal=(now, slope))
        here, lead, reach = (1 - weight) * here + weight * ahead, ahead, reach * 0.9
        weight = (np.sqrt(weight**4 + 4 * weight**2) - weight**2) / 2
        top = float((matrix @ here).max())
        if top < lowest:
            best, lowest = here, top
    return best, lowest, reach


def _step(
    matrix: csr_array,
    flow: Ints,
    down: Floats,
    here: Floats,
    lead: Floats,
    *,
    weight: float,
    reach: float,
    steep: float,
    goal: tuple[float, Floats],
) -> tuple[Floats, float]:
    """Return the lead's next shares, by the longest step that keeps what the slope promises, and its reach."""
    now, slope = goal
    while True:
        ahead = _parted(lead * np.exp(-np.minimum(down / (weight * reach), 50.0)) + 1e-15, flow)
        moved = np.sum(ahead * np.log(np.maximum(ahead, 1e-300) / np.maximum(lead, 1e-300)))
        promised = now + weight * (slope @ (ahead - lead)) + weight**2 * reach * moved
        if _softened(matrix @ ((1 - weight) * here + weight * ahead), steep)[0] <= promised + 1e-13 or reach > 1e9:
            return ahead, reach
        reach *= 2


def _softened(used: Floats, steep: float) -> tuple[float, Floats]:
    """Return a smooth stand-in for the highest load, at most log L / steep above it, and its slope."""
    top = float(used.max())
    rise = np.exp(steep * (used - top))
    whole = float(rise.sum())
    return top + float(np.log(whole)) / steep, rise / whole
