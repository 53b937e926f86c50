"""What does the product do to a disk? The few calls, each durable when it returns, over folders and object stores."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from supernode.errors import CheckpointError, MachineError
from supernode.storing.system import System

Piece = bytes | bytearray | memoryview
DOOMED = ".doomed-"
"""Begins the name of a folder that is being deleted, or of a file that is not whole yet."""
_VECTORS = 512
"""Pieces in one write; the kernel takes 1,024 (IOV_MAX)."""


class Sink(Protocol):
    """A file that is being written."""

    def add(self, pieces: Iterable[Piece]) -> None:
        """Write more of it."""

    def finish(self) -> None:
        """Return once all of it is durable."""

    def drop(self) -> None:
        """Delete what there is of it; nothing happens where it is finished."""


class Bytes(Protocol):
    """A file's bytes, or what stands for one."""

    def __len__(self) -> int: ...

    def fill(self, start: int, into: memoryview) -> bool:
        """Fill memory with bytes from `start` on; tells whether there were as many. Raises OSError."""


class Disk(Protocol):
    """Where a node keeps files by relative name, `/` between folders.

    Attributes:
        where: what people call it: a path or a URL.
    """

    where: str

    def open(self, name: str) -> Sink:
        """Begin a file. What it holds is durable once it is finished, its name once its folder is settled or published.

        Raises, as its sink does:
            MachineError: the disk is full.
            CheckpointError: it cannot be written for another reason.
        """

    def renew(self, name: str) -> Sink:
        """Begin a file that takes the place of what bears its name, durably and at once, when it is finished."""

    def publish(self, draft: str, final: str) -> None:
        """Give a folder its name, durably and at once: after a loss of power it bears the one or the other."""

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        """Return bytes of a file; fewer than asked for where it ends. Raises FileNotFoundError or OSError."""

    def size(self, name: str) -> int:
        """Return a file's bytes, or -1 where there is none."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none where there is no such folder."""

    def settle(self, folder: str) -> None:
        """See that the names in a folder are durable."""

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that it holds; one that is not there is no matter."""

    def opened(self, name: str) -> Bytes:
        """Return a file to read from in any order. Raises FileNotFoundError or OSError."""


class Folder:
    """A folder of this computer as a node's disk.

    Args:
        system: the calls that change it.
    """

    def __init__(self, root: Path, system: System | None = None) -> None:
        self.root, self.where, self.system = root, str(root), system or System()

    def open(self, name: str) -> Sink:
        """Make the file, and the folders above it that are missing."""
        target = self._inside(name)
        try:
            self._make(target.parent)
            return _FileSink(self, target, self.system.create(target))
        except OSError as error:
            raise explained(error, self.where) from error

    def renew(self, name: str) -> Sink:
        """Write beside it, and rename."""
        target = self._inside(name)
        draft = target.with_name(f"{DOOMED}{target.name}")
        try:
            self._make(target.parent)
            return _FileSink(self, draft, self.system.create(draft), target)
        except OSError as error:
            raise explained(error, self.where) from error

    def publish(self, draft: str, final: str) -> None:
        """Rename, between two syncs: of the names inside, and of the name itself."""
        source, target = self._inside(draft), self._inside(final)
        try:
            self.system.sync_names(source)
            self.system.rename(source, target)
            self.system.sync_names(target.parent)
        except OSError as error:
            raise explained(error, self.where) from error

    def settle(self, folder: str) -> None:
        """Sync the folder and those above it, up to the root's own name."""
        place = self._inside(folder)
        try:
            while not place.exists() and place != self.root:
                place = place.parent
            self.system.sync_names(place)
            while place != self.root:
                place = place.parent
                self.system.sync_names(place)
            self.system.sync_names(self.root.parent)
        except OSError as error:
            raise explained(error, self.where) from error

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        """Read."""
        with self._inside(name).open("rb") as file:
            file.seek(start)
            return file.read() if count is None else file.read(count)

    def size(self, name: str) -> int:
        """Look."""
        try:
            return self._inside(name).stat().st_size
        except OSError:
            return -1

    def names(self, folder: str) -> list[str]:
        """List."""
        try:
            return sorted(os.listdir(self._inside(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, name: str) -> None:
        """Delete a folder under another name first, so that half of it never bears a whole one's."""
        target = self._inside(name)
        try:
            if target.is_dir() and not target.is_symlink():
                doomed = target.with_name(f"{DOOMED}{target.name}")
                self._remove_all(doomed)
                self.system.rename(target, doomed)
                self.system.sync_names(target.parent)
                self._remove_all(doomed)
            else:
                self.system.remove(target)
        except FileNotFoundError:
            return
        except OSError as error:
            raise explained(error, self.where) from error

    def opened(self, name: str) -> Bytes:
        """Open."""
        return _Near(self._inside(name))

    def _make(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make(folder.parent)
        self.system.make(folder)

    def _remove_all(self, folder: Path) -> None:
        """Delete a folder and what it holds; links in it are deleted, not followed."""
        if not folder.is_dir() or folder.is_symlink():
            return
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self._remove_all(entry)
            else:
                self.system.remove(entry)
        self.system.remove_folder(folder)

    def _inside(self, name: str) -> Path:
        """Return the path of a name, which may come from a damaged file: it must stay inside."""
        parts = name.split("/") if name else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise CheckpointError(f"{name!r} is no name of a file in {self.where}", hint="verify the checkpoint.")
        return self.root.joinpath(*parts)


class _Near:
    """A file of this computer. It is not mapped: a page that a disk fails to give would end the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._nbytes = os.fstat(self._descriptor).st_size

    def __len__(self) -> int:
        return self._nbytes

    def fill(self, start: int, into: memoryview) -> bool:
        """Read, however little the kernel gives at once."""
        if start + len(into) > self._nbytes:
            return False
        while len(into):
            taken = os.preadv(self._descriptor, [into], start)
            if taken <= 0:
                return False
            into, start = into[taken:], start + taken
        return True


class _FileSink:
    """A file of a folder while it is written."""

    def __init__(self, disk: Folder, target: Path, descriptor: int, final: Path | None = None) -> None:
        self._disk, self._target, self._descriptor, self._final = disk, target, descriptor, final

    def add(self, pieces: Iterable[Piece]) -> None:
        """Write, however little the kernel takes at once."""
        try:
            for batch in _batches(pieces):
                self._write(batch)
        except OSError as error:
            raise explained(error, self._disk.where) from error

    def _write(self, batch: list[memoryview]) -> None:
        while batch:
            taken = self._disk.system.write(self._descriptor, batch)
            while batch and taken >= len(batch[0]):
                taken -= len(batch.pop(0))
            if batch:
                batch[0] = batch[0][taken:]

    def finish(self) -> None:
        """Sync and close; and give it its name, if it has another so far."""
        try:
            self._disk.system.sync(self._descriptor)
            if self._final is not None:
                self._disk.system.rename(self._target, self._final)
                self._disk.system.sync_names(self._final.parent)
        except OSError as error:
            raise explained(error, self._disk.where) from error
        self._disk.system.close(self._descriptor)
        self._descriptor = -1

    def drop(self) -> None:
        """Close and delete."""
        if self._descriptor < 0:
            return
        self._disk.system.close(self._descriptor)
        self._descriptor = -1
        with suppress(OSError):
            self._disk.system.remove(self._target)


def write_file(disk: Disk, name: str, data: bytes) -> None:
    """Write a small file whole."""
    sink = disk.open(name)
    try:
        sink.add([data])
        sink.finish()
    finally:
        sink.drop()


def explained(error: OSError, where: str) -> MachineError | CheckpointError:
    """Return the error to raise: a full disk told as such, other trouble as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f" ({shutil.disk_usage(where).free} bytes free)"
        except OSError:
            free = ""
        return MachineError(
            f"the disk of {where} is full{free}; the checkpoint was not written",
            hint="free some space or lower `checkpoint.keep`, then `supernode resume`; earlier checkpoints are whole.",
        )
    return CheckpointError(
        f"{where}: {error.strerror or error}", hint="see that its disk is there and can be written and read."
    )


def _batches(pieces: Iterable[Piece]) -> Iterable[list[memoryview]]:
    batch: list[memoryview] = []
    for piece in pieces:
        view = memoryview(piece).cast("B")
        if len(view):
            batch.append(view)
        if len(batch) == _VECTORS:
            yield batch
            batch = []
    if batch:
        yield batch
