"""How fast do many flows go at once? Max-min fair shares of the links, and who has finished when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from supernode.collectives.message import Phase, Schedule
from supernode.errors import CapacityError
from supernode.fabric.network import Floats, Ints, Network
from supernode.fabric.routes import Router, Routes, spread

TIE = 1e-9  # relative; events and bottlenecks nearer than this are one


def fair_rates(part: csr_array, bandwidth: Floats) -> Floats:
    """Return (F,) bytes/s of flows that share links fairly: none can have more unless one with no more has less.

    All flows rise together until a link is full; its flows stay as they are and the others rise on.

    Args:
        part: (L, F), what a byte of each flow takes of each link.
        bandwidth: (L,) bytes/s.

    Source: Bertsekas and Gallager, "Data Networks", 2nd ed., section 6.5.2.
    """
    flows = part.shape[1]
    rate, rises = np.full(flows, np.inf), np.zeros(flows, dtype=bool)
    rises[part.indices] = True
    rate[rises] = 0.0
    over = part.T.tocsr()
    left = bandwidth.astype(np.float64).copy()
    while rises.any():
        load = part @ rises.astype(np.float64)
        carries = load > TIE
        room = np.full(left.size, np.inf)
        room[carries] = left[carries] / load[carries]
        more = room.min()
        rate[rises] += more
        left = np.maximum(left - more * load, 0.0)
        full = carries & (room <= more * (1 + TIE) + TIE * TIE)
        rises &= ~((over @ full.astype(np.float64)) > 0)
    return rate


def efficiency(network: Network, nbytes: Floats, links: Ints) -> Floats:
    """Return which part of a link's bandwidth messages of these sizes reach."""
    half = network.half[links]
    return np.asarray(1 / (1 + half / np.maximum(nbytes, 1e-9)), dtype=np.float64)


def rates(network: Network, routes: Routes, nbytes: Floats | None = None) -> Floats:
    """Return (F,) bytes/s of flows that are all under way.

    Args:
        nbytes: (F,) of each one's messages; None takes long ones, which use links fully.

    Raises:
        CapacityError: a flow goes over a link that is down.
    """
    size = np.full(routes.source.size, np.inf) if nbytes is None else nbytes
    return fair_rates(_taken(network, routes, size), network.bandwidth)


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer:
    """What became of F flows that began together.

    Attributes:
        finish: (F,) seconds until the last byte has arrived.
        first_rate: (F,) bytes/s while all of them were under way.
        load: (L,) bytes over each link.
    """

    finish: Floats
    first_rate: Floats
    load: Floats

    @property
    def time(self) -> float:
        """Seconds until all have arrived."""
        return float(self.finish.max(initial=0.0))


def transfer(network: Network, routes: Routes, nbytes: Floats) -> Transfer:
    """Return when each flow arrives; whenever one is through, the others share what it leaves.

    Args:
        nbytes: (F,) of each flow, one message each.

    Raises:
        CapacityError: a flow goes over a link that is down.
    """
    taken = _taken(network, routes, nbytes)
    flows = routes.source.size
    left, moving = nbytes.astype(np.float64).copy(), nbytes > 0
    now, done, first = 0.0, np.zeros(flows), np.full(flows, np.inf)
    while moving.any():
        index = np.flatnonzero(moving)
        rate = fair_rates(taken[:, index], network.bandwidth)
        if now == 0.0:
            first[index] = rate
        wait = left[index] / rate
        step = wait.min()
        now += step
        left[index] = np.maximum(left[index] - rate * step, 0.0)
        ended = index[wait <= step * (1 + TIE)]
        left[ended], done[ended], moving[ended] = 0.0, now, False
    # Switches pass on and add by themselves; what keeps a sender busy is a card's software.
    sends = np.bincount(routes.source, minlength=network.vertices)[routes.source] * (routes.source < network.cards)
    finish = done + routes.latency + network.overhead * sends
    return Transfer(finish=finish, first_rate=first, load=routes.load(nbytes))


def _taken(network: Network, routes: Routes, nbytes: Floats) -> csr_array:
    """Return (L, F), bandwidth that a byte of each flow takes: more of links that small messages use badly."""
    entries = routes.part.tocoo()
    if (network.bandwidth[entries.row] <= 0).any():
        raise CapacityError("a flow goes over a link that is down", hint="find routes for the network as it is now.")
    taken = entries.data / efficiency(network, nbytes[entries.col], entries.row)
    return csr_array((taken, (entries.row, entries.col)), shape=routes.part.shape)


def schedule_time(
    schedule: Schedule, network: Network, nbytes: float, *, ranks: Sequence[int] = (), route: Router = spread
) -> float:
    """Return the time of a collective over a network, message by message.

    Lanes go on together: phase k of each begins when phase k − 1 of all has ended, and repeats are alike.

    Args:
        nbytes: of one rank's whole buffer, see `Schedule`.
        ranks: vertex of each rank, then of each helper; empty takes cards in order, and switches as helpers.
        route: how messages find their way.
    """
    vertices = np.asarray(ranks or range(schedule.vertices), dtype=np.int64)
    piece, total = nbytes * schedule.share, 0.0
    known: dict[tuple[bytes, ...], float] = {}
    for step in range(max((len(lane) for lane in schedule.lanes), default=0)):
        together = [lane[step] for lane in schedule.lanes if step < len(lane)]
        spans = sorted({one.repeats for one in together})
        for before, repeats in zip([0, *spans], spans, strict=False):
            merged = _merged([one for one in together if one.repeats >= repeats])
            source, target, pieces = merged.messages(schedule.vertices)
            key = (source.tobytes(), target.tobytes(), pieces.tobytes())
            if key not in known:
                routes = route(network, vertices[source], vertices[target])
                known[key] = transfer(network, routes, pieces.astype(np.float64) * piece).time
            total += (repeats - before) * known[key]
    return total


def _merged(phases: Sequence[Phase]) -> Phase:
    """Return phases that are under way together as one."""
    columns = [[getattr(one, name) for one in phases] for name in ("source", "target", "piece", "reduces", "stride")]
    source, target, piece, reduces, stride = (np.concatenate(column) for column in columns)
    return Phase(source=source, target=target, piece=piece, reduces=reduces, stride=stride)
