"""How does a checkpoint leave as safetensors, and how does it come back?"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from supernode.converting.tensorfile import Entry, read_files, write_folder
from supernode.converting.wholes import Wholes
from supernode.errors import CheckpointError
from supernode.schema import plain
from supernode.schema.manifest import Manifest
from supernode.storing.disk import explained
from supernode.storing.part import Piece, lay_out, stream_bytes
from supernode.storing.saves import Saves, Stored, name_of, step_of

WEIGHTS = ("model.", "buffer.0.")
"""How the names begin of what a model is made of; without that, they are the module's own."""
SHARD = 5_000_000_000
"""Bytes of a file above which there are several; as `transformers` has it."""
_MANIFEST = "supernode"
_BYTES = "supernode.bytes"
_NOTHING: Mapping[str, bytes] = MappingProxyType({})
_STREAM = 2**30
"""Bytes of a writer's stream of what comes back: it is in memory as a whole."""


def export(
    saves: Saves, name: str, folder: Path, *, everything: bool = False, most: int = SHARD,
    under: Mapping[str, tuple[str, Sequence[int]]] | None = None, beside: Mapping[str, bytes] = _NOTHING,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Path]:  # fmt: skip
    """Write a checkpoint's weights as safetensors into a new folder, and return the files.

    Args:
        everything: the optimizer's state and all else as well, under the names that the checkpoint has, so that it can
            be brought back.
        most: bytes of a file, above which there are several and an index.
        under: other names to leave under: each with the name in the checkpoint, and the order of its rows, empty as
            they are.
        beside: files to lay beside, by name.
        progress: told the bytes of each tensor.

    Raises:
        CheckpointError: the folder is there already, a tensor cannot be read, or has a kind that safetensors has not.
        MachineError: the disk is full.
    """
    wholes = Wholes(saves, name)
    names = {own: own for own in wholes.pieces} if everything else _weights(wholes)
    leaving = {theirs: (own, ()) for own, theirs in names.items()} if under is None else under
    if not names:
        raise CheckpointError(f"{wholes.where} holds no weights", hint="name another with `--checkpoint`.")
    if folder.exists():
        raise CheckpointError(f"{folder} is there already", hint="name a new folder with `--out`.")
    metadata = {"format": "pt"}
    if everything:
        manifest = replace(wholes.manifest, files={}, packs={})
        metadata[_MANIFEST] = json.dumps(asdict(manifest))
        metadata[_BYTES] = json.dumps([own for own in names if wholes.kind(own) == "bytes"])
    entries = [_entry(wholes, own, theirs, rows, progress) for theirs, (own, rows) in sorted(leaving.items())]
    draft = folder.with_name(f".draft-{folder.name}-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        files = write_folder(draft, entries, most=most, metadata=metadata)
        for file, data in beside.items():
            (draft / file).write_bytes(data)
            files.append(draft / file)
        os.rename(draft, folder)
    except OSError as error:
        raise explained(error, str(folder.parent)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return [folder / file.name for file in files]


def _weights(wholes: Wholes) -> dict[str, str]:
    found: dict[str, str] = {}
    for own in wholes.pieces:
        for prefix in WEIGHTS:
            if own.startswith(prefix) and wholes.kind(own) != "bytes":
                found[own] = own.removeprefix(prefix)
    return found


def _entry(
    wholes: Wholes, own: str, theirs: str, rows: Sequence[int], progress: Callable[[int], None]
) -> Entry:  # fmt: skip
    def read() -> memoryview:
        progress(wholes.nbytes(own))
        whole = wholes.read(own)
        return memoryview((whole[list(rows)] if len(rows) else whole).tobytes())

    kind = "uint8" if wholes.kind(own) == "bytes" else wholes.kind(own)
    return Entry(name=theirs, kind=kind, shape=wholes.shape(own), read=read)


def bring_back(saves: Saves, path: Path, *, compress: bool = True) -> Manifest:
    """Make a checkpoint of what was exported with everything; returns its manifest.

    Raises:
        CheckpointError: the files are damaged, hold weights alone, or are of a step that there is already.
        MachineError: a disk is full.
    """
    entries, metadata = read_files(path)
    manifest, raw = _said(path, metadata)
    if name_of(manifest.step) in {name for _, name in saves.all()}:
        raise CheckpointError(
            f"there is a checkpoint {name_of(manifest.step)} in {saves.disks[0].where} already",
            hint="leave it, or rename its folder to `aside-…` on every disk.",
        )
    stored: list[Stored] = []
    try:
        for writer, group in enumerate(_groups(entries)):
            pieces = lay_out([
                (one.name, "bytes" if one.name in raw else one.kind, one.shape, (0,) * len(one.shape), one.shape)
                for one in group
            ])  # fmt: skip
            stream = _stream(group, pieces)
            home = writer % len(saves.disks)
            stored.append(saves.store(manifest.step, writer, stream, pieces, home=home, compress=compress)[0])
        return saves.commit(manifest, stored)
    except BaseException:
        saves.drop_draft(manifest.step)
        raise


def _said(path: Path, metadata: dict[str, str]) -> tuple[Manifest, set[str]]:
    if _MANIFEST not in metadata:
        raise CheckpointError(
            f"{path} holds weights alone: no step, optimizer or place in the data to go on from",
            hint="bring back what `supernode checkpoint export --everything` wrote.",
        )
    try:
        manifest = plain.read(Manifest, metadata[_MANIFEST])
        raw = set(plain.read(tuple[str, ...], metadata.get(_BYTES, "[]")))
        if step_of(name_of(manifest.step)) != manifest.step or manifest.files or manifest.packs:
            raise ValueError(f"a step of {manifest.step}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"what {path} says of its run cannot be read: {error}", hint="export it again."
        ) from error
    return manifest, raw


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    group: list[Entry] = []
    for entry in sorted(entries, key=lambda one: one.name):
        if group and sum(one.nbytes for one in group) + entry.nbytes > _STREAM:
            yield group
            group = []
        group.append(entry)
    yield group


def _stream(group: list[Entry], pieces: tuple[Piece, ...]) -> memoryview:
    stream = memoryview(bytearray(stream_bytes(pieces)))
    for entry, piece in zip(group, pieces, strict=True):
        stream[piece.start : piece.start + piece.nbytes] = entry.read()
    return stream
