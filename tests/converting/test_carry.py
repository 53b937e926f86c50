"""What leaves as safetensors is what others read there, comes back as it was, and bad files are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.storing.conftest import manifest, saves

from supernode.converting.carry import bring_back, export
from supernode.converting.difference import Difference, differences
from supernode.converting.tensorfile import INDEX, read_file, read_files
from supernode.converting.wholes import Wholes
from supernode.errors import CheckpointError
from supernode.storing.part import lay_out, stream_bytes
from supernode.storing.saves import Saves, name_of

DRAW = np.random.default_rng(4)
VALUES: dict[str, np.ndarray[Any, Any]] = {
    "model.embed.weight": DRAW.standard_normal((12, 6), dtype=np.float32),
    "model.head.weight": DRAW.standard_normal((5, 4)).astype(np.float16),
    "model.scale": np.array(2.5, dtype=np.float64),
    "buffer.0.count": np.arange(7, dtype=np.int64),
    "buffer.1.count": np.arange(7, 14, dtype=np.int64),
    "optimizer.embed.weight.step": DRAW.standard_normal((12, 6), dtype=np.float32),
    "notes": np.frombuffer(b"any bytes", dtype=np.uint8),
}
Cut = Callable[[tuple[int, ...]], list[tuple[tuple[int, ...], tuple[int, ...]]]]


def in_columns(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, shape) of a tensor's last dim cut in two."""
    if not shape or shape[-1] < 2:
        return [((0,) * len(shape), shape)]
    half = shape[-1] // 2
    zeros = (0,) * (len(shape) - 1)
    return [((*zeros, 0), (*shape[:-1], half)), ((*zeros, half), (*shape[:-1], shape[-1] - half))]


