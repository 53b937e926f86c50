"""Which disk has lost what of a checkpoint, and can it be made whole again from the others?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from supernode.errors import CheckpointError
from supernode.schema.manifest import Manifest, Pack
from supernode.storing.disk import Bytes, Disk, Piece, Sink
from supernode.storing.manifests import MANIFEST, digest
from supernode.storing.saves import Saves
from supernode.storing.spread import LOST, Copies, Joined, Share, Shares, Spread, pack_of, shares_of

_PIECE = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something that a disk should have of a checkpoint and has not as it was written.

    Attributes:
        disk: its number.
        file: relative to the disk.
        what: `missing` or `damaged`.
    """

    disk: int
    file: str
    what: str


def gaps(saves: Saves, name: str, *, progress: Callable[[int], None] = lambda nbytes: None) -> list[Gap]:
    """Return all that is not as it was written on any disk, every byte compared.

    Args:
        progress: told the bytes of each file that was read.

    Raises:
        CheckpointError: no disk has the checkpoint's manifest.
    """
    manifest = saves.manifest(name)
    found = []
    for number, disk in enumerate(saves.disks):
        for file, whole in _expected(saves, name, manifest, number):
            size = disk.size(file)
            good = False
            if size >= 0:
                with suppress(OSError, ValueError):
                    good = whole(disk, file)
                progress(size)
            if not good:
                found.append(Gap(disk=number, file=file, what="missing" if size < 0 else "damaged"))
    return found


Whole = Callable[[Disk, str], bool]


def _expected(saves: Saves, name: str, manifest: Manifest, number: int) -> Iterator[tuple[str, Whole]]:
    """Yield the files that a disk should have, each with what tells whether it is whole."""

    def is_manifest(disk: Disk, file: str) -> bool:
        try:
            return Saves(Spread(disks=(disk,))).manifest(name) == manifest
        except CheckpointError:
            return False

    def is_part(wanted: tuple[int, str]) -> Whole:
        return lambda disk, file: disk.size(file) == wanted[0] and digest(disk.read(file)) == wanted[1]

    yield f"{name}/{MANIFEST}", is_manifest
    for file, wanted in manifest.files.items():
        yield f"{name}/{file}", is_part(wanted)
    for pack, entry in manifest.packs.items():
        if (spread := _spread_of(saves, entry)) is not None:
            for disk, file in spread.files(pack, home=entry.home):
                if disk == number:
                    yield file, _is_share(entry) if entry.parity else _is_pack(entry)


def _spread_of(saves: Saves, entry: Pack) -> Spread | None:
    """Return how a pack was spread; None where there were other disks then."""
    if entry.disks != len(saves.disks):
        return None
    return Spread(disks=saves.disks, copies=entry.copies, parity=entry.parity)


def _is_pack(entry: Pack) -> Whole:
    def is_whole(disk: Disk, file: str) -> bool:
        data, hasher = disk.opened(file), xxhash.xxh3_128()
        if len(data) != entry.nbytes:
            return False
        for piece in _pieces(data):
            hasher.update(piece)
        return hasher.hexdigest() == entry.digest

    return is_whole


def _pieces(data: Bytes) -> Iterator[memoryview]:
    """Yield all of a file, or as much of it as can be read."""
    for start in range(0, len(data), _PIECE):
        piece = memoryview(bytearray(min(_PIECE, len(data) - start)))
        if not data.fill(start, piece):
            return
        yield piece


def _is_share(entry: Pack) -> Whole:
    def is_whole(disk: Disk, file: str) -> bool:
        share = Share(disk, file)
        sane = (share.nbytes, share.count, share.number) == (entry.nbytes, entry.disks, int(file[-3:]))
        return sane and all(share.block(row) is not None for row in range(share.rows))

    return is_whole


