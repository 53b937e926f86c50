"""Whatever call of a save a disk refuses, the checkpoint before stays, no scraps stay, and the next save is whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.storing.conftest import Writer, manifest, read

from supernode.errors import CheckpointError, MachineError
from supernode.storing.chunks import CHUNK
from supernode.storing.disk import Folder
from supernode.storing.saves import Saves, name_of
from supernode.storing.spread import Spread
from supernode.storing.system import System


class Failing(System):
    """Refuses one call.

    Attributes:
        left: calls before that one; below 0 none is refused.
        number: of the error.
    """

    left, number = -1, errno.ENOSPC

    def _one(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(self.number, os.strerror(self.number))

    def create(self, path: Path) -> int:
        self._one()
        return super().create(path)

    def write(self, descriptor: int, batch: Sequence[memoryview]) -> int:
        self._one()
        return super().write(descriptor, batch)

    def sync(self, descriptor: int) -> None:
        self._one()
        super().sync(descriptor)

    def make(self, path: Path) -> None:
        self._one()
        super().make(path)

    def rename(self, source: Path, target: Path) -> None:
        self._one()
        super().rename(source, target)

    def sync_names(self, path: Path) -> None:
        self._one()
        super().sync_names(path)


@pytest.mark.parametrize(("copies", "parity"), [(2, 0), (1, 1)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_every_call_of_a_save_may_fail_once(tmp_path: Path, copies: int, parity: int, number: int) -> None:
    system = Failing()
    system.number = number
    disks = tuple(Folder(tmp_path / f"disk{one}", system) for one in range(2))
    where = Saves(Spread(disks=disks, copies=copies, parity=parity))
    writer = Writer(0, {"a": 9 * CHUNK, "b": 3})
    stored, _ = where.store(1, 0, writer.stream, writer.pieces)
    where.commit(manifest(1), [stored])
    step, refused = 1, 0

    for call in range(200):
        last = dict(writer.values)
        writer.change("a", call % 9 * CHUNK, 9)
        before = where.before(name_of(step), where.manifest(name_of(step)), 0)
        system.left, trouble = call, None
        try:
            stored, _ = where.store(step + 1, 0, writer.stream, writer.pieces, before=before)
            where.commit(manifest(step + 1), [stored])
        except (MachineError, CheckpointError) as error:
            trouble = error
        if trouble is None:
            break
        assert isinstance(trouble, MachineError) == (number == errno.ENOSPC), call
        assert trouble.hint
        refused += 1
        system.left = -1
        where.drop_draft(step + 1)
        assert read(where, step) == last
        stored, _ = where.store(step + 1, 0, writer.stream, writer.pieces, before=before)
        where.commit(manifest(step + 1), [stored])
        step += 1
        assert read(where, step) == writer.values
        where.prune(keep=1, newest=step)
        named = {pack for _, name in where.all() for pack in where.manifest(name).packs}
        there = {f"packs/{file}".partition(".pack")[0] + ".pack" for disk in disks for file in disk.names("packs")}
        assert there == named, call
        assert [name for disk in disks for name in disk.names("") if name.startswith(".")] == []

    assert refused > 20
    assert system.left >= 0  # At last nothing was refused.
