"""Wishes for a split travel from rows to columns, and say where they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from supernode.roles.report import SplitReport, report
from supernode.roles.roles import find_roles
from supernode.roles.shards import Split
from supernode.splitting.export import export


def told(module: nn.Module, x: Tensor, *, parts: int = 2) -> SplitReport:
    graph = export(module, x).graph
    return report(graph, find_roles(graph, parts), parts=parts, keeps_logits_split=True)


def splits(module: nn.Module, x: Tensor, *, parts: int = 2) -> dict[str, Split | None]:
    return {kept.name: kept.split for kept in told(module, x, parts=parts).parameters}


class Calls(nn.Module):
    """A module with some linears, and a forward of the test's."""

    def __init__(self, forward: Callable[..., Tensor], **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, (into, out) in sizes.items():
            self.add_module(name, nn.Linear(into, out, bias=False))
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


X = torch.zeros(2, 3, 8)


def test_of_a_chain_every_second_is_a_row() -> None:
    found = splits(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), X)

    assert found == {f"{n}.weight": Split(n % 2, (8,)) for n in range(4)}


def test_a_row_takes_its_part_of_what_stays_whole_if_something_else_is_a_column() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        seen = self.seen(x)
        return self.row(seen * self.column(x)) + seen.sum()

    found = splits(Calls(forward, seen=(8, 6), column=(8, 6), row=(6, 8)), X)

    assert found == {"seen.weight": None, "column.weight": Split(0, (6,)), "row.weight": Split(1, (6,))}


def test_nothing_is_split_for_a_row_alone() -> None:
    found = told(Calls(lambda self, x: self.row(F.normalize(x)).sum(), row=(8, 8)), X)

    assert found.share == 0
    assert "neither end a split (it reads the model's input) nor begin one (`sum`" in found.whole[0].reason


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda h: F.layer_norm(h, (12,)), "`layer_norm` (test_roles.py, line"),
        (lambda h: h.cumsum(-1), "mixes the numbers of the split dim"),
        (lambda h: torch.linalg.qr(h.transpose(1, 2))[0].transpose(1, 2)[..., :12], "`linalg_qr`"),
        (
            lambda h: h.view(2, 3, 4, 3).transpose(2, 3).flatten(2),
            "[2, 3, 3, 4] → [2, 3, 12] does not divide by 2",
        ),
        (lambda h: h[..., torch.arange(11, -1, -1)], "`index`"),
        (lambda h: h.roll(1), "mixes all dims"),
        (lambda h: h + h.sum([]), "mixes all dims"),
    ],
)
def test_the_operation_and_the_line_that_keep_a_pair_whole_are_named(
    between: Callable[[Tensor], Tensor], reason: str
) -> None:
    module = Calls(lambda self, x: self.second(between(self.first(x))).mean(), first=(8, 12), second=(12, 8))

    found = told(module, X)

    assert {kept.name for kept in found.whole} == {"first.weight", "second.weight"}
    assert any(reason in kept.reason for kept in found.whole)
    assert all("test_roles.py, line" in kept.reason for kept in found.whole)


@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors of dimension other than 2")
def test_a_transposition_of_three_dims_reverses_all_of_them() -> None:
    found = splits(Calls(lambda self, x: self.row(self.column(x).T.permute(2, 1, 0)), column=(8, 12), row=(12, 8)), X)

    assert found == {"column.weight": Split(0, (12,)), "row.weight": Split(1, (12,))}


def test_heads_that_do_not_divide_are_told_with_their_number() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.first(x).view(2, 3, 3, 4).transpose(1, 2)
        return self.second(torch.softmax(h @ h.mT, -1).matmul(h).transpose(1, 2).reshape(2, 3, 12)).mean()

    found = told(Calls(forward, first=(8, 12), second=(12, 8)), X)
    fitting = told(Calls(forward, first=(8, 12), second=(12, 8)), X, parts=3)

    assert any("3 of `reshape` [2, 3, 3, 4] → [2, 3, 12] does not divide by 2" in kept.reason for kept in found.whole)
    assert fitting.whole == ()


def test_a_weight_that_is_used_in_two_ways_is_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.zeros(8, 8))
            self.row = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.row(F.linear(x, self.matrix)).sum() + torch.linalg.norm(self.matrix)).view(1)

    found = told(Twice(), X)

    assert {kept.name: kept.reason for kept in found.whole}.keys() == {"matrix", "row.weight"}


def test_the_pieces_of_a_fused_projection_are_told() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        q, k, v = self.all(x).split([8, 4, 4], dim=-1)
        return self.out(q * torch.cat([k, k], -1).sin().sum(-1, keepdim=True) * v.sum()).mean()

    apart = splits(Calls(lambda self, x: self.out(F.glu(x)).mean(), all=(8, 16), out=(4, 8)), X)
    woven = splits(Calls(forward, all=(8, 16), out=(8, 8)), X)
    gated = splits(
        Calls(lambda self, x: self.out(torch.mul(*self.all(x).chunk(2, -1))).mean(), all=(8, 16), out=(8, 8)), X
    )

    assert apart == woven == {"all.weight": None, "out.weight": None}
    assert gated == {"all.weight": Split(0, (8, 8)), "out.weight": Split(1, (8,))}


def test_logits_are_split_by_their_vocabulary_and_a_token_table_with_them() -> None:
    class Words(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.table, self.places = nn.Embedding(7, 8), nn.Embedding(3, 8)
            self.head = nn.Linear(8, 7)
            if tied:
                self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(F.rms_norm(self.table(tokens) + self.places(torch.arange(3)), (8,))).float()

    tokens = torch.zeros(2, 3, dtype=torch.long)
    tied, untied = told(Words(tied=True), tokens), told(Words(tied=False), tokens)

    assert tied.logits_split == untied.logits_split == 7
    assert {kept.name: kept.split for kept in tied.parameters} == {
        "table.weight": Split(0, (7,)),
        "places.weight": None,
        "head.bias": Split(0, (7,)),
    }
    assert untied.share == pytest.approx((56 + 56 + 7) / (56 + 24 + 56 + 7))
