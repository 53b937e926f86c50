"""Tensors come back bit for bit, from this model's checkpoint only, and reading one never runs anything."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # The first optimizer step would import it, for seconds.
from torch import Tensor, nn

from supernode.checkpoint import state
from supernode.checkpoint.source import on_disk
from supernode.checkpoint.state import saves_in
from supernode.errors import CheckpointError, MachineError
from supernode.schema.manifest import Manifest
from supernode.storing.saves import name_of


def manifest(step: int) -> Manifest:
    return Manifest(step=step, samples=0, seed=0, model="m", data="d", layout="l", optimizer="adamw")


def tensors(fill: float = 1.0, *, size: int = 6) -> dict[str, Tensor]:
    return {
        "model.a": torch.full((size, 4), fill),
        "model.b": torch.arange(3, dtype=torch.bfloat16) * fill,
        "buffer.0.count": torch.tensor(7, dtype=torch.int64),
        "model.scalar": torch.tensor(fill),
    }


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    kept = tensors(0.1) | {"model.strange": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])}

    nbytes = state.save(kept, saves_in(tmp_path), manifest(5))
    back = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
    state.load(back, tmp_path / name_of(5))

    for name, tensor in kept.items():
        whole = tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), whole), name
    known = saves_in(tmp_path).verify(name_of(5))
    assert nbytes == sum(size for size, _ in known.files.values()) + sum(pack.nbytes for pack in known.packs.values())
    assert set(on_disk(tmp_path / name_of(5)).pieces) == set(kept)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["packs", name_of(5)]


def test_a_part_of_a_checkpoint_can_be_loaded_and_a_step_saved_anew(tmp_path: Path) -> None:
    state.save(tensors(1.0), saves_in(tmp_path), manifest(5))
    state.save(tensors(2.0), saves_in(tmp_path), manifest(5))

    part = {"model.a": torch.zeros(6, 4)}
    state.load(part, tmp_path / name_of(5))

    assert torch.equal(part["model.a"], torch.full((6, 4), 2.0))


def test_a_checkpoint_of_another_model_is_refused_and_the_tensor_named(tmp_path: Path) -> None:
    state.save(tensors(), saves_in(tmp_path), manifest(5))
    folder = tmp_path / name_of(5)

    with pytest.raises(CheckpointError, match=r"holds no `model\.c`"):
        state.load(tensors() | {"model.c": torch.zeros(1)}, folder)
    with pytest.raises(CheckpointError, match=r"`model\.a` is \[6, 4\] .* and \[7, 4\]"):
        state.load(tensors(size=7), folder)
    with pytest.raises(CheckpointError, match=r"also holds `model\.b`"):
        state.check_complete({"model.a", "model.scalar"}, on_disk(folder))
    # Buffers of copies that are no more may stay.
    state.check_complete({"model.a", "model.b", "model.scalar"}, on_disk(folder))


def test_a_shard_that_is_gone_is_a_checkpoint_error(tmp_path: Path) -> None:
    state.save(tensors(), saves_in(tmp_path), manifest(5))
    next((tmp_path / "packs").iterdir()).unlink()

    with pytest.raises(CheckpointError, match="packs/"):
        state.load(tensors(), tmp_path / name_of(5))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "disk"
    place.mkdir()
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, b"size=2m"):
        pytest.skip(f"mounting needs root: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(str(place).encode(), 2)


def test_a_full_disk_leaves_earlier_checkpoints_whole_and_no_draft(small_disk: Path) -> None:
    half = {"model.a": torch.rand(300_000)}  # 1.2 MB of 2 MiB
    state.save(half, saves_in(small_disk), manifest(5))
    half["model.a"] += 1

    with pytest.raises(MachineError, match="is full") as caught:
        state.save(half, saves_in(small_disk), manifest(10))

    assert "checkpoint.keep" in caught.value.hint
    assert sorted(entry.name for entry in small_disk.iterdir()) == ["packs", name_of(5)]
    assert len(list((small_disk / "packs").iterdir())) == 1
    saves_in(small_disk).verify(name_of(5))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizer_goes_on_as_if_it_had_not_been_away(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        if kind == "sgd":
            return layer, torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)

    def step(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    def named(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        parameters = dict(layer.named_parameters())
        return {f"model.{n}": p.detach() for n, p in parameters.items()} | state.flatten_optimizer(
            optimizer, parameters
        )

    first, optimizer = made()
    for _ in range(3):
        step(first, optimizer)
    state.save(named(first, optimizer), saves_in(tmp_path), manifest(3))
    second, other = made()
    state.prepare_optimizer(other, step=3)
    state.load(named(second, other), tmp_path / name_of(3))
    for layer, its in ((first, optimizer), (second, other)):
        step(layer, its)

    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)


def test_an_optimizer_of_another_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="Adagrad"):
        state.prepare_optimizer(torch.optim.Adagrad([nn.Parameter(torch.ones(1))]), step=1)
