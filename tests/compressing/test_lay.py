"""A shard is a stretch of a bucket: parts of parameters, cut where it ends, and padding behind the last."""

from __future__ import annotations

import pytest
import torch

from supernode.compressing.lay import Lay, pieces
from supernode.errors import ModelError

BUCKET = [("matrix", (3, 4)), ("bias", (5,)), ("cube", (2, 3, 2))]  # 12 + 5 + 12 = 29 numbers


def told(start: int, length: int) -> list[tuple[str, int, int, int]]:
    return [(p.name, p.begin, p.length, p.first) for p in pieces(BUCKET, start=start, length=length)]


def test_a_whole_bucket_is_its_parameters() -> None:
    assert told(0, 29) == [("matrix", 0, 12, 0), ("bias", 12, 5, 0), ("cube", 17, 12, 0)]
    assert [(p.rows, p.columns) for p in pieces(BUCKET, start=0, length=29)] == [(3, 4), (1, 5), (2, 6)]


def test_a_shard_begins_and_ends_inside_parameters_and_what_is_behind_them_is_padding() -> None:
    assert told(7, 8) == [("matrix", 0, 5, 7), ("bias", 5, 3, 0)]
    assert told(15, 20) == [("bias", 0, 2, 3), ("cube", 2, 12, 0)]
    assert told(40, 5) == []


def test_what_is_taken_can_be_put_back_and_padding_is_left_alone() -> None:
    lay = Lay(12, coded=[(1, 3), (6, 5)], exact=[(4, 2)], block=4)
    shard = torch.arange(12.0)

    blocks, exact = lay.take(shard)

    assert blocks.tolist() == [[1, 2, 3, 0], [6, 7, 8, 9], [10, 0, 0, 0]]
    assert exact.tolist() == [4, 5]
    assert lay.filled.tolist() == [3, 4, 1]
    lay.put(shard, -blocks, -exact)
    assert shard.tolist() == [0, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10, 11]


def test_a_shard_of_another_length_is_refused() -> None:
    with pytest.raises(ModelError, match="13 numbers came where 12"):
        Lay(12, coded=[(0, 12)], exact=[], block=4).take(torch.zeros(13))
