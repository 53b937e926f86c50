"""Schedules send no more than their algorithms say."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.collectives.grid import flat, hierarchical, multi_ring, unequal
from supernode.collectives.tree import double_tree, in_network, parents, second
from supernode.errors import SpecError


@pytest.mark.parametrize("method", ["ring", "direct", "halving"])
def test_an_all_reduce_sends_two_vectors_less_two_pieces(method: str) -> None:
    # 2 (n − 1) / n of the vector: the least that any all-reduce without help from the network can send.
    assert flat("all_reduce", 8, method).sent() == pytest.approx([2 * 7 / 8] * 8)


@pytest.mark.parametrize("schedule", [hierarchical("all_reduce", (4, 3)), multi_ring("all_reduce", (4, 3))])
def test_hierarchies_and_tori_send_no_more_than_a_flat_ring(schedule: object) -> None:
    assert schedule.sent() == pytest.approx([2 * 11 / 12] * 12)  # type: ignore[attr-defined]


def test_only_the_ring_between_nodes_leaves_them() -> None:
    schedule = hierarchical("reduce_scatter", (4, 3))

    leaving = sum(
        one.repeats * np.count_nonzero(one.source // 4 != one.target // 4) * schedule.share
        for lane in schedule.lanes
        for one in lane
    )

    # Each of 12 cards has a quarter of the vector left, and passes on thirds of it twice.
    assert leaving == pytest.approx(12 * 2 / 12)


def test_a_switch_that_adds_takes_each_vector_once() -> None:
    assert in_network(8).sent()[:8] == pytest.approx([1.0] * 8)


@pytest.mark.parametrize("ranks", [2, 7, 8, 13, 32])
def test_each_rank_rests_in_one_of_the_two_trees(ranks: int) -> None:
    first = parents(ranks)
    busy_in_both = set(first[first >= 0].tolist()) & set(second(first)[second(first) >= 0].tolist())

    # Only the roots may have a child in the other tree.
    assert len(busy_in_both) <= 2
    assert double_tree(ranks).sent().max() <= 2 + 1 / 2


def test_one_rank_has_nothing_to_send() -> None:
    for schedule in (flat("all_reduce", 1), double_tree(1), in_network(1), unequal([1])):
        assert schedule.sent().sum() == 0


def test_no_groups_are_refused() -> None:
    with pytest.raises(SpecError, match="at least one size"):
        hierarchical("all_reduce", ())


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match="all_gather"):
        flat("all_gahter", 4)
