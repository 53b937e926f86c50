"""The power goes at every call that changes a disk: what was acknowledged is there afterwards, what was not may be."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.storing.conftest import Writer, read, save

from supernode.storing.chunks import CHUNK
from supernode.storing.disk import DOOMED, Folder
from supernode.storing.manifests import MANIFEST
from supernode.storing.mending import repair
from supernode.storing.saves import Saves, name_of
from supernode.storing.spread import BLOCK, Spread
from supernode.storing.system import System

VARIANTS = 4
"""Random states that a disk may be left in, besides the one in which nothing unsynced is left and the one with all."""


@dataclass
class File:
    """What a file holds now, and what of it is on the disk for certain."""

    now: bytes = b""
    synced: bytes = b""


@dataclass
class Call:
    """A call that changed names: `undo`ne after a power cut unless a folder that it touched was synced since."""

    what: str
    path: str
    other: str = ""
    file: File | None = None
    durable: bool = False


@dataclass
class Disk(System):
    """Does what the kernel does, and remembers in which order, so that a power cut after any call can be acted out."""

    root: Path = Path()
    calls: list[Call] = field(default_factory=list)
    files: dict[int, File] = field(default_factory=dict)
    cuts: list[tuple[str, list[tuple[Call, bool, bytes, bytes]]]] = field(default_factory=list)
    watching: bool = True

    def _cut(self, what: str) -> None:
        """Keep what a power cut right here would have to work on."""
        if self.watching:
            state = [
                (call, call.durable, call.file.synced if call.file else b"", call.file.now if call.file else b"")
                for call in self.calls
            ]
            self.cuts.append((what, state))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self.files[descriptor] = File()
        self.calls.append(Call("create", str(path), file=self.files[descriptor]))
        self._cut(f"create {path.name}")
        return descriptor

    def write(self, descriptor: int, batch: Sequence[memoryview]) -> int:
        half = [batch[0][: max(1, len(batch[0]) // 2)]]  # As a kernel may, so that a cut falls between.
        taken = super().write(descriptor, half)
        self.files[descriptor].now += bytes(half[0][:taken])
        self._cut("write")
        return taken

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.files[descriptor].synced = self.files[descriptor].now
        self._cut("sync")

    def make(self, path: Path) -> None:
        super().make(path)
        self.calls.append(Call("make", str(path)))
        self._cut(f"make {path.name}")

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.calls.append(Call("rename", str(source), str(target)))
        self._cut(f"rename {target.name}")

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.calls.append(Call("remove", str(path)))
        self._cut(f"remove {path.name}")

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.calls.append(Call("remove_folder", str(path)))

    def sync_names(self, path: Path) -> None:
        super().sync_names(path)
        for call in self.calls:
            call.durable = call.durable or str(path) in (str(Path(call.path).parent), str(Path(call.other).parent))
        self._cut(f"sync {path.name}")


def act_out(state: list[tuple[Call, bool, bytes, bytes]], root: Path, into: Path, draw: random.Random | None) -> None:
    """Make a folder as a disk may be after a power cut.

    Args:
        draw: which unsynced names and how much of unsynced files survive; None: nothing of them.
    """
    into.mkdir()

    def there(path: str) -> Path:
        return into / Path(path).relative_to(root)

    for call, durable, synced, now in state:
        if not durable and (draw is None or draw.random() < 0.5):
            continue
        place = there(call.path)
        if call.what == "make" and place.parent.is_dir():
            place.mkdir(exist_ok=True)
        elif call.what == "create" and place.parent.is_dir():
            kept = now[: draw.randint(len(synced), len(now))] if draw is not None else synced
            if draw is not None and draw.random() < 0.3:
                kept = kept.ljust(len(now), b"\0")  # Its size was on the disk, and what it holds was not.
            place.write_bytes(kept)
        elif call.what == "rename" and place.exists():
            target = there(call.other)
            if target.is_dir() and any(target.iterdir()):
                continue  # The kernel would not have done that either.
            place.replace(target)
        elif call.what == "remove":
            place.unlink(missing_ok=True)
        elif call.what == "remove_folder" and place.is_dir() and not any(place.iterdir()):
            place.rmdir()


@pytest.mark.parametrize(("disks", "copies", "parity"), [(1, 1, 0), (2, 2, 0), (3, 1, 1)])
def test_power_cuts_between_all_calls_of_saves_and_deletions(
    tmp_path: Path, disks: int, copies: int, parity: int
) -> None:
    roots = [tmp_path / f"disk{number}" for number in range(disks)]
    for root in roots:
        root.mkdir()
    system = Disk(root=tmp_path)
    where = Saves(Spread(disks=tuple(Folder(root, system) for root in roots), copies=copies, parity=parity))
    writers = [Writer(number, {"a": CHUNK + 3, "b": 9}) for number in range(2 if disks == 1 else 1)]
    for root in roots:
        system.calls.append(Call("make", str(root), durable=True))
    versions: dict[int, list[dict[str, bytes]]] = {}
    promises: list[tuple[int, dict[int, int]]] = [(0, {})]  # (cuts before it, least version by step from there on)

    for step in (1, 2, 2, 3) if not parity else (1, 1, 2):  # One is saved twice, as after going on from before it.
        for writer in writers:
            writer.change("a", step, 5)
        versions.setdefault(step, []).append({name: v for writer in writers for name, v in writer.values.items()})
        save(where, step, writers)
        kept = sorted((promises[-1][1] | {step: len(versions[step]) - 1}).items())[-1 if parity else -2 :]
        promises.append((len(system.cuts), dict(kept)))
        where.prune(keep=2 if not parity else 1, newest=step)
    system.watching = False

    draw, looked = random.Random(5), 0
    for number, (what, state) in enumerate(system.cuts):
        # What is no longer kept may be there or not; it was promised before, and not half of it may be left.
        promised = [kept for at, kept in promises if at <= number][-1]
        for variant in range(1 + VARIANTS // disks):
            after = tmp_path / "after"
            act_out(state, tmp_path, after, draw if variant else None)
            there = Saves(
                Spread(disks=tuple(Folder(after / root.name) for root in roots), copies=copies, parity=parity)
            )
            there.sweep()
            found = {step for step, _ in there.all()}
            assert promised.keys() <= found, (number, what, variant)
            for step in found:  # What bears a checkpoint's name is whole, acknowledged or not.
                assert read(there, step) in versions[step][promised.get(step, 0) :], (number, what, variant, step)
            if promised and (copies > 1 or parity):  # And any disk may be lost on top.
                shutil.rmtree(after / roots[number % disks].name)
                for step, least in promised.items():
                    assert read(there, step) in versions[step][least:], (number, what, variant, step)
            looked += 1
            shutil.rmtree(after)
    assert looked > 150


def test_power_cuts_while_a_disk_is_made_whole_again_lose_nothing_that_could_be_read(tmp_path: Path) -> None:
    roots = [tmp_path / f"disk{number}" for number in range(3)]
    good = Saves(Spread(disks=tuple(Folder(root) for root in roots), parity=1))
    writer = Writer(0, {"a": 3 * BLOCK, "b": 9})
    save(good, 1, [writer])
    for number, at in ((0, 40), (1, BLOCK + 40)):  # Two shares are damaged, each in another row.
        share = next((roots[number] / "packs").iterdir())
        data = bytearray(share.read_bytes())
        data[at] ^= 1
        share.write_bytes(data)
    (roots[2] / name_of(1) / "part-0000").unlink()
    (roots[0] / name_of(1) / MANIFEST).unlink()
    system = Disk(root=tmp_path)
    for path in sorted(path for root in roots for path in (root, *root.rglob("*"))):
        data = b"" if path.is_dir() else path.read_bytes()
        what, file = ("make", None) if path.is_dir() else ("create", File(now=data, synced=data))
        system.calls.append(Call(what, str(path), file=file, durable=True))

    assert len(repair(Saves(Spread(disks=tuple(Folder(root, system) for root in roots), parity=1)), name_of(1))) == 4

    draw = random.Random(6)
    for number, (what, state) in enumerate(system.cuts):
        for variant in range(2):
            after = tmp_path / "after"
            act_out(state, tmp_path, after, draw if variant else None)
            there = Saves(Spread(disks=tuple(Folder(after / root.name) for root in roots), parity=1))
            there.sweep()
            assert read(there, 1) == writer.values, (number, what, variant)
            repair(there, name_of(1))
            assert repair(there, name_of(1)) == []
            assert not [path for path in after.rglob("*") if path.name.startswith(DOOMED)]
            shutil.rmtree(after)
    assert len(system.cuts) > 12
