"""Which checkpoints lie on a run's disks, which can be trusted, and which packs may go? Loads no torch.

A checkpoint is a folder `step-00000050` with a manifest and a part for each writer; what they name lies in packs beside
it. It is written under another name and renamed once all of it is durable, so what bears the name is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from supernode.errors import CheckpointError, SupernodeError
from supernode.schema.lasting import CheckpointSpec
from supernode.schema.manifest import Manifest, Pack
from supernode.storing.disk import DOOMED, Disk, explained, write_file
from supernode.storing.manifests import MANIFEST, digest, manifest_bytes, read_manifest
from supernode.storing.pack import PACKS, Before, pack_name, write_pack
from supernode.storing.part import Part, Piece, read_part
from supernode.storing.reading import Packs
from supernode.storing.spread import Spread, disk_of, pack_of

DRAFT = ".draft-"
ASIDE = "aside-"
OLD = ".old-"
"""Begins the name of a checkpoint while another of the same step takes its place."""
OWNER = "owner"
"""Name of the file that says whose checkpoints a disk holds."""
_MOST_PART_BYTES = 2**33


def saves_of(spec: CheckpointSpec, folder: Path) -> Saves:
    """Return the checkpoints of a run.

    Args:
        folder: the run's own for them: the only disk where none is named, and where relative ones begin.
    """
    places = [place if "://" in place else folder / place for place in spec.disks] or [folder]
    return Saves(Spread(disks=tuple(map(disk_of, places)), copies=spec.copies, parity=spec.parity))


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step that a folder name stands for, or -1 if it is no checkpoint's name."""
    digits = name.removeprefix("step-")
    return int(digits) if name.startswith("step-") and digits.isascii() and digits.isdigit() else -1


