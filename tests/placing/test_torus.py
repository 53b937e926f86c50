"""Are the loads of a torus' links those of real flows, and does a placement share its dims out as it says?"""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from scipy.optimize import linprog

from supernode.errors import SpecError
from supernode.fabric.choice import collective_time
from supernode.fabric.flows import rates
from supernode.fabric.level import Level
from supernode.fabric.network import Network
from supernode.fabric.routes import spread
from supernode.fabric.shapes import torus
from supernode.forecast.rates import card_of
from supernode.hardware.assemble import build_machine
from supernode.placing.torus import (
    AXES,
    Run,
    TorusPlaces,
    cards_of,
    every_share,
    exchange_load,
    gather_load,
    rank_order,
    runs_of,
    send_load,
)
from supernode.workload.presets import public_model
from supernode.workload.strategy import Software, make_strategies

RUNS = [(8, 1), (4, 1), (2, 1), (4, 2), (2, 2), (2, 4)]
"""Members and stride along a dim of eight."""


def line(members: int, stride: int) -> tuple[Network, list[list[int]], Run]:
    """Return a ring of eight cards, all groups of such a stretch, and the stretch."""
    groups = [
        [block * members * stride + offset + stride * place for place in range(members)]
        for block in range(8 // (members * stride))
        for offset in range(stride)
    ]
    wraps = members * stride == 8
    return torus((8,), bandwidth=1.0), groups, Run(dim=0, members=members, stride=stride, wraps=wraps)


@pytest.mark.parametrize(("members", "stride"), RUNS)
def test_rings_along_a_stretch_turn_as_fast_as_flows_that_share_the_links(members: int, stride: int) -> None:
    network, groups, run = line(members, stride)
    source, target = [], []
    for group in groups:
        if run.wraps:  # both ways round
            ways = [group, group[::-1]]
        else:  # there over every second member, back over the others
            ways = [group[::2] + group[1::2][::-1]]
        for way in ways:
            source += way
            target += way[1:] + way[:1]
    found = rates(network, spread(network, np.array(source), np.array(target)))

    each = 2 if run.wraps else 1  # flows that leave a member
    assert each * found.min() == pytest.approx(run.rate)


@pytest.mark.parametrize(("members", "stride"), RUNS)
def test_an_exchange_loads_the_busiest_link_as_its_flows_do(members: int, stride: int) -> None:
    network, groups, run = line(members, stride)
    pairs = [(a, b) for group in groups for a in group for b in group if a != b]
    routes = spread(network, np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]))

    assert exchange_load([run]) == pytest.approx(routes.load(np.full(len(pairs), 1 / members)).max())


@pytest.mark.parametrize("shape", [(8,), (4, 4), (4, 4, 4)])
def test_a_gather_over_a_whole_torus_takes_what_rings_in_all_dims_take(shape: tuple[int, ...]) -> None:
    levels = [Level(kind="ring", size=size, bandwidth=1.0) for size in reversed(shape)]
    runs = [Run(dim=dim, members=size, stride=1, wraps=True) for dim, size in enumerate(shape)]

    assert gather_load(runs) == pytest.approx(float(collective_time("all_gather", 1.0, levels, algorithm="multi_ring")))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 8), (8, 2, 4)])
def test_a_gather_over_unequal_dims_takes_what_the_best_mixture_of_orders_takes(sizes: tuple[int, ...]) -> None:
    runs = [Run(dim=d, members=size, stride=1 + d, wraps=d > 0) for d, size in enumerate(sizes)]
    whole, orders = math.prod(sizes), list(permutations(range(len(sizes))))
    load = np.zeros((len(sizes), len(orders)))
    for column, order in enumerate(orders):
        gathered = whole  # a reduce-scatter: each dim has less than the one before
        for dim in order:
            load[dim, column] = (sizes[dim] - 1) / sizes[dim] * gathered / whole
            gathered //= sizes[dim]
    # Least t such that shares of the orders load each dim no longer than t.
    limits = np.hstack([load / np.array([[run.rate] for run in runs]), -np.ones((len(sizes), 1))])
    best = linprog(
        [*[0.0] * len(orders), 1.0],
        A_ub=limits,
        b_ub=np.zeros(len(sizes)),
        A_eq=[[*[1.0] * len(orders), 0.0]],
        b_eq=[1],
    )

    assert gather_load(runs) == pytest.approx(best.fun)


