"""What tensors are at a path, whoever wrote them, and where do their bytes lie? Nothing but headers is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from supernode.converting.tensorfile import read_file
from supernode.errors import CheckpointError, MachineError
from supernode.foreign.pickled import TABLE, Record, Size, read_table
from supernode.storing.part import DTYPES, Piece
from supernode.storing.saves import Saves, step_of
from supernode.storing.spread import Spread, disk_of

_INDEX = ".safetensors.index.json"
_MOST_INDEX = 2**27
_MOST_ROWS = 32 * 2**20
"""Bytes of rows that are read at a time of a safetensors file."""
_REWRITE = "download or write it again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A box of a tensor and where its bytes are.

    Attributes:
        start: first byte in the file.
        nbytes: there; of a checkpoint of PyTorch those of an archive that holds the box.
    """

    file: Path
    start: int
    nbytes: int
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Tensors at a path.

    Attributes:
        kind: safetensors files, a checkpoint of torch.distributed.checkpoint, or one of ours.
        tensors: all boxes of each, by name.
        config: what Hugging Face's `config.json` beside them says, or of ours the model that it was made of.
        rest: names of what is no tensor.
    """

    path: Path
    kind: Literal["safetensors", "dcp", "ours"]
    tensors: Mapping[str, tuple[Item, ...]]
    config: Mapping[str, Any] = field(default_factory=dict)
    rest: tuple[str, ...] = ()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self.tensors[name][0].piece.whole


def look(path: Path) -> Found:
    """Return what is at a path: a folder or file of safetensors, a checkpoint of PyTorch, or one of ours.

    Raises:
        CheckpointError: it is none of these, or damaged as far as headers tell.
    """
    try:
        if path.is_file() and path.suffix == ".safetensors":
            return Found(path=path, kind="safetensors", tensors=_in_file(path), config=_config(path.parent))
        if path.is_dir():
            if (path / TABLE).is_file():
                return _in_table(path)
            if (path / "manifest.json").is_file():
                return _ours(path)
            if files := sorted(path.glob("*.safetensors")):
                return _in_folder(path, files)
            if next(path.glob("*" + _INDEX), None):
                raise CheckpointError(f"{path} has an index and none of its files", hint=_REWRITE)
    except OSError as error:
        raise MachineError(
            f"{error.filename or path} cannot be read: {error.strerror}", hint="see to its permissions and its disk."
        ) from error
    what = "does not exist" if not path.exists() else "holds no weights that are known"
    raise CheckpointError(
        f"{path} {what}",
        hint="name a folder or file of safetensors, a checkpoint of `torch.distributed.checkpoint` (a folder with "
        "`.metadata`), or one of ours (RUN/checkpoints/step-…).",
    )


def _in_folder(folder: Path, files: list[Path]) -> Found:
    indices = sorted(folder.glob("*" + _INDEX))
    if len(indices) > 1 or (not indices and len(files) > 1):
        raise CheckpointError(
            f"{folder} holds {len(files)} files of safetensors and {len(indices)} indices",
            hint="name one of the files, or leave one index in the folder.",
        )
    if not indices:
        return Found(path=folder, kind="safetensors", tensors=_in_file(files[0]), config=_config(folder))
    weight_map = _json(indices[0]).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(f"{indices[0]} has no `weight_map` of names and files", hint=_REWRITE)
    tensors: dict[str, tuple[Item, ...]] = {}
    for file in sorted(set(weight_map.values())):
        # Shards lie beside their index. Links there are Hugging Face's own way, a path is not.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{indices[0]} points to {file!r}, outside of its folder", hint=_REWRITE)
        if not (folder / file).is_file():
            raise CheckpointError(f"{indices[0]} points to {file}, which is missing", hint=_REWRITE)
        held = _in_file(folder / file)
        named = {name for name, where in weight_map.items() if where == file}
        if odd := sorted(named ^ held.keys()):
            where = "is not there" if odd[0] in named else "the index does not name"
            raise CheckpointError(f"{folder / file} and its index differ: `{odd[0]}` {where}", hint=_REWRITE)
        tensors |= held
    return Found(path=folder, kind="safetensors", tensors=tensors, config=_config(folder))


def _in_file(path: Path) -> dict[str, tuple[Item, ...]]:
    """Return where the tensors of one file lie; its header says so, and covers the file without holes or overlaps."""
    entries, _ = read_file(path)
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    found: dict[str, tuple[Item, ...]] = {}
    for entry in entries:  # One after the other, as they lie.
        found[entry.name] = tuple(_rows(path, entry.name, entry.kind, entry.shape, start, entry.nbytes))
        start += entry.nbytes
    return found


def _rows(path: Path, name: str, kind: str, shape: tuple[int, ...], start: int, nbytes: int) -> Iterator[Item]:
    """Yield a tensor that lies in one stretch as boxes of some rows each, so that no rank reads much for nothing."""
    count = -(-nbytes // _MOST_ROWS) if shape else 1
    rows = shape[0] if shape else 1
    edges = sorted({rows * number // max(count, 1) for number in range(count + 1)}) if count > 1 else [0, rows]
    row = nbytes // rows if rows else 0
    for first, beyond in pairwise(edges):
        box = (beyond - first, *shape[1:]) if shape else ()
        piece = Piece(
            name=name, kind=kind, whole=shape, offsets=(first, *(0,) * (len(shape) - 1)) if shape else (), shape=box,
            start=0,
        )  # fmt: skip
        yield Item(file=path, start=start + first * row, nbytes=(beyond - first) * row, piece=piece)


def _in_table(folder: Path) -> Found:
    """Return what a checkpoint of PyTorch holds; each of its boxes is an archive of its own within a file."""
    fields = read_table(folder)
    hint = "write the checkpoint again with `torch.distributed.checkpoint.save`."
    sizes: dict[str, int] = {}
    stored: dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]] = {}
    tensors: dict[str, tuple[Item, ...]] = {}
    rest: list[str] = []
    try:
        for index, info in fields["storage_data"].items():
            file = info.relative_path
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{folder / TABLE} points to {file!r}, outside of its folder", hint=hint)
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{folder / file} is compressed", hint="write it without `_extensions`.")
            if file not in sizes:
                sizes[file] = (folder / file).stat().st_size if (folder / file).is_file() else -1
            start, nbytes = int(info.offset), int(info.length)
            if sizes[file] < 0 or start < 0 or nbytes < 0 or start + nbytes > sizes[file]:
                what = "is missing" if sizes[file] < 0 else f"has {sizes[file]:,} of at least {start + nbytes:,} bytes"
                raise CheckpointError(f"{folder / file} {what}; it holds `{index.fqn}`", hint=_REWRITE)
            if (offset := getattr(index, "offset", None)) is not None:
                stored[(index.fqn, tuple(offset))] = folder / file, start, nbytes
        for name, entry in fields["state_dict_metadata"].items():
            if type(entry).__name__ != "TensorStorageMetadata":
                rest.append(name)
                continue
            tensors[name] = tuple(_boxes(name, entry, stored, folder))
    except (AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{folder / TABLE} is damaged ({error})", hint=hint) from error
    return Found(path=folder, kind="dcp", tensors=tensors, rest=tuple(rest))


def _boxes(
    name: str, entry: Record, stored: Mapping[tuple[str, tuple[int, ...]], tuple[Path, int, int]], folder: Path
) -> Iterator[Item]:
    kind, whole = str(entry.properties.state[0]), _whole_numbers(entry.size)
    if kind not in DTYPES:
        raise ValueError(f"`{name}` is of {kind}")
    for chunk in entry.chunks:
        offsets, shape = _whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)
        fits = len(offsets) == len(shape) == len(whole)
        if not fits or any(o + s > w for o, s, w in zip(offsets, shape, whole, strict=True)):
            raise ValueError(f"`{name}` has a piece outside of it")
        if (name, offsets) not in stored:
            raise CheckpointError(f"{folder / TABLE} does not say where a piece of `{name}` lies", hint=_REWRITE)
        file, start, nbytes = stored[(name, offsets)]
        piece = Piece(name=name, kind=kind, whole=whole, offsets=offsets, shape=shape, start=0)
        yield Item(file=file, start=start, nbytes=nbytes, piece=piece)


def _whole_numbers(values: Size) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 2**48 for value in values):
        raise ValueError("a shape is not of whole numbers")
    return tuple(values)


def _ours(folder: Path) -> Found:
    """Return the tensors of one of our checkpoints that lies on one disk."""
    saves = Saves(Spread(disks=(disk_of(folder.parent),)))
    if step_of(folder.name) < 0:
        raise CheckpointError(f"{folder} is not named as a checkpoint of ours", hint="give it back its name, step-….")
    manifest = saves.manifest(folder.name)
    tensors: dict[str, tuple[Item, ...]] = {}
    for writer in saves.writers(manifest):
        for piece in saves.part(folder.name, manifest, writer).pieces:
            if piece.kind in DTYPES:
                item = Item(file=folder, start=0, nbytes=piece.nbytes, piece=piece)
                tensors[piece.name] = (*tensors.get(piece.name, ()), item)
    return Found(path=folder, kind="ours", tensors=tensors, config=_model(manifest.model))


def _model(described: str) -> Mapping[str, Any]:
    """Return the decoder's shape that a manifest names; nothing for a user's own module."""
    try:
        found = json.loads(described)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    return _json(path) if path.is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    if (nbytes := path.stat().st_size) > _MOST_INDEX:
        raise CheckpointError(f"{path} is {nbytes:,} bytes long, more than {_MOST_INDEX:,}", hint=_REWRITE)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}", hint=_REWRITE) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is no JSON object", hint=_REWRITE)
    return value
