"""How do tensors lie in a safetensors file? Written and read piece by piece, every number of a header checked.

Source: https://huggingface.co/docs/safetensors, "Format"; index files as `transformers` writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from supernode.errors import CheckpointError
from supernode.storing.part import DTYPES

KINDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""What safetensors calls a kind of numbers, by torch's name for it; it has none for complex128."""
_NAMES = {theirs: ours for ours, theirs in KINDS.items()}
_MOST_HEADER = 100_000_000  # safetensors' own limit
_MOST_INDEX = 100_000_000
_HINT = "export or download it again."
STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor that is to be written, or lies in a file.

    Attributes:
        kind: of its numbers, as torch calls it.
        read: gives its bytes, in row-major order.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return DTYPES[self.kind] * prod(self.shape)


def write_folder(folder: Path, entries: Sequence[Entry], *, most: int, metadata: Mapping[str, str]) -> list[Path]:
    """Write tensors into one file, or several and an index where one would hold more than `most` bytes.

    Raises:
        CheckpointError: a tensor's kind has no name in safetensors.
        OSError: it cannot be written.
    """
    for entry in entries:
        if entry.kind not in KINDS:
            raise CheckpointError(
                f"`{entry.name}` is of {entry.kind}, which safetensors has no name for",
                hint="export without it: leave out `--everything`.",
            )
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + entry.nbytes > most:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        names = [f"{STEM}.safetensors"]
    else:
        names = [f"{STEM}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, metadata)
    if len(shards) > 1:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {**metadata, "total_size": total}, "weight_map": places}
        _durable(folder / INDEX, [json.dumps(index, indent=2, sort_keys=True).encode()])
        names.append(INDEX)
    return [folder / name for name in names]


def _write_file(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
    # Large numbers first, so that each tensor starts at a multiple of its numbers' size.
    ordered = sorted(entries, key=lambda entry: (-DTYPES[entry.kind], entry.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": KINDS[entry.kind], "shape": list(entry.shape), "data_offsets": [offset, offset + entry.nbytes],
        }  # fmt: skip
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for entry in ordered:
            data = entry.read()
            assert len(data) == entry.nbytes, entry.name
            yield data

    _durable(path, pieces())


def _durable(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def read_files(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors of a file, or of a folder with one or more, and what is said of them all.

    Raises:
        CheckpointError: it is missing, or not what safetensors can be.
    """
    if path.is_file():
        return read_file(path)
    index = path / INDEX
    files, places = [f"{STEM}.safetensors"], None
    if index.is_file():
        places = _index(index)
        files = sorted(set(places.values()))
    entries: list[Entry] = []
    metadata: dict[str, str] = {}
    for file in files:
        found, said = read_file(path / file)
        metadata |= said
        entries += found
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names) or (places is not None and set(names) != places.keys()):
        stray = sorted(set(names) ^ (places or {}).keys())
        raise CheckpointError(f"{path} holds other tensors than its index names: {stray[:3]}", hint=_HINT)
    return entries, metadata


def _index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MOST_INDEX:
            raise ValueError("it is too large")
        places = json.loads(path.read_bytes())["weight_map"]
        for name, file in places.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"`{name}` is said to lie in {file!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is no index of tensors: {error}", hint=_HINT) from error
    return dict(places)


def read_file(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors of a file, not read yet, and what is said of them; raises as `read_files`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            count = int.from_bytes(file.read(8), "little")
            if size < 8 or count > min(_MOST_HEADER, size - 8):
                raise ValueError(f"its header would take {count} of its {size} bytes")
            header = json.loads(file.read(count), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("its header is no mapping")
        said = header.pop("__metadata__", {})
        if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
            raise ValueError("its metadata are no texts")
        return _entries(path, header, start=8 + count, room=size - 8 - count), said
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there", hint="name a folder or file of safetensors.") from error
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is not safetensors: {error}", hint=_HINT) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it says something twice")
    return found


def _entries(path: Path, header: dict[str, Any], *, start: int, room: int) -> list[Entry]:
    found, beyond = [], 0
    for name, told in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        shape, (first, last) = told["shape"], told["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise ValueError(f"`{name}` has a shape or place that is no number")
        if told["dtype"] not in _NAMES:
            raise ValueError(f"`{name}` is of {told['dtype']!r}")
        entry = Entry(
            name=name, kind=_NAMES[told["dtype"]], shape=tuple(shape), read=_reader(path, start + first, last - first)
        )
        if first != beyond or last - first != entry.nbytes:
            raise ValueError(f"`{name}` is said to take {last - first} bytes from {first} on")
        beyond = last
        found.append(entry)
    if beyond != room:
        raise ValueError(f"its tensors take {beyond} bytes, and it has {room}")
    return found


def _reader(path: Path, start: int, count: int) -> Callable[[], memoryview]:
    def read() -> memoryview:
        with path.open("rb") as file:
            file.seek(start)
            room = bytearray(count)
            if file.readinto(room) != count:
                raise CheckpointError(f"{path} has become shorter", hint=_HINT)
            return memoryview(room)

    return read
