"""Every algorithm computes what its collective is for, whatever the number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supernode.collectives.exchange import direct_exchange, level_exchange, ring_exchange
from supernode.collectives.grid import flat, hierarchical, multi_ring, unequal
from supernode.collectives.interpret import Array, execute
from supernode.collectives.message import Schedule
from supernode.collectives.tree import binomial, chain, double_tree, in_network
from supernode.errors import SpecError

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
METHODS = ("ring", "direct", "halving")


def numbers(schedule: Schedule, length: int) -> list[Array]:
    """Return whole numbers, so that sums are exact in any order."""
    dice = np.random.default_rng(0)
    return [dice.integers(-99, 99, length) for _ in range(schedule.ranks)]


def adds_up(schedule: Schedule) -> bool:
    """Return whether all ranks end with the sum."""
    inputs = numbers(schedule, 2 * schedule.pieces)
    return all(np.array_equal(result, sum(inputs)) for result in execute(schedule, inputs))


def scatters(schedule: Schedule) -> bool:
    """Return whether each rank ends with its part of the sum, an equal one."""
    inputs = numbers(schedule, 2 * schedule.pieces)
    whole = np.asarray(sum(inputs)).reshape(schedule.pieces, 2)
    results = execute(schedule, inputs)
    parts = [np.array_equal(results[rank], whole[schedule.owner == rank].ravel()) for rank in range(schedule.ranks)]
    return all(parts) and len({result.size for result in results}) == 1


def gathers(schedule: Schedule) -> bool:
    """Return whether all ranks end with everybody's part."""
    own = schedule.pieces // schedule.ranks
    inputs = numbers(schedule, 2 * own)
    whole = np.zeros((schedule.pieces, 2), dtype=np.int64)
    for rank, part in enumerate(inputs):
        whole[schedule.owner == rank] = part.reshape(own, 2)
    return all(np.array_equal(result, whole.ravel()) for result in execute(schedule, inputs))


def exchanges(schedule: Schedule) -> bool:
    """Return whether rank d ends with what each rank had for it."""
    inputs = numbers(schedule, 2 * schedule.ranks)
    parts = np.stack(inputs).reshape(schedule.ranks, schedule.ranks, 2)
    results = execute(schedule, inputs)
    return all(np.array_equal(result, parts[:, rank].ravel()) for rank, result in enumerate(results))


CHECKS = {"all_reduce": adds_up, "reduce_scatter": scatters, "all_gather": gathers}


@given(ranks=st.integers(1, 17), method=st.sampled_from(METHODS), kind=st.sampled_from(sorted(CHECKS)))
@settings(max_examples=40, deadline=None)
def test_flat_collectives_are_right_for_any_number_of_ranks(ranks: int, method: str, kind: str) -> None:
    assert CHECKS[kind](flat(kind, ranks, method))


@given(sizes=SIZES, kind=st.sampled_from(sorted(CHECKS)), data=st.data())
@settings(max_examples=30, deadline=None)
def test_hierarchies_are_right_for_any_sizes_and_methods(sizes: list[int], kind: str, data: st.DataObject) -> None:
    methods = [data.draw(st.sampled_from(METHODS)) for _ in sizes]

    assert CHECKS[kind](hierarchical(kind, sizes, methods))


@given(sizes=SIZES, kind=st.sampled_from(sorted(CHECKS)))
@settings(max_examples=20, deadline=None)
def test_all_dims_at_once_are_right_for_any_torus(sizes: list[int], kind: str) -> None:
    assert CHECKS[kind](multi_ring(kind, sizes))


@given(groups=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_groups_of_different_sizes_add_up(groups: list[int]) -> None:
    assert adds_up(unequal(groups))


@given(ranks=st.integers(1, 20), parts=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_trees_and_switches_add_up(ranks: int, parts: int) -> None:
    assert adds_up(double_tree(ranks, parts=parts))
    assert adds_up(in_network(ranks, parts=parts))


@given(sizes=SIZES)
@settings(max_examples=20, deadline=None)
def test_everyone_gets_what_everyone_has_for_them(sizes: list[int]) -> None:
    assert exchanges(level_exchange(sizes))
    assert exchanges(direct_exchange(math.prod(sizes)))
    assert exchanges(ring_exchange(sum(sizes)))


@given(ranks=st.integers(1, 20), data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_broadcast_reaches_all_from_any_root(ranks: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, ranks - 1))

    for schedule in (binomial(ranks, root=root), chain(ranks, root=root, parts=3)):
        inputs = numbers(schedule, schedule.pieces)

        assert all(np.array_equal(result, inputs[root]) for result in execute(schedule, inputs))


def test_a_length_that_the_pieces_do_not_divide_is_refused() -> None:
    with pytest.raises(SpecError, match="7 elements in 4 pieces"):
        execute(flat("all_reduce", 4), [np.zeros(7)] * 4)


def test_a_vector_too_few_is_refused() -> None:
    with pytest.raises(SpecError, match="one vector a rank"):
        execute(flat("all_reduce", 4), [np.zeros(8)] * 3)
