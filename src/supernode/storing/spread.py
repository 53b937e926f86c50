"""On which disks does a pack lie, and how is it read where some are gone? Copies, or shares of which a few may be lost.

A pack is written as a whole on one disk or several (`copies`), or cut into shares, one a disk, any `disks - parity` of
which give it back (Reed-Solomon, by zfec). A share is blocks in turn, each behind its digest, so a bad one is known.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import xxhash
import zfec

from supernode.errors import CheckpointError, SpecError, SupernodeError
from supernode.schema.manifest import Pack
from supernode.storing.disk import Disk, Folder, Piece, Sink
from supernode.storing.objects import Objects

BLOCK = 256 * 1024
"""Bytes of a share's block: large beside its digest, small beside a pack."""
_TAIL = struct.Struct("<8sIIIIQ")  # magic, shares needed, shares, number of this one, block, bytes of the pack
_MAGIC = b"snshare1"
_DIGEST = 16
_MOST_DISKS = 256  # of zfec, whose field has so many elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How packs lie on disks.

    Attributes:
        disks: of all nodes, in their order.
        copies: disks that hold the whole of each pack.
        parity: disks that may be lost where packs are shared out; 0 for copies.
    """

    disks: tuple[Disk, ...]
    copies: int = 1
    parity: int = 0

    def __post_init__(self) -> None:
        count = len(self.disks)
        if not 1 <= count <= _MOST_DISKS:
            raise SpecError(f"{count} disks", hint=f"set `checkpoint.disks` to 1 to {_MOST_DISKS} places.")
        if not 1 <= self.copies <= count:
            raise SpecError(
                f"`checkpoint.copies` is {self.copies}, and there are {count} disks",
                hint=f"set it to at most {count}, or name more `checkpoint.disks`.",
            )
        if self.parity and (self.copies > 1 or not 0 < self.parity < count):
            raise SpecError(
                f"`checkpoint.parity` is {self.parity}, with {count} disks and {self.copies} copies",
                hint=f"set it below {count} and `checkpoint.copies` to 1.",
            )

    @property
    def losses(self) -> int:
        """Disks that may be lost at once."""
        return self.parity or self.copies - 1

    def open(self, name: str, *, home: int) -> Sink:
        """Begin a pack whose writer's own disk is number `home`."""
        if self.parity:
            return Shares(self._opened(name, home), needed=len(self.disks) - self.parity)
        return Copies(self._opened(name, home))

    def _opened(self, name: str, home: int) -> list[Sink]:
        sinks: list[Sink] = []
        try:
            for disk, file in self.files(name, home=home):
                sinks.append(self.disks[disk].open(file))
        except SupernodeError:
            drop_all(sinks)
            raise
        return sinks

    def holders(self, home: int) -> list[int]:
        """Return the numbers of the disks that hold a pack or shares of it, in the order of the shares."""
        count = len(self.disks) if self.parity else self.copies
        return [(home + turn) % len(self.disks) for turn in range(count)]

    def holds(self, name: str, pack: Pack) -> bool:
        """Tell whether a pack lies as this spread would have it, all of it, as far as sizes tell."""
        if (pack.copies, pack.parity, pack.disks) != (self.copies, self.parity, len(self.disks)):
            return False
        size = share_bytes(pack.nbytes, len(self.disks) - self.parity) if self.parity else pack.nbytes
        return all(self.disks[disk].size(file) == size for disk, file in self.files(name, home=pack.home))

    def files(self, name: str, *, home: int) -> list[tuple[int, str]]:
        """Return (disk, file) of all that a pack is written as."""
        holders = self.holders(home)
        return [(disk, share_name(name, turn) if self.parity else name) for turn, disk in enumerate(holders)]


