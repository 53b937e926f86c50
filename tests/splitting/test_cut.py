"""Stages of a graph compute together what it computes alone, and hold only what is theirs."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from supernode.errors import ModelError
from supernode.splitting.cut import choose, cut, weigh
from supernode.splitting.export import export
from supernode.splitting.stages import Piece, build, homes
from supernode.splitting.switch import let_switch

TOKENS = 6


class Translator(nn.Module):
    """An encoder and a decoder with one table, a mask of the input's padding and a causal one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(13, width)
        self.places = nn.Parameter(torch.randn(TOKENS, TOKENS))
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, both: Tensor) -> Tensor:
        x, y = both[:, :TOKENS], both[:, TOKENS:]
        padding = (x != 0)[:, None, :].expand(-1, TOKENS, -1)
        causal = torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool))
        bias = self.places.tanh()  # made once, used by every layer of the encoder and the decoder
        h = self.table(x)
        for layer in self.encoder:
            h = h + layer(F.scaled_dot_product_attention(h, h, h, bias.masked_fill(~padding, -1e4)))
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        g = self.table(y)
        for layer in self.decoder:
            g = g + F.scaled_dot_product_attention(g, g, g, bias.masked_fill(~causal, -1e4))
            g = g + layer(F.scaled_dot_product_attention(g, h, h, padding))
        return g @ self.table.weight.T


def pieces_of(model: nn.Module, x: Tensor, stages: int) -> list[Piece]:
    whole = export(model, x).graph
    weigh(whole)
    let_switch(whole)
    how = cut(whole, choose(whole, stages))
    return [build(whole, how, index) for index in range(stages)]


def run(pieces: list[Piece], x: Tensor, weight: Tensor) -> Tensor:
    """Run stages one by one, gradients of what they take sent back by hand; returns the output."""
    flow: tuple[Tensor, ...] = (x,)
    taken, given_on = [], []
    for piece in pieces:
        own = [v.detach().clone().requires_grad_(e.requires_grad) for v, e in zip(flow, piece.inputs, strict=True)]
        flow = piece.module(*own)
        assert [(v.shape, v.dtype) for v in flow] == [(e.shape, e.dtype) for e in piece.outputs]
        taken.append(own)
        given_on.append(flow)
    (flow[0] * weight).sum().backward()
    for mine, later in zip(given_on[-2::-1], taken[:0:-1], strict=True):
        pairs = [(v, after.grad) for v, after in zip(mine, later, strict=True) if after.grad is not None]
        torch.autograd.backward([v for v, _ in pairs], [grad for _, grad in pairs])
    return flow[0]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_of_an_encoder_and_decoder_have_the_modules_output_gradients_and_buffers(stages: int) -> None:
    torch.manual_seed(1)
    model = Translator()
    plain, x = copy.deepcopy(model), torch.randint(0, 13, (2, 2 * TOKENS))
    weight = torch.randn(2, TOKENS, 13)

    pieces = pieces_of(model, x, stages)

    output = run(pieces, x, weight)
    expected = plain(x)
    (expected * weight).sum().backward()
    torch.testing.assert_close(output, expected)
    held: dict[str, Tensor] = {}
    for piece in pieces:
        held |= dict(piece.module.named_parameters())
    assert held.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        # Stages that share a parameter hold one object here, so that its gradient is their sum.
        torch.testing.assert_close(held[name].grad, parameter.grad)
    (normed,) = [piece.module for piece in pieces if "norm.running_mean" in piece.module.state_dict()]
    torch.testing.assert_close(normed.get_buffer("norm.running_mean"), plain.norm.running_mean)
    for piece in pieces:
        piece.module.eval()
    torch.testing.assert_close(run(pieces, x, weight), plain.eval()(x))


def test_a_stage_holds_its_own_parameters_and_what_nobody_uses_is_held_once() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    model[2].register_parameter("idle", nn.Parameter(torch.zeros(3)))
    x = torch.randn(2, 4)
    whole = export(model, x).graph
    weigh(whole)
    how = cut(whole, choose(whole, 3))

    found = [build(whole, how, index).module for index in range(3)]

    names = [sorted(n for n, _ in module.named_parameters()) for module in found]
    assert names == [["0.weight", "1.weight"], ["2.idle", "2.weight", "3.weight"], ["4.weight", "5.weight"]]
    assert homes(whole, how)["2.idle"] == (1,)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        causal = torch.arange(tokens)[:, None] >= torch.arange(tokens)[None]
        mask = causal & (x != 0)[:, None, :]
        h = self.table(x)
        for layer in self.layers:
            h = h + layer(F.scaled_dot_product_attention(h, h, h, mask))
        return h


def test_a_mask_is_made_anew_where_the_input_is_smaller_than_it() -> None:
    x = torch.randint(1, 13, (3, 40))  # 960 bytes of input for a mask of 4,800

    first, second = pieces_of(Masked(), x, 2)

    assert [tuple(value.shape) for value in first.outputs] == [(3, 40), (3, 40, 4)]
    assert [value.requires_grad for value in second.inputs] == [False, True]
    torch.manual_seed(0)
    short = torch.randint(1, 13, (3, 4))  # 96 bytes of input for a mask of 48
    assert [value.dtype for value in pieces_of(Masked(), short, 2)[0].outputs] == [torch.bool, torch.float32]


@given(widths=st.lists(st.integers(1, 40), min_size=3, max_size=9), stages=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_the_slowest_stage_is_nearly_the_least_slow_of_all_cuts(widths: list[int], stages: int) -> None:
    layers = [nn.Sequential(nn.Linear(8, 64 * w, bias=False), nn.Linear(64 * w, 8, bias=False)) for w in widths]
    whole = export(nn.Sequential(*layers), torch.randn(2, 8)).graph
    weigh(whole)
    costs = [0] + [int(node.meta["flops"]) + 100 * 4 * _moved(node) for node in whole.graph.find_nodes(
        op="call_function", target=torch.ops.aten.linear.default
    )]  # fmt: skip
    sums = torch.tensor(costs).cumsum(0).tolist()

    bounds = choose(whole, stages)

    slowest = max(sums[b] - sums[a] for a, b in pairwise(bounds))
    assert slowest <= 1.1 * _least(sums, stages) + 1


def _moved(node: torch.fx.Node) -> int:
    return sum(each.meta["val"].numel() for each in (node, *node.all_input_nodes))


def _least(sums: list[int], stages: int) -> int:
    """Return the slowest stage of the best cut, by trying all."""
    if stages == 1:
        return sums[-1] - sums[0]
    return min(max(sums[at] - sums[0], _least(sums[at:], stages - 1)) for at in range(1, len(sums) - stages + 1))


def test_more_stages_than_there_are_operations_that_train_are_refused() -> None:
    whole = export(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.randn(1, 2)).graph

    with pytest.raises(ModelError, match="2 operations with parameters cannot be cut into 3 stages"):
        choose(whole, 3)