def test_eight_cards_have_three_links_as_a_block_and_two_as_a_line() -> None:
    block = [Run(dim=d, members=2, stride=1, wraps=False) for d in range(3)]
    row = [Run(dim=0, members=8, stride=1, wraps=True)]

    assert gather_load(block) == pytest.approx(7 / 8 / 3)
    assert gather_load(row) == pytest.approx(7 / 8 / 2)


def test_neighbouring_stretches_of_a_group_are_one() -> None:
    shares = ((("expert", 2), ("data", 4)), (("tensor", 2), ("data", 2), ("pipeline", 2)))
    runs = runs_of(shares, ("context", "expert", "data"))

    assert runs == (Run(dim=0, members=8, stride=1, wraps=True), Run(dim=1, members=2, stride=2, wraps=False))


def test_a_lone_open_line_of_stages_is_folded_where_the_last_sends_to_the_first() -> None:
    open_line = [Run(dim=0, members=4, stride=2, wraps=False)]

    assert send_load(open_line, returns=False) == 2
    assert send_load(open_line, returns=True) == 4
    assert send_load([Run(dim=0, members=8, stride=1, wraps=True)], returns=True) == 1


def test_ranks_in_order_fill_rows_first() -> None:
    degrees = {"tensor": 4, "context": 1, "expert": 1, "data": 16, "pipeline": 8}

    assert rank_order((8, 8, 8), degrees) == (
        (("pipeline", 8),), (("data", 8),), (("tensor", 4), ("data", 2)),
    )  # fmt: skip
    with pytest.raises(SpecError, match="12 members of the data axis"):
        rank_order((6, 8, 8), {**degrees, "tensor": 8, "data": 12, "pipeline": 4})


def test_every_share_gives_each_axis_its_members_once() -> None:
    degrees = {"tensor": 4, "context": 1, "expert": 1, "data": 2, "pipeline": 2}
    found = list(every_share((4, 4), degrees))

    assert len(found) == len(set(found))
    assert rank_order((4, 4), degrees) in found
    for shares in found:
        for name in AXES:
            assert math.prod(count for share in shares for axis, count in share if axis == name) == degrees[name]
        assert [math.prod(count for _, count in share) for share in shares] == [4, 4]


def test_ranks_in_order_lie_on_cards_in_order() -> None:
    degrees = {"tensor": 4, "context": 1, "expert": 1, "data": 4, "pipeline": 4}

    assert cards_of(rank_order((4, 4, 4), degrees)).tolist() == list(range(64))


def test_every_rank_has_a_card_and_neighbours_in_an_axis_are_neighbours_on_the_torus() -> None:
    shares = (
        (("tensor", 2), ("pipeline", 4)),
        (("tensor", 2), ("pipeline", 2), ("data", 2)),
        (("tensor", 2), ("data", 4)),
    )
    cards = cards_of(shares)
    coordinates = np.stack(np.unravel_index(cards.reshape(8, 8, 8), (8, 8, 8)), axis=-1)  # pipeline, data, tensor

    assert sorted(cards.tolist()) == list(range(512))
    # Eight cards that share matrices are a block of 2 × 2 × 2.
    assert (coordinates.max(axis=2) - coordinates.min(axis=2) == 1).all()
    # From stage to stage it is one stretch of two cards.
    steps = np.abs(np.diff(coordinates, axis=0)).sum(axis=-1)
    assert (steps == 2).all()


def places(**degrees: float) -> TorusPlaces:
    machine = build_machine(512, "3D_Torus", card="B200")
    ways = make_strategies(batch=512, sequence=8192, sequence_parallel=1, sharding=1, **degrees)
    return TorusPlaces(public_model("llama3-70b"), ways, card_of(machine), Software(), machine)


def test_on_a_torus_cards_that_share_matrices_become_a_block() -> None:
    asked = places(tensor=8, pipeline=4, data=16)
    naive, best = asked.in_rank_order(), asked.best()

    assert all("tensor 2" in words for words in best.order)
    # Three links instead of two, and the same bytes.
    assert best.parts["tensor"] == pytest.approx(naive.parts["tensor"] * 2 / 3, rel=0.02)
    assert best.time < naive.time
    assert best.slow_bytes < 0.75 * naive.slow_bytes
    assert best.time == min(placed.time for placed in asked.all())


def test_a_torus_is_shared_out_whole() -> None:
    with pytest.raises(SpecError, match="256 cards"):
        places(tensor=8, pipeline=4, data=8)
