"""Weights are sharded whatever lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from one_step import plan_of
from supernode.errors import ModelError
from supernode.parallel.mesh import place_of
from supernode.parallel.sharding import check_hooks, shard
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


@pytest.mark.parametrize(("degrees", "key"), [({"tensor": 2}, "tensor"), ({"data": 2, "sharding": "fsdp"}, "sharding")])
def test_a_hook_that_parts_of_a_weight_would_lose_is_refused(degrees: dict[str, object], key: str) -> None:
    shape = DecoderShape(layers=2, width=8, heads=2, vocabulary=16)
    early, late = nn.Linear(2, 2), nn.Linear(2, 2)
    early.weight.register_hook(lambda grad: grad * 3)
    late.bias.register_post_accumulate_grad_hook(lambda parameter: None)

    for layer, name in ((early, "weight"), (late, "bias")):
        with pytest.raises(ModelError, match=f"`{name}` has a hook") as caught:
            check_hooks(layer, plan_of(shape, degrees).layout)
        assert f"parallelism.{key}" in caught.value.hint
        check_hooks(layer, plan_of(shape, {"data": 2}).layout)
