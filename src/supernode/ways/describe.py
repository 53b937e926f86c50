"""What does a way to meet send? Its description over the hosts at hand, and the bytes that it sends between them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from supernode.collectives.grid import flat, hierarchical, multi_ring, unequal
from supernode.collectives.message import Schedule
from supernode.errors import SpecError
from supernode.ways.hosts import Hosts

FABRIC_NAMES: Mapping[str, str] = {"given": "flat_ring", "ordered": "flat_ring", "hierarchical": "ring"}
"""What the fabric calls our ways; hierarchies of any chunks are one to it."""


def described(algorithm: str, hosts: Hosts) -> Schedule:
    """Return the description of an all-reduce over these hosts, its ranks numbered host by host.

    Raises:
        SpecError: the hosts have different numbers of ranks, and the algorithm wants a grid.
    """
    sizes = set(hosts.sizes)
    if algorithm == "flat_ring":
        return flat("all_reduce", sum(hosts.sizes))
    if algorithm == "ring" and len(sizes) > 1:
        return unequal(hosts.sizes)
    if len(sizes) > 1:
        raise SpecError(
            f"a {algorithm} over hosts of {', '.join(map(str, hosts.sizes))} ranks",
            hint="set `communication.algorithm` to `hierarchical`, which takes hosts of different sizes.",
        )
    grid = (hosts.sizes[0], len(hosts.sizes))
    if algorithm == "multi_ring":
        return multi_ring("all_reduce", grid)
    return hierarchical("all_reduce", grid, (algorithm,) * 2)


def between_hosts(way: str, hosts: Hosts) -> float:
    """Return what a way sends between hosts, all in all, in parts of the tensor."""
    name = way.partition("/")[0]
    schedule = described(FABRIC_NAMES.get(name, name), hosts)
    host = {rank: number for number, ranks in enumerate(hosts.groups) for rank in ranks}
    # gloo's ring goes by the group's own numbers; everything else goes host by host.
    ranks = range(len(host)) if name == "given" else hosts.order
    where = np.array([host[rank] for rank in ranks])
    return sum(
        float(np.count_nonzero(where[one.source] != where[one.target])) * one.repeats * schedule.share
        for lane in schedule.lanes for one in lane
    )  # fmt: skip