def repair(saves: Saves, name: str, *, progress: Callable[[int], None] = lambda nbytes: None) -> list[Gap]:
    """Write again what disks have lost of a checkpoint; returns what was lost, nothing where all is whole.

    Raises:
        CheckpointError: some of it can be read from no disk; what can be is written all the same.
        MachineError: a disk is full.
    """
    found = gaps(saves, name, progress=progress)
    manifest = saves.manifest(name)
    lost: list[str] = []
    # The manifest comes last: before, the disk has no such checkpoint.
    small = sorted(
        (gap for gap in found if gap.file.startswith(f"{name}/")), key=lambda gap: gap.file.endswith(MANIFEST)
    )
    for gap in small:
        try:
            _again(saves, manifest, gap)
        except CheckpointError as error:
            lost.append(error.message)
    for pack in {_pack_name(gap.file) for gap in found if not gap.file.startswith(f"{name}/")}:
        mine = [gap for gap in found if _pack_name(gap.file) == pack]
        try:
            _pack_again(saves, pack, manifest.packs[pack], mine)
        except CheckpointError as error:
            lost.append(error.message)
    if lost:
        raise CheckpointError(f"{name} cannot be made whole: {lost[0]} ({len(lost)} such)", hint=LOST)
    return found


def _pack_name(file: str) -> str:
    folder, _, stem = file.rpartition("/")
    return f"{folder}/{pack_of(stem)}"


def _again(saves: Saves, manifest: Manifest, gap: Gap) -> None:
    """Write a manifest or part anew."""
    name, _, file = gap.file.partition("/")
    data = _small(saves, gap.file, *manifest.files.get(file, (-1, "")), manifest)
    sink = saves.disks[gap.disk].renew(gap.file)
    try:
        sink.add([data])
        sink.finish()
    finally:
        sink.drop()
    saves.disks[gap.disk].settle(name)


def _small(saves: Saves, file: str, size: int, wanted: str, manifest: Manifest) -> bytes:
    for disk in saves.disks:
        with suppress(OSError):
            data = disk.read(file)
            if size < 0:
                with suppress(CheckpointError):
                    if Saves(Spread(disks=(disk,))).manifest(file.partition("/")[0]) == manifest:
                        return data
            elif len(data) == size and digest(data) == wanted:
                return data
    raise CheckpointError(f"{file} is whole on no disk", hint=LOST)


def _pack_again(saves: Saves, pack: str, entry: Pack, mine: list[Gap]) -> None:
    """Write a pack, or those of its shares that are lost."""
    data = _whole(saves, pack, entry)
    spread = _spread_of(saves, entry)
    assert spread is not None
    wanted = {(gap.disk, gap.file) for gap in mine}
    files = spread.files(pack, home=entry.home)
    sinks: list[Sink] = [
        saves.disks[disk].renew(file) if (disk, file) in wanted else _Nowhere()
        for disk, file in files
    ]  # fmt: skip
    target: Sink = Shares(sinks, needed=entry.disks - entry.parity) if entry.parity else Copies(sinks)
    hasher = xxhash.xxh3_128()
    try:
        for piece in _pieces(data):
            hasher.update(piece)
            target.add([piece])
        if hasher.hexdigest() != entry.digest:
            raise CheckpointError(f"{pack} is whole on no disk", hint=LOST)
        target.finish()
    finally:
        target.drop()
    for disk_number in {gap.disk for gap in mine}:
        saves.disks[disk_number].settle(pack.rpartition("/")[0])


def _whole(saves: Saves, pack: str, entry: Pack) -> Bytes:
    """Return a pack from a disk that has it whole, or from its shares."""
    if entry.parity:
        return Joined(shares_of(saves.disks, pack)[0], pack)
    for disk in saves.disks:
        with suppress(OSError):
            if _is_pack(entry)(disk, pack):
                return disk.opened(pack)
    raise CheckpointError(f"{pack} is whole on no disk", hint=LOST)


class _Nowhere:
    """Where the shares go that need not be written."""

    def add(self, pieces: Iterable[Piece]) -> None:
        for _ in pieces:
            pass

    def finish(self) -> None:
        pass

    def drop(self) -> None:
        pass
