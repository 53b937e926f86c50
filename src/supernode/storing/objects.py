"""An object store as a node's disk: a bucket, or whatever else fsspec knows. Nothing is renamed there."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from supernode.errors import CheckpointError, MachineError
from supernode.storing.disk import Bytes, Piece, Sink, explained

_BLOCK = 4 * 2**20
"""Bytes that are got at once."""


class Objects:
    """A bucket or any other store that fsspec knows, as a node's disk. Nothing is renamed: manifests are put last.

    Args:
        url: such as `s3://bucket/run`; what it needs (s3fs, gcsfs) is the user's to install.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MachineError(
                "fsspec is not installed, and a disk that is a URL needs it",
                hint="install it with `pip install 'supernode-sdk[objects]'`.",
            ) from error
        try:
            self._store, root = url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            raise MachineError(f"{url} cannot be opened: {error}", hint="correct `checkpoint.disks`.") from error
        self._root, self.where = str(root).rstrip("/"), url

    def open(self, name: str) -> Sink:
        """Begin an object; a store shows it whole or not at all."""
        try:
            return _ObjectSink(self._store.open(self._inside(name), "wb"), self.where)
        except OSError as error:
            raise explained(error, self.where) from error

    def renew(self, name: str) -> Sink:
        """Begin an object; the one before stays until this one is whole."""
        return self.open(name)

    def publish(self, draft: str, final: str) -> None:
        """Copy the objects to their names, the manifest last; then let the draft go."""
        last = "manifest.json"
        names = [name for name in self.names(draft) if name != last]
        try:
            for name in (*names, last):
                self._store.copy(self._inside(f"{draft}/{name}"), self._inside(f"{final}/{name}"))
        except OSError as error:
            raise explained(error, self.where) from error
        self.delete(draft)

    def settle(self, folder: str) -> None:
        """Nothing is to be done: what is put is durable."""

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        """Get."""
        end = None if count is None else start + count
        found: Any = self._store.cat_file(self._inside(name), start=start, end=end)
        return bytes(found)

    def size(self, name: str) -> int:
        """Look."""
        try:
            return int(self._store.size(self._inside(name)))
        except (OSError, TypeError):
            return -1

    def names(self, folder: str) -> list[str]:
        """List."""
        try:
            found = self._store.ls(self._inside(folder), detail=False, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({str(entry).rstrip("/").rpartition("/")[2] for entry in found} - {""})

    def delete(self, name: str) -> None:
        """Delete the manifest first, so that half of a checkpoint is none."""
        place = self._inside(name)
        try:
            if self._store.exists(f"{place}/manifest.json"):
                self._store.rm_file(f"{place}/manifest.json")
            if self._store.exists(place):
                self._store.rm(place, recursive=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise explained(error, self.where) from error

    def opened(self, name: str) -> Bytes:
        """Look how large it is; its bytes are got when they are asked for."""
        return _Far(self, name)

    def _inside(self, name: str) -> str:
        if any(part in ("", ".", "..") for part in name.split("/")) and name:
            raise CheckpointError(f"{name!r} is no name of an object in {self.where}", hint="verify the checkpoint.")
        return f"{self._root}/{name}" if name else self._root


class _Far:
    """An object, got in large blocks: chunks that are asked for in turn lie one behind the other."""

    def __init__(self, disk: Objects, name: str) -> None:
        self._disk, self._name, self._nbytes = disk, name, disk.size(name)
        self._start, self._block = 0, memoryview(b"")
        if self._nbytes < 0:
            raise FileNotFoundError(name)

    def __len__(self) -> int:
        return self._nbytes

    def fill(self, start: int, into: memoryview) -> bool:
        """Get what is not in the block that was got last."""
        if start + len(into) > self._nbytes:
            return False
        if len(into) >= _BLOCK:
            data = self._disk.read(self._name, start, len(into))
            into[: len(data)] = data
            return len(data) == len(into)
        if not (self._start <= start and start + len(into) <= self._start + len(self._block)):
            self._start = start
            self._block = memoryview(self._disk.read(self._name, start, min(_BLOCK, self._nbytes - start)))
        found = self._block[start - self._start : start - self._start + len(into)]
        into[: len(found)] = found
        return len(found) == len(into)


class _ObjectSink:
    """An object while it is put."""

    def __init__(self, file: Any, where: str) -> None:
        self._file, self._where = file, where

    def add(self, pieces: Iterable[Piece]) -> None:
        """Hand over; the store may send it later."""
        try:
            for piece in pieces:
                self._file.write(piece)
        except OSError as error:
            raise explained(error, self._where) from error

    def finish(self) -> None:
        """Send the rest."""
        try:
            self._file.close()
        except OSError as error:
            raise explained(error, self._where) from error
        self._file = None

    def drop(self) -> None:
        """Let go of what was not sent."""
        if self._file is not None:
            discard = getattr(self._file, "discard", None)
            with suppress(OSError):
                discard() if discard is not None else self._file.close()