def whole(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return all of a tensor as its only box."""
    return [((0,) * len(shape), shape)]


def put(where: Saves, step: int, values: dict[str, Any], cut: Cut = in_columns) -> None:
    """Save tensors, each cut into boxes that two writers take in turns."""
    stored = []
    for writer in range(2):
        boxes, data = [], []
        for name, value in values.items():
            for number, (offsets, shape) in enumerate(cut(value.shape)):
                if number % 2 == writer:
                    kind = "bytes" if name == "notes" else str(value.dtype)
                    if kind == "bytes":
                        offsets, shape = (0,), value.shape
                    boxes.append((name, kind, value.shape, offsets, shape))
                    data.append(value[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))].tobytes())
        pieces = lay_out(boxes)
        stream = bytearray(stream_bytes(pieces))
        for piece, one in zip(pieces, data, strict=True):
            stream[piece.start : piece.start + piece.nbytes] = one
        stored.append(where.store(step, writer, memoryview(bytes(stream)), pieces)[0])
    where.commit(replace(manifest(step), layout="2 × tensor"), stored)


@pytest.fixture
def where(tmp_path: Path) -> Saves:
    """Return the saves of a run with one at step 5; what is no tensor is written whole."""
    there = saves(tmp_path / "disks")
    put(there, 5, VALUES, cut=lambda shape: whole(shape) if shape == (9,) else in_columns(shape))
    return there


def test_weights_that_two_wrote_are_read_by_the_library_of_safetensors(where: Saves, tmp_path: Path) -> None:
    files = export(where, name_of(5), tmp_path / "out")

    found = load_file(files[0])
    assert files == [tmp_path / "out" / "model.safetensors"]
    assert {name: value.dtype for name, value in found.items()} == {
        "embed.weight": np.float32, "head.weight": np.float16, "scale": np.float64, "count": np.int64,
    }  # fmt: skip
    assert np.array_equal(found["embed.weight"], VALUES["model.embed.weight"])
    assert np.array_equal(found["head.weight"], VALUES["model.head.weight"])
    assert (found["scale"], found["scale"].shape) == (2.5, ())
    assert np.array_equal(found["count"], VALUES["buffer.0.count"])
    with safe_open(files[0], "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    with pytest.raises(CheckpointError, match="is there already"):
        export(where, name_of(5), tmp_path / "out")


def test_large_ones_are_several_files_with_an_index_that_names_each_tensor_once(where: Saves, tmp_path: Path) -> None:
    files = export(where, name_of(5), tmp_path / "out", most=300)

    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert [file.name for file in files] == [
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)), INDEX,  # of 56, 288, 40 + 8 bytes
    ]  # fmt: skip
    assert index["metadata"]["total_size"] == 12 * 6 * 4 + 5 * 4 * 2 + 8 + 7 * 8
    assert {name: index["weight_map"][name] for file in files[:3] for name in load_file(file)} == index["weight_map"]
    assert {entry.name for entry in read_files(tmp_path / "out")[0]} == set(index["weight_map"])


@pytest.mark.parametrize("most", [10**9, 300])
def test_all_that_was_exported_comes_back_as_it_was(where: Saves, tmp_path: Path, most: int) -> None:
    export(where, name_of(5), tmp_path / "out", everything=True, most=most)
    there = saves(tmp_path / "others", disks=3, parity=1)

    back = bring_back(there, tmp_path / "out")

    assert replace(back, files={}, packs={}) == replace(where.manifest(name_of(5)), files={}, packs={})
    assert differences(Wholes(where, name_of(5)), Wholes(there, name_of(5))) == []
    assert Wholes(there, name_of(5)).kind("notes") == "bytes"
    with pytest.raises(CheckpointError, match="already"):
        bring_back(there, tmp_path / "out")


def test_weights_alone_do_not_come_back(where: Saves, tmp_path: Path) -> None:
    export(where, name_of(5), tmp_path / "out")

    with pytest.raises(CheckpointError, match="weights alone") as caught:
        bring_back(saves(tmp_path / "others"), tmp_path / "out")
    assert "--everything" in caught.value.hint


def test_two_checkpoints_differ_in_what_was_changed_however_each_was_cut(where: Saves) -> None:
    values = {name: value.copy() for name, value in VALUES.items() if name != "buffer.1.count"}
    values["model.embed.weight"][3, 2:5] += 1
    values["model.head.weight"] = values["model.head.weight"].reshape(4, 5)
    values["model.more"] = np.ones(3, dtype=np.float32)
    put(where, 6, values, cut=whole)

    found = differences(Wholes(where, name_of(5)), Wholes(where, name_of(6)))

    assert found == [
        Difference(name="buffer.1.count", what="removed", differing=7, numbers=7),
        Difference(name="model.embed.weight", what="changed", differing=3, numbers=72),
        Difference(name="model.head.weight", what="reshaped", differing=20, numbers=20),
        Difference(name="model.more", what="added", differing=3, numbers=3),
    ]


def test_a_tensor_that_nobody_wrote_all_of_is_refused_before_room_is_made_for_it(tmp_path: Path) -> None:
    there = saves(tmp_path)
    pieces = lay_out([("model.w", "float32", (2**40, 2**20), (0, 0), (1, 2))])
    stored, _ = there.store(1, 0, memoryview(bytes(stream_bytes(pieces))), pieces)
    there.commit(manifest(1), [stored])

    with pytest.raises(CheckpointError, match=f"holds 2 of {2**60} numbers of `model.w`"):
        export(there, name_of(1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def good() -> bytes:
    """Return a small file of safetensors."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


def with_header(header: object, body: int = 8) -> bytes:
    """Return a file with such a header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff" * 7, (10**15).to_bytes(8, "little") + b"{}", good()[:-1], good() + b"x",
        with_header([1]), with_header(b"{"), with_header(b"[" * 5000), with_header({"a": 3}),
        with_header({"a": TENSOR | {"dtype": "P9"}}), with_header({"a": TENSOR | {"shape": [-2]}}),
        with_header({"a": TENSOR | {"shape": [3]}}), with_header({"a": TENSOR | {"shape": [True, 2]}}),
        with_header({"a": TENSOR | {"data_offsets": [8, 0]}}), with_header({"a": TENSOR | {"data_offsets": [0]}}),
        with_header({"a": TENSOR, "b": TENSOR}), with_header({"__metadata__": {"x": 1}, "a": TENSOR}),
        with_header(b'{"a":' + json.dumps(TENSOR).encode() + b',"a":' + json.dumps(TENSOR).encode() + b"}"),
        with_header({"a": TENSOR | {"shape": [2**62, 2**62]}}),
    ],
)  # fmt: skip
def test_what_is_no_file_of_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(CheckpointError, match="is not safetensors") as caught:
        read_files(tmp_path)
    assert "model.safetensors" in caught.value.message


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_garbage_is_never_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int, flip: int
) -> None:
    flipped = bytearray(good())
    flipped[at % len(flipped)] ^= flip
    path = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    for content in (data, bytes(flipped), good()[: at % len(good())] + data):
        path.write_bytes(content)
        try:
            entries, _ = read_file(path)
        except CheckpointError:
            continue
        assert all(entry.nbytes == len(entry.read()) for entry in entries)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "no index"), ('{"weight_map": {"a": "../secret.safetensors"}}', "no index"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "no index"), ('{"weight_map": 3}', "no index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "not there"),
        ('{"weight_map": {"b": "one.safetensors"}}', "other tensors than its index"),
    ],
)  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, index: str, said: str) -> None:
    save_file({"a": np.ones(2, dtype=np.float32)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(index)

    with pytest.raises(CheckpointError, match=said):
        read_files(tmp_path)


def test_files_of_others_are_read_as_their_library_reads_them(tmp_path: Path) -> None:
    values = {"a": DRAW.standard_normal((3, 4)), "b": np.arange(5, dtype=np.uint16), "c": np.zeros((0, 2), np.float32)}
    save_file(values, tmp_path / "model.safetensors", metadata={"said": "so"})

    entries, metadata = read_files(tmp_path)

    assert metadata == {"said": "so"}
    assert {entry.name: bytes(entry.read()) for entry in entries} == {n: v.tobytes() for n, v in values.items()}
    assert {entry.name: (entry.kind, prod(entry.shape)) for entry in entries} == {
        "a": ("float64", 12), "b": ("uint16", 5), "c": ("float32", 0),
    }  # fmt: skip
