"""A step says what is wrong before it moves anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from one_step import alone, plan_of, take
from supernode.errors import ModelError
from supernode.parallel.mesh import place_of
from supernode.schema.model import DecoderShape


def test_a_loss_that_no_parameter_moves_is_refused(together: Callable[..., list[Any]]) -> None:
    def step(rank: int) -> str:
        plan = alone(plan_of(DecoderShape(layers=1, width=8, heads=2, vocabulary=16), {}))
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, given, output: output.detach() if isinstance(output, torch.Tensor) else output
        )
        with pytest.raises(ModelError, match="does not depend on any parameter") as caught:
            take(plan, place_of(plan.layout, rank))
        handle.remove()
        return caught.value.hint

    assert "detach" in together(step, ranks=1)[0]
