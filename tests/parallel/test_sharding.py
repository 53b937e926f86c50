"""Weights are sharded whatever lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from one_step import plan_of
from supernode.parallel.mesh import place_of
from supernode.parallel.sharding import shard
from supernode.schema.model import DecoderShape


def test_a_weight_laid_out_in_strides_is_sharded(together: Callable[..., list[Any]]) -> None:
    def first(rank: int) -> bool:
        layer = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(216.0).view(6, 4, 3, 3))

        plan = plan_of(DecoderShape(layers=2, width=8, heads=2, vocabulary=16), {"data": 2, "sharding": "fsdp"})
        shard([layer], place_of(plan.layout, rank))

        assert isinstance(layer.weight, DTensor)
        return torch.equal(layer.weight.full_tensor(), torch.arange(216.0).view(6, 4, 3, 3))

    assert together(first) == [True, True]
