"""A split graph under what surrounds it: split logits and their loss, fully sharded data, dropout, the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from supernode.axes.tensor import draw_apart
from supernode.parallel.tensor import SplitCrossEntropy, cross_entropy
from supernode.splitting.export import export
from supernode.splitting.rewrite import split_tensor

Together = Callable[..., list[Any]]
VOCABULARY, WIDTH, TOKENS = 11, 8, 6


class Words(nn.Module):
    """Tokens to logits over a tied table of a size that two do not divide, with one fused layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.both, self.down = nn.Linear(WIDTH, 12), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return self.head(x + self.down(torch.sigmoid(gate) * up))


def batch(row: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(row))
    targets = tokens.roll(-1, 1)
    targets[0, row] = -100
    return tokens, targets


def test_split_logits_give_the_loss_and_fully_sharded_parts_the_gradients_of_one_process(together: Together) -> None:
    torch.manual_seed(0)
    model = Words()
    graph = export(copy.deepcopy(model), batch(0)[0]).graph
    losses = [cross_entropy(model(tokens), targets) for tokens, targets in (batch(0), batch(1))]
    torch.stack(losses).sum().backward()

    def part(rank: int) -> tuple[float, dict[str, Tensor], dict[str, int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        group = mesh["tensor"].get_group()
        report = split_tensor(graph, group, mesh["tensor"], keeps_logits_split=True)
        assert report.logits_split == VOCABULARY
        fully_shard(graph, mesh=mesh["data"])
        graph.set_gradient_divide_factor(1.0)
        graph.set_force_sum_reduction_for_comms(True)
        tokens, targets = batch(rank // 2)
        (logits,) = graph(tokens)
        loss = SplitCrossEntropy(group, report.logits_split)(logits, targets)
        loss.backward()
        grads = {n: p.grad.full_tensor() for n, p in graph.named_parameters() if isinstance(p.grad, DTensor)}
        return float(loss.detach()), grads, {"logits": logits.shape[-1]}

    parts = together(part, ranks=4)

    assert [sizes["logits"] for _, _, sizes in parts] == [6, 5, 6, 5]
    assert [loss for loss, _, _ in parts] == pytest.approx(
        [float(loss.detach()) for loss in losses for _ in range(2)], rel=1e-6
    )
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for _, grads, _ in parts:
        for name in ("table.weight", "norm.weight", "norm.bias", "down.weight", "down.bias"):
            assert torch.allclose(grads[name], expected[name], rtol=1e-5, atol=1e-6), name
    # A fused weight is held in pieces: gate's half and up's half, one after the other.
    whole = torch.cat([parts[0][1]["both.weight"].view(2, 3, WIDTH), parts[1][1]["both.weight"].view(2, 3, WIDTH)], 1)
    assert torch.allclose(whole.flatten(0, 1), expected["both.weight"], rtol=1e-5, atol=1e-6)


def test_ranks_drop_different_numbers_and_go_on_alike(together: Together) -> None:
    class Dropping(nn.Sequential):
        pass

    model = Dropping(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8), nn.Dropout(0.5), nn.LayerNorm(8))
    graph = export(model, torch.ones(4, 8)).graph

    def part(rank: int) -> tuple[Tensor, Tensor, Tensor, bool]:
        mesh = init_device_mesh("cpu", (2,))
        report = split_tensor(graph, mesh.get_group(), mesh, keeps_logits_split=False)
        torch.manual_seed(5)
        dropped = draw_apart(torch.ops.aten.dropout.default, rank, torch.ones(1000), 0.5, True)
        torch.manual_seed(5)
        (output,) = graph(torch.ones(4, 8))
        return dropped, output.detach(), torch.rand(3), report.draws_apart

    (first, one, then, draws), (second, other, later, _) = together(part)

    assert draws
    assert set(first.unique().tolist()) == {0.0, 2.0}
    # Of two independent masks a quarter is zero in both: 250 of 1000, with a standard deviation of 14.
    assert 180 < int(((first == 0) & (second == 0)).sum()) < 320
    # What follows a sum is computed alike, its dropout included, and so is whatever is drawn next.
    assert torch.equal(one, other)
    assert torch.equal(then, later)


def test_a_model_without_values_is_split_by_shapes_alone() -> None:
    with torch.device("meta"):
        model = Words()
    graph = export(model, torch.zeros(2, TOKENS, dtype=torch.long, device="meta")).graph
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        report = split_tensor(graph, mesh.get_group(), mesh, keeps_logits_split=True)
    finally:
        dist.destroy_process_group()

    held = dict(graph.named_parameters())
    table = held["table.weight"]
    assert isinstance(table, DTensor)
    assert table.shape == (VOCABULARY, WIDTH)
    assert table.to_local().shape == (2, WIDTH)  # 3, 3, 3 and what is left
    # Six cut into four would be 2, 2, 2 and none.
    assert {kept.name for kept in report.whole} == {
        *("norm.weight", "norm.bias", "both.weight", "both.bias", "down.weight", "down.bias")
    }
    values = {node.name: tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.name == "linear_2"}
    assert values["linear_2"] == (2, TOKENS, 2)


def test_one_rank_alone_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.randn(3, 4)
    graph = export(model, x).graph
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        report = split_tensor(graph, mesh.get_group(), mesh, keeps_logits_split=True)
    finally:
        dist.destroy_process_group()

    assert torch.equal(graph(x)[0], model(x))
    assert report.share == 0
    assert report.logits_split == 0
