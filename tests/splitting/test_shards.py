"""Parts and wholes turn into each other, however a dim is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from supernode.roles.shards import Split, join, part_of, to_full, to_local

Together = Callable[..., list[Any]]


def test_a_rank_holds_its_part_of_each_segment_as_torch_chunk_cuts_it() -> None:
    fused = torch.arange(8 + 4 + 5)

    parts = [part_of(fused, 0, (8, 4, 5), 2, rank).tolist() for rank in range(2)]

    assert parts == [[0, 1, 2, 3, 8, 9, 12, 13, 14], [4, 5, 6, 7, 10, 11, 15, 16]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 2))
def test_all_parts_side_by_side_are_the_whole(segments: list[int], parts: int, dim: int) -> None:
    split = Split(dim, tuple(segments))
    sizes = [2, 2, 2]
    sizes[dim] = split.size
    whole = torch.arange(4 * split.size).view(sizes)

    each = [part_of(whole, dim, split.segments, parts, rank) for rank in range(parts)]

    assert torch.equal(join(each, split), whole)
    assert [part.shape[dim] for part in each] == [split.held(parts=parts, rank=rank) for rank in range(parts)]
    assert bool(split.refusal(parts)) == any(len(torch.arange(size).chunk(parts)) < parts for size in segments)


def test_ranks_gather_the_whole_of_what_they_hold_in_pieces(together: Together) -> None:
    whole, split = torch.randn(2, 12), Split(1, (5, 4, 3))

    def gathered(_: int) -> tuple[Tensor, Tensor]:
        assert dist.group.WORLD is not None
        mine = to_local(whole, split, dist.group.WORLD)
        return mine, to_full(mine, split, dist.group.WORLD)

    parts = together(gathered, ranks=3)

    assert all(torch.equal(full, whole) for _, full in parts)
    assert [mine.shape[1] for mine, _ in parts] == [2 + 2 + 1, 2 + 2 + 1, 1 + 0 + 1]


def test_a_part_has_memory_of_its_own(together: Together) -> None:
    whole = torch.zeros(8, 4)

    def held(_: int) -> int:
        assert dist.group.WORLD is not None
        return to_local(whole, Split(0, (8,)), dist.group.WORLD).untyped_storage().nbytes()

    assert together(held) == [4 * 4 * 4] * 2


@pytest.mark.parametrize(("segments", "refused"), [((2,), "2 cannot be cut into 3"), ((6, 4), "4 cannot"), ((7,), "")])
def test_a_segment_that_leaves_a_rank_without_any_is_refused(segments: tuple[int, ...], refused: str) -> None:
    assert refused in Split(0, segments).refusal(3)
    assert bool(refused) == bool(Split(0, segments).refusal(3))
