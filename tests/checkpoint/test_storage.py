"""Users of torch's distributed checkpoint write and read our format: any sharding, digests held, nothing pickled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from supernode.checkpoint.storage import Reader, Writer
from supernode.checkpoint.values import decoded, encoded
from supernode.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(fill: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((50, 99), fill), "b": torch.arange(3, dtype=torch.bfloat16), "s": torch.tensor(fill)},
        "steps": 7, "words": ("x", b"\x00\xff", None, math.inf), "deep": {"by": {"one": [True, 2.5]}},
    }  # fmt: skip


def empty(of: Any) -> Any:
    if isinstance(of, dict):
        return {key: empty(one) for key, one in of.items()}
    if isinstance(of, list):
        return [empty(one) for one in of]
    return torch.zeros_like(of) if isinstance(of, Tensor) else None


def packed(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "packs").iterdir())


def test_a_state_dict_comes_back_with_its_objects_and_only_what_changed_is_written(tmp_path: Path) -> None:
    first, writer = state(), Writer(tmp_path, step=1, compress=False)
    first["model"]["big"] = torch.rand(100, 1000)
    dcp.save(first, storage_writer=writer)
    full = packed(tmp_path)
    first["steps"], first["model"]["a"][3, 5] = 8, 2.0
    writer.step = 2
    dcp.save(first, storage_writer=writer)
    grown = packed(tmp_path) - full
    dcp.save(first, storage_writer=Writer(tmp_path, step=3, compress=False))  # It reads what to build on.

    back = empty(first)
    dcp.load(back, storage_reader=Reader(tmp_path))
    old = empty(first)
    dcp.load(old, checkpoint_id=tmp_path / "step-00000001", storage_reader=Reader(tmp_path))

    for name, tensor in first["model"].items():
        assert torch.equal(back["model"][name], tensor), name
    assert {key: back[key] for key in ("steps", "words", "deep")} == {
        key: first[key] for key in ("steps", "words", "deep")
    }
    assert (old["steps"], float(old["model"]["a"][3, 5])) == (7, 1.0)
    assert full >= 400_000
    assert grown <= 2 * 16_384  # one chunk of one tensor, one object
    assert packed(tmp_path) == full + grown


def test_what_only_pickle_could_carry_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"`where\.0` is a pathlib.*would have to be pickled"):
        dcp.save({"a": torch.ones(2), "where": [Path("x")]}, storage_writer=Writer(tmp_path, step=1))

    with pytest.raises(CheckpointException, match="holds no save"):
        dcp.load({"a": torch.ones(2)}, storage_reader=Reader(tmp_path))
    assert not list(tmp_path.glob("step-*"))


def test_names_that_are_left_over_and_bytes_that_changed_are_told(tmp_path: Path) -> None:
    dcp.save({"a": torch.rand(100), "b": torch.rand(100)}, storage_writer=Writer(tmp_path, step=1))

    with pytest.raises(CheckpointException, match="also holds `b`"):
        dcp.load({"a": torch.zeros(100)}, storage_reader=Reader(tmp_path))
    with pytest.raises(CheckpointException, match=r"Missing key.*c"):
        dcp.load({name: torch.zeros(100) for name in "abc"}, storage_reader=Reader(tmp_path))
    with pytest.raises(CheckpointException, match="`a` is of float32"):
        dcp.load({"a": torch.zeros(100, dtype=torch.int32)}, storage_reader=Reader(tmp_path, strict=False))
    (pack,) = (file for file in (tmp_path / "packs").iterdir() if "-0000-" in file.name)
    data = bytearray(pack.read_bytes())
    data[len(data) // 4] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CheckpointException, match=r"`a` cannot be read: what packs/"):
        dcp.load({"a": torch.zeros(100)}, storage_reader=Reader(tmp_path, strict=False))


def test_values_come_back_as_they_were_and_garbage_is_no_value() -> None:
    value = [None, True, 1, -2.5, "é", b"\0", bytearray(b"x"), (1, (2,)), {"a": {(1, 2): frozenset({3})}}, 1 + 2j, {4}]

    assert decoded(encoded(value, "v"), "v") == value
    assert math.isnan(decoded(encoded(math.nan, "v"), "v"))
    for data in (b"", b"{", b'{"is": "eval", "of": "1"}', b'{"of": 1}', b'{"is": "bytes", "of": 3}', b"[" * 10_000):
        with pytest.raises(CheckpointError, match="`v` cannot be read"):
            decoded(data, "v")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="holds itself"):
        encoded(loop, "v")


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        net(torch.rand(6, 7, generator=generator)).square().sum().backward()
        optimizer.step()
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone().clone()  # type: ignore[operator]
        for p in net.parameters()
    ]


def sharded(axes: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2 over all ranks, or over the second axis of two, copies along the first; rows divide unevenly."""
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", axes, mesh_dim_names=("copies", "shards")[-len(axes) :]))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def test_fsdp_saves_on_four_ranks_and_goes_on_with_two_and_with_one(tmp_path: Path, together: Any) -> None:
    folder = tmp_path / "saves"

    def save(rank: int) -> None:
        net, optimizer = sharded((2, 2))
        trained(net, optimizer, range(3))
        writer = Writer(folder, step=3)
        weights, moments = get_state_dict(net, optimizer)
        dcp.save({"net": weights, "optimizer": moments}, storage_writer=writer)
        trained(net, optimizer, range(3, 4))
        writer.step = 4
        weights, moments = get_state_dict(net, optimizer)
        future = dcp.async_save({"net": weights, "optimizer": moments}, storage_writer=writer)
        future.result()

    def load(rank: int) -> list[Tensor]:
        net, optimizer = sharded((dist.get_world_size(),))
        weights, moments = get_state_dict(net, optimizer)
        state = {"net": weights, "optimizer": moments}
        dcp.load(state, storage_reader=Reader(folder, step=3))
        set_state_dict(net, optimizer, model_state_dict=state["net"], optim_state_dict=state["optimizer"])
        return trained(net, optimizer, range(3, 6))

    together(save, ranks=4)
    two, three = together(load, ranks=2), together(load, ranks=3)
    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    expected = trained(alone, optimizer, range(4))
    weights, moments = get_state_dict(alone, optimizer)
    state = {"net": {k: torch.zeros_like(v) for k, v in weights.items()}, "optimizer": moments}
    dcp.load(state, storage_reader=Reader(folder, step=4))
    unbroken = trained(alone, optimizer, range(4, 6))

    for found, right in zip(state["net"].values(), expected, strict=True):
        assert torch.allclose(found, right, rtol=1e-5, atol=1e-6)  # Gradients are averaged in another order there.
    for rank in (*two, *three):
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(rank, unbroken, strict=True))
