"""A module that nobody wrote for parts trains in parts as it trains alone, and its checkpoints are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supernode.control.training import status
from supernode.errors import ModelError

pytestmark = pytest.mark.slow

CODE = '''
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Queries, keys and values in one matrix, as many users write it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.both, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask):
        parts = [p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.both(self.norm(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*parts, mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Tied, with a mask of the input's padding, and an idle part."""

    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(23, 16), nn.Parameter(torch.randn(10, 16) / 4)
        self.layers = nn.ModuleList(Layer(16, 4) for _ in range(3))
        self.idle = nn.Linear(2, 2)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        mask = (tokens != 0)[:, None, None, :] & torch.ones(10, 10, dtype=torch.bool).tril()
        x = self.table(tokens) + self.places
        for layer in self.layers:
            x = layer(x, mask)
        return {"logits": self.head(x), "hidden": x}


def model():
    return Model()


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, tokens):
        y = self.model(tokens)["logits"]
        return y if y.mean() > 0 else -y


def chooses():
    return Chooses()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        row = torch.randint(1, 23, (11,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]


def rows():
    return Rows()


def loss(output, target):
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), reduction="sum") / 10 + (
        output["hidden"].square().mean((1, 2)).sum() / 100
    )
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def job(workshop: Any, file: Path, layout: dict[str, Any], *, name: str = "model", steps: int = 6, **data: Any) -> Any:
    return workshop.job(
        layout, model=f"{file}:{name}", batch=8, gradient_accumulation=2, steps=steps,
        data={"dataset": f"{file}:rows", "held_out_dataset": f"{file}:rows", "drop_last": True, **data},
        optimizer={"learning_rate": 3e-3, "warmup": 0, "decay": "none", "clip": 0.5},
    )  # fmt: skip


@pytest.mark.parametrize("sharding", ["replicas", "fsdp"])
def test_it_learns_in_eight_parts_what_it_learns_in_one_and_goes_on_in_one(
    workshop: Any, tmp_path: Path, file: Path, sharding: str
) -> None:
    layout = {"tensor": 2, "pipeline": 2, "data": 2, "sharding": sharding}
    workshop.run(job(workshop, file, {"data": 1}), tmp_path / "one")

    workshop.run(job(workshop, file, layout, steps=4), tmp_path / "parts")

    told = status(tmp_path / "parts").notes
    assert "differs from the module by at most" in told["module in parts"]
    assert "table.weight" not in told["whole on every tensor rank"]
    assert "norm.weight [16]" in told["whole on every tensor rank"]
    changes = {f"parallelism.{axis}": 1 for axis in ("tensor", "pipeline", "data")}
    workshop.resume(tmp_path / "parts", overrides={"steps": 6, **changes})
    workshop.assert_close(tmp_path / "parts", tmp_path / "one")


def test_a_loss_of_the_users_is_given_what_the_module_returns(workshop: Any, tmp_path: Path, file: Path) -> None:
    own = {"loss": f"{file}:loss"}
    workshop.run(job(workshop, file, {"data": 1}, **own), tmp_path / "one")
    workshop.run(job(workshop, file, {"tensor": 2, "pipeline": 2, "data": 1}, **own), tmp_path / "parts")

    workshop.assert_close(tmp_path / "parts", tmp_path / "one")


def test_a_forward_that_branches_on_values_is_told_which_axes_it_can_have(
    workshop: Any, tmp_path: Path, file: Path
) -> None:
    with pytest.raises(ModelError, match=r"y\.mean\(\) > 0") as refused:
        workshop.run(job(workshop, file, {"tensor": 2, "data": 1}, name="chooses"), tmp_path / "run")

    assert "`data` and `fsdp` run any module" in refused.value.hint
    assert (
        workshop.run(job(workshop, file, {"data": 2}, name="chooses", steps=1), tmp_path / "two").outcome == "finished"
    )
