"""How does a file come to be whole, or not at all? Written beside its place under a name of its own, then renamed."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from supernode.errors import RunError, SpecError

DRAFT = ".draft-"
"""How the name of a file begins that is still being written; short, so that it fits where the final one does."""
LONGEST_NAME = 60
"""Characters of a lock's name: within 255 bytes in any script. Two files that share them share the lock."""
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}


def write_whole(path: Path, text: str) -> None:
    """Write a file so that its name never stands for half of it; a symbolic link goes on pointing where it did.

    Raises:
        SpecError: what bears the name is no regular file; it stays.
        OSError: it cannot be written; what bore the name before still does.
    """
    write_all({path: text})


def write_all(files: Mapping[Path, str]) -> None:
    """Write files that belong together: none gets its name before all are on the disk.

    Raises:
        SpecError: what bears one of the names is no regular file.
        OSError: one cannot be written.
    """
    targets = {_target(path): text.encode() for path, text in files.items()}
    drafts: dict[Path, Path] = {}
    try:
        for target, content in targets.items():
            drafts[target] = _draft(target, content)
        for target, draft in drafts.items():
            os.replace(draft, target)
    finally:
        for draft in drafts.values():
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def write_new(path: Path, text: str) -> None:
    """Write a file whose name is free; of two who write it at once, one does.

    Raises:
        FileExistsError: something bears the name, be it a link that points nowhere.
        OSError: it cannot be written; then the name stays free.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    draft = _draft(path, text.encode())
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # A file system without hard links cannot tell who was first.
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Find out whether `write_whole` could write here, by making a draft and removing it.

    Raises:
        SpecError: what bears the name is no regular file.
        OSError: it could not.
    """
    _draft(_target(path), b"\n").unlink()


@contextmanager
def alone(path: Path, *, hint: str) -> Iterator[None]:
    """Be the only process that makes this file, until it is made. The lock is the kernel's and ends with its holder.

    Args:
        hint: what a second one should do.

    Raises:
        SpecError: what bears the name is no regular file.
        RunError: another process is making it.
        OSError: no lock can be had beside the file.
    """
    target = _target(path)
    lock = target.with_name(f".lock-{target.name}"[:LONGEST_NAME])
    descriptor = _locked(lock)
    if descriptor < 0:
        raise RunError(f"another process is making {path}", hint=hint)
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _locked(lock: Path) -> int:
    """Return the descriptor of a lock that is taken now; -1 where another process has it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before removes the file; who took the removed one holds nothing.
            if lock.exists() and os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return -1
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _target(path: Path) -> Path:
    """Return where a path leads, links followed; nothing else than a regular file may be there."""
    target = Path(os.path.realpath(path))
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "device")
        raise SpecError(f"cannot write {path}, which is a {kind}", hint="name a file, or move it away.")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return target


def _draft(target: Path, content: bytes) -> Path:
    """Return a new file beside `target` that holds the content on disk and has the rights of what is replaced."""
    draft = target.with_name(f"{DRAFT}{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
            with suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return draft