def part_name(writer: int) -> str:
    """Return the file name of a writer's part."""
    return f"part-{writer:04d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One writer's share of a save, once it is durable.

    Attributes:
        part: size and digest of its part.
        packs: those that it points into.
        nbytes: written anew.
    """

    writer: int
    part: tuple[int, str]
    packs: Mapping[str, Pack]
    nbytes: int


class Saves:
    """All checkpoints of a run, over its disks; each disk has manifests and parts of all, and packs of some."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread

    @property
    def disks(self) -> tuple[Disk, ...]:
        """All disks; the first is asked first."""
        return self.spread.disks

    def all(self) -> list[tuple[int, str]]:
        """Return (step, name) of the checkpoints that any disk has, oldest first."""
        names = {name for disk in self.disks for name in disk.names("") if step_of(name) >= 0}
        return sorted((step_of(name), name) for name in names)

    def store(
        self, step: int, writer: int, stream: memoryview, pieces: tuple[Piece, ...], *, home: int = 0,
        before: Before | None = None, compress: bool = True, pace: Callable[[int], None] = lambda nbytes: None,
    ) -> tuple[Stored, Part]:  # fmt: skip
        """Write what is new of a writer's stream, and its part into the draft of a step on every disk.

        Args: as of `write_pack`.
        """
        name = pack_name(step, writer)
        part, packs = write_pack(
            self.spread, name, stream, pieces, home=home, before=before, compress=compress, pace=pace
        )
        data = part.to_bytes()
        for disk in self.disks:
            write_file(disk, f"{DRAFT}{name_of(step)}/{part_name(writer)}", data)
        nbytes = packs[name].nbytes if name in packs else 0
        return Stored(writer=writer, part=(len(data), digest(data)), packs=packs, nbytes=nbytes), part

    def commit(self, manifest: Manifest, stored: Iterable[Stored]) -> Manifest:
        """Give the draft of a step its name on every disk, durably; returns the manifest as it is written.

        Raises:
            CheckpointError, MachineError: a disk failed; those before it have the checkpoint, which is whole there.
        """
        stored = list(stored)
        packs = {name: pack for one in stored for name, pack in one.packs.items()}
        manifest = replace(manifest, files={part_name(one.writer): one.part for one in stored}, packs=packs)
        name = name_of(manifest.step)
        data = manifest_bytes(manifest)
        for disk in self.disks:
            write_file(disk, f"{DRAFT}{name}/{MANIFEST}", data)
            disk.settle(PACKS)
        for disk in self.disks:
            replaced = disk.size(f"{name}/{MANIFEST}") >= 0
            if replaced:
                disk.delete(f"{OLD}{name}")
                disk.publish(name, f"{OLD}{name}")
            disk.publish(f"{DRAFT}{name}", name)
            if replaced:
                disk.delete(f"{OLD}{name}")
        return manifest

    def drop_draft(self, step: int) -> None:
        """Delete what there is of a save that was given up, as far as the disks let it."""
        with suppress(SupernodeError):
            for disk in self.disks:
                disk.delete(f"{DRAFT}{name_of(step)}")
            self.collect(lambda of: of == step)

    def before(self, name: str, manifest: Manifest, writer: int) -> Before | None:
        """Return what a writer's next save can build on; None where it did not write then.

        Raises:
            CheckpointError: its part is lost.
        """
        if part_name(writer) not in manifest.files:
            return None
        part = self.part(name, manifest, writer)
        return Before(part=part, packs={pack: manifest.packs[pack] for pack in part.packs})

    def claim(self, owner: str) -> None:
        """Take the disks for one run: another one's checkpoints would bear the same names.

        Args:
            owner: what no other run is called.

        Raises:
            CheckpointError: a disk is another run's.
        """
        for disk in self.disks:
            try:
                found = disk.read(OWNER).decode(errors="replace").strip()
            except FileNotFoundError:
                found = ""
            except OSError as error:
                raise explained(error, disk.where) from error
            taken = any(step_of(name) >= 0 or name.startswith(ASIDE) for name in disk.names(""))
            if found and found != owner and taken:
                raise CheckpointError(
                    f"{disk.where} holds the checkpoints of another run",
                    hint="name a folder of its own for each run in `checkpoint.disks`, such as DISK/NAME.",
                )
            if found != owner:
                sink = disk.renew(OWNER)
                try:
                    sink.add([owner.encode()])
                    sink.finish()
                finally:
                    sink.drop()

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest, from the first disk whose copy is whole.

        Raises:
            CheckpointError: there is none.
        """
        trouble: SupernodeError | None = None
        for disk in self.disks:
            try:
                found = read_manifest(disk, name)
                if step_of(name) < 0 or name_of(found.step) == name:
                    return found
                raise CheckpointError(
                    f"{disk.where}/{name}/{MANIFEST} is of step {found.step}, unlike its folder's name",
                    hint="give the folder its own name back.",
                )
            except CheckpointError as error:
                trouble = trouble or error
        assert trouble is not None
        raise trouble

    def part(self, name: str, manifest: Manifest, writer: int) -> Part:
        """Return a writer's part, from the first disk whose copy is whole.

        Raises:
            CheckpointError: there is none.
        """
        file = part_name(writer)
        size, wanted = manifest.files.get(file, (-1, ""))
        for disk in self.disks:
            where = f"{name}/{file}"
            if 0 <= size <= _MOST_PART_BYTES and disk.size(where) == size:
                with suppress(OSError):
                    data = disk.read(where)
                    if digest(data) == wanted:
                        return read_part(data, f"{disk.where}/{where}")
        raise CheckpointError(
            f"{file} of {name} is missing on {self.disks[0].where}, or not what was written",
            hint="resume from an older one with `--checkpoint`.",
        )

    def writers(self, manifest: Manifest) -> list[int]:
        """Return the numbers of a checkpoint's writers."""
        return sorted(int(file.removeprefix("part-")) for file in manifest.files)

    def verify(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint after comparing every byte with what was written.

        Raises:
            CheckpointError: some cannot be read from any disk; the message names file and tensor.
        """
        manifest = self.manifest(name)
        packs = self.packs()
        for writer in self.writers(manifest):
            part = self.part(name, manifest, writer)
            for piece in part.pieces:
                packs.check(part, piece)
        return manifest

    def packs(self) -> Packs:
        """Return what reads from all disks."""
        return Packs(self.disks)

    def prune(self, *, keep: int, newest: int) -> list[str]:
        """Delete all but the last `keep` checkpoints up to the step `newest`, and the packs that no other needs.

        A save of a later step may be open. Returns what is deleted.
        """
        reached = [name for step, name in self.all() if step <= newest]
        doomed = reached[: max(0, len(reached) - keep)]
        for name in doomed:
            for disk in self.disks:
                disk.delete(name)
        try:
            return [*doomed, *self.collect(lambda step: step <= newest)]
        except CheckpointError:
            return doomed  # A checkpoint that cannot be read names packs that nobody knows: then all stay.

    def collect(self, of: Callable[[int], bool] = lambda step: True) -> list[str]:
        """Delete the packs that no checkpoint names, also none that is set aside; returns them.

        Args:
            of: tells of a step whether no save of it is open, whose packs would go as well.

        Raises:
            CheckpointError: a manifest cannot be read, so what it needs is not known; nothing is deleted then.
        """
        live = self._live()
        gone = set()
        for disk in self.disks:
            for file in disk.names(PACKS):
                step = file.partition("-")[0]
                if (pack := f"{PACKS}/{pack_of(file)}") not in live and step.isdigit() and of(int(step)):
                    disk.delete(f"{PACKS}/{file}")
                    gone.add(pack)
        return sorted(gone)

    def _live(self) -> set[str]:
        """Return the packs that some disk's manifest names; disks may differ where the power went between two."""
        live: set[str] = set()
        for name in self._named():
            known, trouble = False, None
            for disk in self.disks:
                try:
                    live |= set(read_manifest(disk, name).packs)
                    known = True
                except CheckpointError as error:
                    trouble = error
            if trouble is not None and not known and any(disk.names(name) for disk in self.disks):
                raise trouble  # Not so where another one has deleted it meanwhile.
        return live

    def set_aside(self, name: str) -> None:
        """Rename a checkpoint so that nothing goes on from it and nothing deletes it."""
        for disk in self.disks:
            there = disk.names("")
            if name in there:
                number = 1
                while (place := f"{ASIDE}{name}" + (f"-{number}" if number > 1 else "")) in there:
                    number += 1
                disk.publish(name, place)

    def sweep(self) -> None:
        """Delete what an interrupted save or deletion left; nobody may be saving meanwhile."""
        for disk in self.disks:
            for name in disk.names(""):
                if name.startswith(OLD) and not disk.names(name.removeprefix(OLD)):
                    disk.publish(name, name.removeprefix(OLD))  # What was to take its place never came.
                elif name.startswith((DRAFT, DOOMED, OLD)):
                    disk.delete(name)
            for folder in (PACKS, *(name for name in disk.names("") if step_of(name) >= 0)):
                for name in disk.names(folder):
                    if name.startswith(DOOMED):
                        disk.delete(f"{folder}/{name}")
        with suppress(CheckpointError):  # What cannot be read names packs that nobody knows: then all stay.
            self.collect()

    def _named(self) -> Iterable[str]:
        return sorted({
            name for disk in self.disks for name in disk.names("")
            if step_of(name) >= 0 or name.startswith((ASIDE, OLD))
        })  # fmt: skip
