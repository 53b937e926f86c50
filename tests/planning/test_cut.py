"""The slowest stage is as fast as any cut makes it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supernode.errors import SpecError
from supernode.planning.cut import cut_stages
from supernode.schema.plan import Stage


def slowest(stages: tuple[Stage, ...], costs: list[int], embedding: int, head: int) -> int:
    return max(sum(costs[s.first : s.last]) + embedding * s.embeds + head * s.heads for s in stages)


def test_like_blocks_are_dealt_out_evenly() -> None:
    stages = cut_stages([1.0] * 8, pipeline=4)

    assert [(s.first, s.last) for s in stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [s.embeds for s in stages] == [True, False, False, False]
    assert [s.heads for s in stages] == [False, False, False, True]


def test_a_heavy_head_gets_fewer_blocks() -> None:
    first, last = cut_stages([1.0] * 8, pipeline=2, head=4.0)

    assert (first.last - first.first, last.last - last.first) == (6, 2)


def test_interleaved_stages_go_round_the_ranks() -> None:
    stages = cut_stages([1.0] * 8, pipeline=2, interleave=2)

    assert [s.rank for s in stages] == [0, 1, 0, 1]


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(SpecError, match="3 layers cannot fill 4 stages"):
        cut_stages([1.0] * 3, pipeline=4)


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    count=st.integers(1, 8),
    embedding=st.integers(0, 9),
    head=st.integers(0, 9),
)
def test_no_other_cut_has_a_faster_slowest_stage(costs: list[int], count: int, embedding: int, head: int) -> None:
    count = min(count, len(costs))

    stages = cut_stages(costs, pipeline=count, embedding=embedding, head=head)

    every = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), count - 1))
    best = min(
        max(
            sum(costs[a:b]) + embedding * (i == 0) + head * (i == count - 1)
            for i, (a, b) in enumerate(pairwise(bounds))
        )
        for bounds in every
    )
    assert slowest(stages, costs, embedding, head) == best
    assert all(s.last > s.first for s in stages)
    assert [s.first for s in stages[1:]] == [s.last for s in stages[:-1]]
