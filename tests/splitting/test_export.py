"""A user's module as a graph computes what it computed, under the names that it had."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from supernode.errors import ModelError
from supernode.splitting.export import export, logits_of
from supernode.splitting.proof import draws
from supernode.splitting.switch import let_switch
from supernode.splitting.tidy import schema_of, written


class Everything(nn.Module):
    """What users' modules have: a tie, a norm, in-place operations, no gradients for a while, frozen and idle parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU(inplace=True)
        self.stopped = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.idle = nn.Linear(3, 3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.table(x)
        with torch.no_grad():
            beside = self.stopped(h)
        h = self.act(self.norm(h.transpose(1, 2)).transpose(1, 2))
        h = h + self.frozen(h) * self.scale
        h += 1
        h[:, 0] = 0.25
        return {"logits": self.head(h + beside), "hidden": h}


def test_a_graph_has_the_modules_values_gradients_buffers_and_names() -> None:
    torch.manual_seed(0)
    model = Everything()
    plain = copy.deepcopy(model)
    x = torch.randint(0, 11, (3, 5))

    found = export(model, x)

    graph = found.graph
    ours, theirs = found.rebuild(graph(x)), plain(x)["logits"]
    torch.testing.assert_close(ours, theirs)
    for output in (ours, theirs):
        output.square().sum().backward()
    assert found.names == (("table.weight", "head.weight"),)
    assert dict(graph.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        mine = graph.get_parameter(name)
        assert mine is dict(model.named_parameters())[name], "values are the module's own, not copies"
        assert mine.requires_grad == parameter.requires_grad
        assert (mine.grad is None) == (parameter.grad is None), name
        if parameter.grad is not None and mine.grad is not None:
            torch.testing.assert_close(mine.grad, parameter.grad)
    assert graph.state_dict().keys() == plain.state_dict().keys() - {"head.weight"}
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        torch.testing.assert_close(graph.get_buffer(name), plain.get_buffer(name))
    changed = [node for node in graph.graph.nodes if any(value.op != "get_attr" for value in written(node))]
    assert [str(node.target) for node in changed] == ["aten.fill_.Tensor"], "only what has a view stays in place"


class Layers(nn.Module):
    """Layers that train and evaluate differently."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.stateless = nn.BatchNorm1d(6, track_running_stats=False)
        self.linear = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(self.drop(self.stateless(self.norm(x)))).unflatten(-1, (3, 6)).unbind(1)
        return F.scaled_dot_product_attention(q[None], k[None], v[None], dropout_p=0.4 if self.training else 0.0)


def test_a_graph_trains_and_evaluates_as_its_module_does() -> None:
    torch.manual_seed(0)
    model = Layers()
    plain, x = copy.deepcopy(model), torch.randn(7, 6)
    graph = export(model, x).graph
    let_switch(graph)

    for mode in (True, True, False, True, False):
        results = []
        for module in (graph.train(mode), plain.train(mode)):
            torch.manual_seed(3)
            results.append(module(x))
        torch.testing.assert_close(results[0][0], results[1])
        torch.testing.assert_close(graph.get_buffer("norm.running_var"), plain.get_buffer("norm.running_var"))
    assert int(graph.get_buffer("norm.num_batches_tracked")) == 3, "evaluation counts no batch"
    assert draws(graph) == "training"
    assert not torch.equal(graph.train()(x)[0], graph(x)[0]), "dropout stays random"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if h.sum() > 0:
            h = -h
        return h


def test_a_forward_that_branches_on_values_is_refused_with_its_line() -> None:
    with pytest.raises(ModelError) as refused:
        export(Branches(), torch.randn(2, 4))

    assert "if h.sum() > 0" in refused.value.message
    assert __file__ in refused.value.message
    assert "`data` and `fsdp`" in refused.value.hint


class Returns(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(4, 3), what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.linear(x))


def test_a_loss_of_the_users_is_given_all_that_the_module_returns() -> None:
    model = Returns(lambda y: {"a": y, "more": (y.sum(), 7)})
    found = export(model, torch.randn(2, 4), whole_output=True)
    x = torch.randn(2, 4)

    output = found.rebuild(found.graph(x))

    assert output["more"][1] == 7
    torch.testing.assert_close(output["a"], model(x)["a"])
    torch.testing.assert_close(output["more"][0], model(x)["a"].sum())
    with pytest.raises(ModelError, match="neither a tensor nor something with `logits`"):
        export(model, torch.randn(2, 4))
    assert logits_of({"logits": x}) is x


def test_no_ops_of_fixed_shapes_are_gone_and_shapes_stay_known() -> None:
    def forward(h: Tensor) -> Tensor:
        h = h.to(torch.float32).contiguous()[:]
        return F.dropout(torch.cat((torch.tensor([]), h)), 0.0).add_(1)

    graph = export(Returns(forward), torch.randn(2, 4)).graph

    operations = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert operations == ["aten.linear.default", "aten.add.Tensor"]
    assert all(tuple(n.meta["val"].shape) == (2, 3) for n in graph.graph.nodes if schema_of(n) is not None)
    assert isinstance(graph, fx.GraphModule)
