"""Adaptive routing is within two per cent of the exact optimum, and its own bound never lies."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.errors import CapacityError, SpecError
from supernode.fabric.adaptive import balance
from supernode.fabric.bounds import cut, hop_bound, optimum, tightest_cut
from supernode.fabric.flows import rates
from supernode.fabric.network import Ints
from supernode.fabric.routes import shortest
from supernode.fabric.shapes import dragonfly, fat_tree, torus

FABRICS = {
    "torus 4×4": torus((4, 4), bandwidth=1.0),
    "damaged torus 4×4": torus((4, 4), bandwidth=1.0).without(links=[(0, 1), (5, 6)]),
    "torus with a slow card": torus((3, 3), bandwidth=1.0).slowed(cards={4: 0.3}),
    "narrow fat tree": fat_tree((4, 4), (1, 2), bandwidth=1.0),
    "dragonfly": dragonfly(5, 2, 2, bandwidth=1.0),
}


def everyone(cards: int) -> tuple[Ints, Ints]:
    source, target = np.divmod(np.arange(cards * cards), cards)
    return source[source != target], target[source != target]


def shuffled(cards: int) -> tuple[Ints, Ints]:
    target = np.random.default_rng(5).permutation(cards)
    source = np.flatnonzero(target != np.arange(cards))
    return source, target[source]


@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("pattern", [everyone, shuffled])
def test_adaptive_routing_reaches_98_per_cent_of_the_optimum(name: str, pattern: object) -> None:
    network = FABRICS[name]
    pairs = pattern(network.cards)  # type: ignore[operator]
    best = optimum(network, *pairs)

    found = balance(network, *pairs)

    assert rates(network, found.routes).min() >= 0.98 * best
    assert found.throughput <= best * (1 + 1e-6) <= found.bound * (1 + 1e-5)


def test_a_ring_carries_half_of_its_links_to_the_other_side() -> None:
    source = np.arange(8)

    # Each flow of 8 crosses 4 of 16 links, so 16 / 32.
    assert optimum(torus((8,), bandwidth=1.0), source, (source + 4) % 8) == pytest.approx(0.5)


def test_detours_give_a_permutation_more_than_its_shortest_paths() -> None:
    network = FABRICS["torus 4×4"]
    pairs = shuffled(16)

    assert balance(network, *pairs).throughput > 1.5 * rates(network, shortest(network, *pairs)).min()


def test_demands_of_different_size_get_rates_in_proportion() -> None:
    network, demand = torus((4,), bandwidth=1.0), np.array([3.0, 1.0])

    found = balance(network, np.array([0, 2]), np.array([1, 3]), demand)

    assert found.throughput == pytest.approx(optimum(network, np.array([0, 2]), np.array([1, 3]), demand), rel=0.02)


def test_a_failed_link_costs_what_the_cut_requires() -> None:
    whole = FABRICS["torus 4×4"]
    damaged = whole.without(links=[(0, 1)])
    pairs = everyone(16)

    before, after = balance(whole, *pairs).throughput, balance(damaged, *pairs).throughput

    # Half of a torus had eight links to the other half, now seven.
    assert tightest_cut(damaged, *pairs).ratio == pytest.approx(before * 7 / 8)
    assert after >= 0.98 * before * 7 / 8


def test_the_bisection_of_a_torus_is_two_links_a_row() -> None:
    network = FABRICS["torus 4×4"]
    halves = cut(network, np.arange(8), *everyone(16))

    assert (halves.bandwidth, halves.demand) == (8, 64)
    assert hop_bound(network, *everyone(16), np.full(240, 32 / 15)) == pytest.approx(64 / 512)


def test_whom_nobody_reaches_is_an_error() -> None:
    lonely = torus((4,), bandwidth=1.0).without(vertices=[2])

    with pytest.raises(CapacityError, match="card 2 cut off"):
        balance(lonely, np.array([0]), np.array([2]))


def test_too_many_cuts_are_refused() -> None:
    with pytest.raises(SpecError, match="at most 20"):
        tightest_cut(torus((5, 5), bandwidth=1.0), *everyone(25))
