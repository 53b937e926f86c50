"""Damaged and hostile files are refused with a clear error, and nothing in them runs."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from supernode.checkpoint.source import whole
from supernode.errors import CheckpointError, SupernodeError
from supernode.foreign.look import Found, look
from supernode.foreign.source import Foreign

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # One process saves here.


def read_all(path: Path) -> Found:
    """Look, and read every tensor."""
    found = look(path)
    for name in found.tensors:
        whole(name, Foreign(found))
    return found


def safetensors(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a file of safetensors by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def one(first: int, last: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(last - first) // 4], "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": one(0, 8), "b": one(4, 12)}, bytes(12)),
        ({"a": one(0, 8), "b": one(12, 20)}, bytes(20)),
        ({"a": one(0, 8)}, bytes(4)),
        ({"a": one(0, 8)}, bytes(12)),
        ({"a": one(0, 8) | {"shape": [3]}}, bytes(8)),
        ({"a": one(0, 8) | {"shape": [-2]}}, bytes(8)),
        ({"a": one(0, 8) | {"dtype": "F99"}}, bytes(8)),
        ({"a": {"dtype": "F32"}}, bytes(8)),
        ([1], b""),
        (b"[" * 100_000, b""),
        (b'{"a": 1', b""),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: Any, data: bytes) -> None:
    path = safetensors(tmp_path / "model.safetensors", header, data)

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        look(path)


def test_files_cut_short_or_full_of_anything_are_refused(tmp_path: Path) -> None:
    path, dice = tmp_path / "model.safetensors", random.Random(0)
    save_file({"a": torch.ones(5, 3), "b": torch.ones(7)}, path)
    data = path.read_bytes()

    for length in (0, 5, 8, 40, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            look(path)
    for _ in range(50):
        path.write_bytes(dice.randbytes(dice.randrange(200)))
        with pytest.raises(CheckpointError):
            look(path)
    path.write_bytes((2**40).to_bytes(8, "little") + data[8:])
    with pytest.raises(CheckpointError, match="header would take"):
        look(path)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "../secret.safetensors"}, "outside of its folder"),
        ({"a": "/etc/passwd"}, "outside of its folder"),
        ({"a": "gone.safetensors"}, "which is missing"),
        ({"a": "model.safetensors", "c": "model.safetensors"}, "`c` is not there"),
        ({}, "no `weight_map`"),
        ({"a": 3}, "no `weight_map`"),
    ],
)
def test_an_index_points_at_its_own_files_alone(tmp_path: Path, places: Any, message: str) -> None:
    (tmp_path / "in").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    with pytest.raises(CheckpointError, match=message):
        look(tmp_path / "in")


class Acting:
    """Runs a command where it is unpickled as pickles usually are."""

    def __init__(self, does: Callable[..., Any], *words: Any) -> None:
        self.does, self.words = does, words

    def __reduce__(self) -> Any:
        return self.does, self.words


def test_a_table_that_would_run_something_runs_nothing(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    table, made = tmp_path / "dcp" / ".metadata", tmp_path / "made"
    hostile = [
        pickle.dumps(Acting(os.mkdir, str(made))),
        pickle.dumps({"state_dict_metadata": Acting(exec, f"import os; os.mkdir({str(made)!r})")}),
        pickle.dumps(Acting(getattr, Path, "mkdir")),
        f"cposix\nmkdir\n(V{made}\ntR.".encode(),
        f"(S'{made}'\niposix\nmkdir\n.".encode(),
        # Changes a class that is allowed instead of an object of it.
        b"ctorch\nSize\n}V__new__\nctorch.distributed.checkpoint.metadata\nMetadata\nsb.",
        b"\x80\x04\x96" + (2**50).to_bytes(8, "little") + b".",
        b"\x80\x02N" + b"r" + (2**32 - 1).to_bytes(4, "little") + b".",
        b"\x82\x01.",
        b"." * 5,
        b"",
    ]

    for data in hostile:
        table.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            look(tmp_path / "dcp")
    assert not made.exists()


def test_a_tensor_that_would_run_something_runs_nothing(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file, made = next((tmp_path / "dcp").glob("*.distcp")), tmp_path / "made"
    hostile = pickle.dumps(Acting(os.mkdir, str(made)), protocol=2)
    file.write_bytes(hostile.ljust(file.stat().st_size, b"\0"))

    with pytest.raises(CheckpointError, match=r"`a` in .* is not read"):
        read_all(tmp_path / "dcp")
    assert not made.exists()


def test_a_checkpoint_of_pytorch_with_files_missing_or_changed_is_refused_or_read_in_full(tmp_path: Path) -> None:
    state = {"a": torch.arange(30.0).view(5, 6), "b": torch.ones(2, dtype=torch.bfloat16)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    table, file = tmp_path / "dcp" / ".metadata", next((tmp_path / "dcp").glob("*.distcp"))
    metadata, data, dice = table.read_bytes(), file.read_bytes(), random.Random(1)

    assert torch.equal(whole("a", Foreign(read_all(tmp_path / "dcp"))), state["a"])
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="bytes; it holds"):
        look(tmp_path / "dcp")
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is missing"):
        look(tmp_path / "dcp")
    (tmp_path / "elsewhere").rename(file)
    file.write_bytes(data)
    for _ in range(300):  # Whatever stands there, the answer is tensors or an error with a remedy.
        damaged = bytearray(metadata)
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        table.write_bytes(damaged)
        with suppress(SupernodeError):
            read_all(tmp_path / "dcp")
    table.write_bytes(metadata.replace(file.name.encode(), f"../{file.name}"[: len(file.name)].encode()))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        look(tmp_path / "dcp")


def test_what_is_no_weights_at_all_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("x", "y"):
        save_file({"a": torch.ones(2)}, tmp_path / "two" / f"{name}.safetensors")

    for path, message in (("gone", "does not exist"), ("empty", "holds no weights"), ("two", "2 files of safetensors")):
        with pytest.raises(CheckpointError, match=message):
            look(tmp_path / path)
    assert set(look(tmp_path / "two" / "x.safetensors").tensors) == {"a"}
