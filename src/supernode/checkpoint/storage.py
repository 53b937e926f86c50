"""Our format as storage of torch.distributed.checkpoint, for any of its users; nothing of it is ever unpickled.

A user writes `dcp.save(state, storage_writer=Writer(folder, step=50))` and loads with `Reader(folder)`. Each save holds
what has changed since the one before in the same folder; each read is held against digests.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from supernode.checkpoint.boxes import KINDS, Box
from supernode.checkpoint.source import OnDisk, as_bytes
from supernode.checkpoint.values import decoded, encoded
from supernode.errors import CheckpointError
from supernode.schema.manifest import Manifest
from supernode.storing.pack import Before
from supernode.storing.part import Piece, lay_out, stream_bytes
from supernode.storing.saves import Saves, Stored, name_of, step_of
from supernode.storing.spread import Spread, disk_of

PATHS = ".paths"
"""Name of what says where each name of a flattened state dict stood in it."""
Where = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def _saves(where: Where, copies: int = 1, parity: int = 0) -> Saves:
    places = [where] if isinstance(where, str | os.PathLike) else list(where)
    return Saves(Spread(disks=tuple(disk_of(os.fspath(one)) for one in places), copies=copies, parity=parity))


class Writer(StorageWriter):
    """Writes a save of any state dict.

    It may be used again, for another step each time: it then need not read what the save before was made of.

    Args:
        where: folder or fsspec URL of all saves; several are several disks.
        step: number of this save; one of the same number is replaced once this one is whole.
        keep: newest saves that stay; None for all.
        copies, parity, compress: as in a job's `checkpoint`.
    """

    def __init__(
        self, where: Where, *, step: int, keep: int | None = None, copies: int = 1, parity: int = 0,
        compress: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        _saves(where, copies, parity)  # So that what is wrong with these is told at once.
        self._where, self._copies, self._parity = where, copies, parity
        self.step, self._keep, self._compress = step, keep, compress
        self._rank, self._is_coordinator = 0, True
        self._before: dict[int, tuple[int, Before]] = {}

    @property
    def saves(self) -> Saves:
        """All saves there."""
        return _saves(self._where, self._copies, self._parity)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save; an id, where one is given, is the folder's name, `step-N`."""
        if checkpoint_id is not None:
            self.step = _step_in(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note which rank this is."""
        del args
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "a save without collectives would be whole for no rank", hint="leave `use_collectives` as it is."
            )
        self._rank, self._is_coordinator = kwargs.get("rank") or 0, is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Delete what an earlier try left; nobody writes yet."""
        if self._is_coordinator:
            self.saves.drop_draft(self.step)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave it as it is: each rank writes what the planner gave it."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write a rank's share.

        Raises:
            CheckpointError: a tensor or an object is of a kind that is not held; or the disk cannot be written.
            MachineError: the disk is full.
        """
        objects = {item.index: _object(item, planner) for item in plan.items if item.type == WriteItemType.BYTE_IO}
        pieces = lay_out([_box(item, objects.get(item.index)) for item in plan.items])
        stream = memoryview(bytearray(stream_bytes(pieces)))
        for item, piece in zip(plan.items, pieces, strict=True):
            room = stream[piece.start : piece.start + piece.nbytes]
            if item.index in objects:
                room[:] = objects[item.index]
            elif piece.nbytes:
                target = torch.frombuffer(room, dtype=KINDS[piece.kind]).view(piece.shape)
                resolved = planner.resolve_data(item)
                assert isinstance(resolved, Tensor)
                target.copy_(resolved.detach())
        stored = self._store(self._rank, stream, pieces)
        sizes = zip(plan.items, pieces, strict=True)
        results = [WriteResult(item.index, piece.nbytes, stored if not at else None) for at, (item, piece) in
                   enumerate(sizes)]  # fmt: skip
        done: Future[list[WriteResult]] = Future()
        # A rank with nothing to write has a part all the same, so that its number tells of no loss.
        done.set_result(results or [WriteResult(MetadataIndex(""), 0, stored)])
        return done

    def _store(self, writer: int, stream: memoryview, pieces: tuple[Piece, ...]) -> Stored:
        saves = self.saves
        older = [(step, name) for step, name in saves.all() if step < self.step]
        before: Before | None = None
        if older:
            step, name = older[-1]
            known, before = self._before.get(writer, (-1, None))
            if known != step:
                before = saves.before(name, saves.manifest(name), writer)
        stored, part = saves.store(
            self.step, writer, stream, pieces, home=writer % len(saves.disks), before=before, compress=self._compress
        )
        self._before[writer] = self.step, Before(part=part, packs=stored.packs)
        return stored

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator; raises as `write_data`."""
        stored = [one[0].storage_data for one in results]
        paths = encoded(metadata.planner_data, PATHS)
        pieces = lay_out([(PATHS, "bytes", (len(paths),), (0,), (len(paths),))])
        stream = memoryview(bytearray(stream_bytes(pieces)))
        stream[: len(paths)] = paths
        saves, extra = self.saves, self._store(len(stored), stream, pieces)
        manifest = Manifest(
            step=self.step, samples=0, seed=0, model="a state dict", data="", layout=f"{len(stored)} ranks",
            optimizer="",
        )  # fmt: skip
        saves.commit(manifest, [*stored, extra])
        if self._keep is not None:
            saves.prune(keep=self._keep, newest=self.step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether it is a save's."""
        return step_of(Path(checkpoint_id).name) >= 0


class Reader(StorageReader):
    """Reads a save into any state dict, however either is sharded.

    Args:
        where: as it was written.
        step: number of the save; None for the newest.
        strict: refuse a state dict that takes less than all the save holds.
    """

    def __init__(self, where: Where, *, step: int | None = None, strict: bool = True) -> None:
        super().__init__()
        self._where, self.step, self._strict = where, step, strict
        self._source: OnDisk | None = None
        self._at: Mapping[tuple[str, tuple[int, ...]], tuple[int, Piece]] = {}
        self._held: tuple[tuple[int, Piece], Tensor] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to read another save; an id, where one is given, is the folder's name, `step-N`."""
        if checkpoint_id is not None:
            self.step = _step_in(checkpoint_id)
        self._source, self._held = None, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what a save holds, as DCP describes it.

        Raises:
            CheckpointError: there is no such save, or it is damaged.
        """
        del args
        if kwargs.get("rank") is not None:
            raise CheckpointError("a save has no metadata of single ranks", hint="load with collectives.")
        saves = _saves(self._where)
        if self.step is None and not saves.all():
            raise CheckpointError(f"{saves.disks[0].where} holds no save", hint="correct the folder.")
        name = saves.all()[-1][1] if self.step is None else name_of(self.step)
        self._source = OnDisk(saves, name)
        self._at = {(piece.name, piece.offsets): (writer, piece)
                    for found in self._source.pieces.values() for writer, piece in found}  # fmt: skip
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: _described(key, [piece for _, piece in found])
            for key, found in self._source.pieces.items() if key != PATHS
        }  # fmt: skip
        paths = self._bytes(PATHS) if PATHS in self._source.pieces else None
        return Metadata(described, planner_data=decoded(paths, PATHS) if paths is not None else None)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Hold what all ranks ask for against what there is.

        Raises:
            CheckpointError: the save holds more.
        """
        assert self._source is not None
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        unread = sorted(set(self._source.pieces) - asked - {PATHS})
        unread = [name for name in unread if any(piece.nbytes for _, piece in self._source.pieces[name])]
        if unread and self._strict:
            raise CheckpointError(
                f"{self._source.where} also holds `{unread[0]}` ({len(unread)} such), and nothing asks for it",
                hint="load into all that was saved, or give `Reader` strict=False.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read a rank's share, every byte held against its digest.

        Raises:
            CheckpointError: bytes are not what was written; the message names the tensor and the pack.
        """
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                # The planner unpickles what it is handed: this very value, pickled here.
                pickled = io.BytesIO()
                torch.save(decoded(self._bytes(name), name), pickled)
                pickled.seek(0)
                planner.load_bytes(item, pickled)
            else:
                target = planner.resolve_tensor(item).detach()
                self._fill(item, target)
                planner.commit_tensor(item, target)
        self._held = None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, item: ReadItem, target: Tensor) -> None:
        assert self._source is not None
        offset = item.storage_index.offset
        writer, piece = self._at[item.storage_index.fqn, tuple(offset) if offset is not None else ()]
        kind = KINDS[piece.kind]
        if target.dtype != kind and not (target.is_floating_point() and kind.is_floating_point):
            raise CheckpointError(
                f"`{piece.name}` is of {piece.kind} in {self._source.where} and of {target.dtype} here",
                hint="load it into a tensor of its own kind.",
            )
        is_whole = tuple(item.lengths) == piece.shape
        if is_whole and target.dtype == kind and target.is_contiguous() and target.device.type == "cpu":
            self._source.read(writer, piece, as_bytes(target))
            return
        # What is read in vain now is often wanted next: pieces that were cut otherwise overlap several of ours.
        if self._held is None or self._held[0] != (writer, piece):
            room = torch.empty(piece.shape, dtype=kind)
            self._source.read(writer, piece, as_bytes(room))
            self._held = (writer, piece), room
        cut = tuple(slice(first, first + count) for first, count in
                    zip(item.storage_offsets, item.lengths, strict=True))  # fmt: skip
        target.copy_(self._held[1][cut])

    def _bytes(self, name: str) -> bytes:
        assert self._source is not None
        writer, piece = self._source.pieces[name][0]
        room = bytearray(piece.nbytes)
        self._source.read(writer, piece, memoryview(room))
        return bytes(room)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether it is a save's."""
        return step_of(Path(checkpoint_id).name) >= 0


def _step_in(checkpoint_id: str | os.PathLike[str]) -> int:
    name = Path(checkpoint_id).name
    if (step := step_of(name)) < 0:
        raise CheckpointError(f"{name!r} is no name of a save", hint=f"leave the id out, or name it as {name_of(50)}.")
    return step


def _object(item: WriteItem, planner: SavePlanner) -> bytes:
    """Return an object as JSON; the planner itself would pickle it."""
    look = getattr(planner, "lookup_object", None)
    if look is None:
        raise CheckpointError(
            f"`{item.index.fqn}` is no tensor, and {type(planner).__name__} hands such over only pickled",
            hint="let the planner be a `DefaultSavePlanner`, or save it as a tensor.",
        )
    return encoded(look(item.index), item.index.fqn)


def _box(item: WriteItem, data: bytes | None) -> Box:
    if data is not None:
        return item.index.fqn, "bytes", (len(data),), (0,), (len(data),)
    assert item.tensor_data is not None
    kind = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    if kind not in KINDS:
        raise CheckpointError(f"`{item.index.fqn}` is of torch.{kind}", hint=f"use one of {', '.join(KINDS)}.")
    chunk = item.tensor_data.chunk
    return item.index.fqn, kind, tuple(item.tensor_data.size), tuple(chunk.offsets), tuple(chunk.sizes)


def _described(name: str, pieces: Sequence[Piece]) -> TensorStorageMetadata | BytesStorageMetadata:
    first = pieces[0]
    if first.kind == "bytes":
        return BytesStorageMetadata()
    if any((piece.kind, piece.whole) != (first.kind, first.whole) for piece in pieces):
        raise CheckpointError(f"`{name}` has pieces of different tensors", hint="load an older save.")
    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in pieces]
    return TensorStorageMetadata(TensorProperties(dtype=KINDS[first.kind]), torch.Size(first.whole), chunks)
