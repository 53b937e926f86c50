"""Which calls change what a disk holds? All go through here, so that a test can cut the power between any two."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class System:
    """The calls as the kernel has them; what they change is durable only once it is synced."""

    def create(self, path: Path) -> int:
        """Make a file, or empty one, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, batch: Sequence[memoryview]) -> int:
        """Write some of it; returns the bytes that were taken."""
        return os.writev(descriptor, batch)

    def sync(self, descriptor: int) -> None:
        """Return once what the file holds is on the disk; its name may not be."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def make(self, path: Path) -> None:
        """Make a folder where there is none."""
        path.mkdir(exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name, at once."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Delete an empty folder."""
        os.rmdir(path)

    def sync_names(self, path: Path) -> None:
        """Return once the names in a folder are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