def share_bytes(nbytes: int, needed: int) -> int:
    """Return the bytes of each share of a pack."""
    return -(-nbytes // (BLOCK * needed)) * (BLOCK + _DIGEST) + _TAIL.size + _DIGEST


def share_name(pack: str, number: int) -> str:
    """Return the name of a share."""
    return f"{pack}.{number:03d}"


def pack_of(file: str) -> str:
    """Return the name of the pack that a file is or has a share of."""
    stem, _, number = file.rpartition(".")
    return stem if number.isascii() and number.isdigit() and stem.endswith(".pack") else file


def disk_of(where: str | Path) -> Disk:
    """Return the disk that a path or URL means; `file://` is a folder, which syncs and renames as stores do not."""
    text = str(where)
    if text.startswith("file://"):
        return Folder(Path(unquote(text.removeprefix("file://"))))
    return Objects(text) if "://" in text else Folder(Path(where))


class Copies:
    """A pack on several disks at once."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def add(self, pieces: Iterable[Piece]) -> None:
        held = pieces if len(self._sinks) == 1 else list(pieces)
        for sink in self._sinks:
            sink.add(held)

    def finish(self) -> None:
        for sink in self._sinks:
            sink.finish()

    def drop(self) -> None:
        drop_all(self._sinks)


class Shares:
    """A pack cut into shares, a row of blocks after another."""

    def __init__(self, sinks: Sequence[Sink], *, needed: int) -> None:
        self._sinks, self._needed = sinks, needed
        self._code = zfec.Encoder(needed, len(sinks))
        self._row = bytearray()
        self._bytes = 0

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            self._bytes += len(view)
            while len(view):
                room = BLOCK * self._needed - len(self._row)
                self._row += view[:room]
                view = view[room:]
                if len(self._row) == BLOCK * self._needed:
                    self._put()

    def _put(self) -> None:
        row = bytes(self._row).ljust(BLOCK * self._needed, b"\0")
        self._row.clear()
        blocks = self._code.encode([row[start : start + BLOCK] for start in range(0, len(row), BLOCK)])
        for sink, block in zip(self._sinks, blocks, strict=True):
            sink.add([xxhash.xxh3_128_digest(block), block])

    def finish(self) -> None:
        if self._row:
            self._put()
        for number, sink in enumerate(self._sinks):
            tail = _TAIL.pack(_MAGIC, self._needed, len(self._sinks), number, BLOCK, self._bytes)
            sink.add([tail, xxhash.xxh3_128_digest(tail)])
            sink.finish()

    def drop(self) -> None:
        drop_all(self._sinks)


class Share:
    """A share on its disk, read block by block.

    Raises:
        ValueError: it is none; OSError where it cannot be read.
    """

    def __init__(self, disk: Disk, name: str) -> None:
        self._file = disk.opened(name)
        tail = memoryview(bytearray(_TAIL.size + _DIGEST))
        start = len(self._file) - len(tail)
        whole = start >= 0 and self._file.fill(start, tail)
        if not whole or xxhash.xxh3_128_digest(tail[: _TAIL.size]) != tail[_TAIL.size :]:
            raise ValueError("its end is not what was written")
        magic, self.needed, self.count, self.number, block, self.nbytes = _TAIL.unpack(tail[: _TAIL.size])
        self.rows = -(-self.nbytes // (BLOCK * max(self.needed, 1)))
        expected = share_bytes(self.nbytes, max(self.needed, 1))
        sane = magic == _MAGIC and block == BLOCK and 1 <= self.needed <= self.count <= _MOST_DISKS
        if not sane or not 0 <= self.number < self.count or len(self._file) != expected:
            raise ValueError("it is no share")

    def block(self, row: int) -> memoryview | None:
        """Return a block, or None where it is not what was written."""
        room = memoryview(bytearray(_DIGEST + BLOCK))
        try:
            whole = self._file.fill(row * len(room), room)
        except OSError:
            return None
        return room[_DIGEST:] if whole and xxhash.xxh3_128_digest(room[_DIGEST:]) == room[:_DIGEST] else None


def shares_of(disks: Sequence[Disk], pack: str) -> tuple[dict[int, Share], set[tuple[str, str]]]:
    """Return a pack's shares by number, and (disk, file) of those that cannot be read."""
    found: dict[int, Share] = {}
    bad: set[tuple[str, str]] = set()
    folder, _, stem = pack.rpartition("/")
    for disk in disks:
        for file in disk.names(folder):
            if pack_of(file) == stem and file != stem:
                try:
                    share = Share(disk, f"{folder}/{file}")
                    found.setdefault(share.number, share)
                except (OSError, ValueError):
                    bad.add((disk.where, f"{folder}/{file}"))
    return found, bad


class Joined:
    """A pack that lies in shares, read as if it were a file; rows are put together as they are needed.

    Raises:
        CheckpointError: the shares do not fit one another.
    """

    def __init__(self, shares: dict[int, Share], pack: str) -> None:
        kinds = {(share.needed, share.count, share.nbytes) for share in shares.values()}
        if len(kinds) != 1:
            raise CheckpointError(f"{pack} is lost: it has no shares that fit one another", hint=LOST)
        self._shares, self._pack = shares, pack
        self._needed, self._count, self._nbytes = (int(number) for number in kinds.pop())
        self._decoder = zfec.Decoder(self._needed, self._count)
        self._last: tuple[int, memoryview] = -1, memoryview(b"")

    def __len__(self) -> int:
        return self._nbytes

    def fill(self, start: int, into: memoryview) -> bool:
        """Put rows together; tells whether enough of their blocks are whole."""
        if start + len(into) > self._nbytes:
            return False
        size = BLOCK * self._needed
        while len(into):
            row = start // size
            if self._last[0] != row:
                data = self._joined(row)
                if data is None:
                    return False
                self._last = row, memoryview(data)
            found = self._last[1][start - row * size :][: len(into)]
            into[: len(found)] = found
            into, start = into[len(found) :], start + len(found)
        return True

    def _joined(self, row: int) -> bytes | None:
        blocks: dict[int, memoryview] = {}
        for number in sorted(self._shares):
            if len(blocks) < self._needed and (block := self._shares[number].block(row)) is not None:
                blocks[number] = block
        if len(blocks) < self._needed:
            return None
        if max(blocks) < self._needed:  # The first shares are the pack itself.
            return b"".join(blocks[number] for number in range(self._needed))
        # The decoder wants each share below `needed` at its own place.
        order = [number for number in blocks if number >= self._needed]
        placed = [number if number in blocks else order.pop() for number in range(self._needed)]
        return b"".join(self._decoder.decode([bytes(blocks[number]) for number in placed], placed))


LOST = "bring back a disk that is missing, or resume from an older checkpoint with `--checkpoint`."


def drop_all(sinks: Iterable[Sink]) -> None:
    """Let go of all, whatever trouble the disks are in."""
    for sink in sinks:
        with suppress(OSError, SupernodeError):
            sink.drop()
