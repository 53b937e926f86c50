"""What runs in parts is held against the module before it trains, and others' parameters are let go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from supernode.errors import ModelError
from supernode.splitting.divide import divide
from supernode.splitting.proof import prove


class Net(nn.Module):
    """A norm, dropout, and by choice another answer in evaluation."""

    def __init__(self, *, twofold: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 3),
        )
        self.twofold = twofold

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.drop(self.norm(self.first(x)).relu()))
        return y if self.training or not self.twofold else y.sigmoid()


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def proved(model: nn.Module, spoil: str = "", *, stages: int = 2) -> str:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    divided = divide(model, x, stages=stages, mine=tuple(range(stages)))
    if spoil:
        node = next(n for n in divided.kept.pieces[1].module.graph.nodes if spoil in str(n.target))
        node.target = torch.ops.aten.tanh.default
        divided.kept.pieces[1].module.recompile()
    return prove(
        model, divided, inputs=x, targets=y, expected=loss, measured=lambda out, t: loss(out[0], t), evaluates=True
    )


def test_a_module_that_evaluates_otherwise_than_its_graph_is_refused_before_it_trains() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    assert "at most 0.0e+00" in proved(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    with pytest.raises(ModelError, match="in evaluation the model in parts has a loss of"):
        proved(Net(twofold=True))


class Centred(nn.Module):
    """Takes off a running mean that the same forward has moved; may have no finite output."""

    def __init__(self, *, times: float = 1.0) -> None:
        super().__init__()
        self.first, self.last, self.times = nn.Linear(4, 8), nn.Linear(8, 3), times
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return self.last(y - self.mean) * self.times


@pytest.mark.parametrize("stages", [1, 2])
def test_a_forward_that_reads_a_buffer_it_moves_is_compared_from_the_same_buffer(stages: int) -> None:
    model = Centred()

    assert "at most 0.0e+00" in proved(model, stages=stages)
    assert not model.mean.any()


def test_outputs_that_are_no_numbers_in_the_module_either_are_no_difference() -> None:
    assert "at most 0.0e+00" in proved(Centred(times=float("nan")))
    assert "at most 0.0e+00" in proved(Centred(times=float("inf")))


def test_a_stage_that_computes_something_else_is_named() -> None:
    with pytest.raises(ModelError, match=r"stage 1 of 2 differs in value 0 of 1"):
        proved(Net(), spoil="aten.relu")


def test_a_rank_lets_go_of_the_parameters_of_other_stages() -> None:
    model = Net()
    x = torch.randn(5, 4)
    ours, theirs = weakref.ref(model.first.weight), weakref.ref(model.last.weight)

    kept = divide(model, x, stages=2, mine=(0,), whole_output=True).kept
    del model
    gc.collect()

    assert theirs() is None
    assert ours() is kept.pieces[0].module.get_parameter("first.weight")
