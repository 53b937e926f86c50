"""What is saved comes back to the byte, what has not changed is not written again, and damage is made good or told."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.storing.conftest import Writer, manifest, read, save, saves

from supernode.errors import CheckpointError, SpecError
from supernode.storing.chunks import CHUNK
from supernode.storing.disk import write_file
from supernode.storing.manifests import MANIFEST
from supernode.storing.mending import repair
from supernode.storing.part import Part, read_part
from supernode.storing.saves import Saves, name_of
from supernode.storing.spread import BLOCK, Spread, disk_of

SIZES = {"empty": 0, "small": 5, "chunk": CHUNK, "odd": 3 * CHUNK + 7, "large": 40 * CHUNK}


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5 * CHUNK), min_size=1, max_size=4),
    changes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5 * CHUNK), st.integers(0, CHUNK)), max_size=12),
    zeros=st.booleans(), copies=st.integers(1, 3), data=st.randoms(),
)  # fmt: skip
def test_every_save_of_random_changes_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], changes: list[tuple[int, int, int]], zeros: bool,
    copies: int, data: object,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("saves")
    where = saves(folder, disks=3, copies=copies)
    writer = Writer(0, {str(number): size for number, size in enumerate(sizes)})
    expected = {}
    for step, (tensor, start, count) in enumerate([(0, 0, 0), *changes], start=1):
        writer.change(str(tensor % len(sizes)), start, count)
        if zeros and step == 3:
            writer.values = {name: bytes(len(value)) for name, value in writer.values.items()}
        save(where, step, [writer])
        expected[step] = dict(writer.values)

    assert [step for step, _ in where.all()] == list(expected)
    for step, values in expected.items():
        assert read(where, step) == values
    kept = where.all()[-1][0]
    where.prune(keep=1, newest=kept)
    assert read(where, kept) == expected[kept]
    assert where.collect() == []
    shutil.rmtree(folder)


def test_only_chunks_that_changed_are_written_and_nothing_where_nothing_did(tmp_path: Path) -> None:
    where, writer = saves(tmp_path), Writer(0, SIZES)

    first = save(where, 1, [writer])
    nothing = save(where, 2, [writer])
    writer.change("large", 5 * CHUNK + 1, 1)
    writer.change("odd", 3 * CHUNK, 2)  # in its last, short chunk
    two = save(where, 3, [writer])

    assert sum(SIZES.values()) < first < sum(SIZES.values()) + 2 * CHUNK  # a short last chunk shrinks by its zeros
    assert nothing == 0
    assert CHUNK <= two < 1.1 * CHUNK
    assert read(where, 3) == writer.values
    where.prune(keep=1, newest=3)
    assert read(where, 3) == writer.values


def test_what_shrinks_is_compressed_and_what_does_not_is_not(tmp_path: Path) -> None:
    where, writer = saves(tmp_path), Writer(0, {"random": 64 * CHUNK})
    writer.values["text"] = b"the quick brown fox " * (64 * CHUNK // 20)

    written = save(where, 1, [writer])

    assert 64 * CHUNK <= written < 70 * CHUNK
    assert read(where, 1) == writer.values


def test_a_pack_that_is_mostly_dead_goes_and_what_lived_in_it_moves(tmp_path: Path) -> None:
    where, writer = saves(tmp_path), Writer(0, {"large": 100 * CHUNK})
    save(where, 1, [writer])
    for step in range(2, 12):  # ten of a hundred chunks in turn
        writer.change("large", (step - 2) * 10 * CHUNK, 10 * CHUNK)
        save(where, step, [writer])
        where.prune(keep=1, newest=step)

    packs = where.disks[0].names("packs")
    on_disk = sum(where.disks[0].size(f"packs/{name}") for name in packs)

    assert read(where, 11) == writer.values
    assert not any(name.startswith("00000001-") for name in packs)
    assert on_disk < 1.4 * 100 * CHUNK


def test_what_stays_is_not_moved_again_and_again_beside_what_always_changes(tmp_path: Path) -> None:
    where, writer = saves(tmp_path), Writer(0, {"frozen": 20 * CHUNK, "trained": 80 * CHUNK})
    save(where, 1, [writer])
    written = []
    for step in range(2, 7):
        writer.change("trained", 0, 80 * CHUNK)
        written.append(save(where, step, [writer]))
        where.prune(keep=1, newest=step)

    assert written == [80 * CHUNK] * 5
    assert len(where.disks[0].names("packs")) == 2
    assert read(where, 6) == writer.values


def test_each_chunk_is_taken_from_whichever_copy_has_it_whole(tmp_path: Path) -> None:
    where, writer = saves(tmp_path, disks=2, copies=2), Writer(0, {"a": 30 * CHUNK})
    writer.values["0.text"] = b"the quick brown fox " * (20 * CHUNK // 20)
    save(where, 1, [writer])
    for number in range(2):
        pack = next((tmp_path / f"disk{number}" / "packs").iterdir())
        data = bytearray(pack.read_bytes())
        for at in range(number * CHUNK + 7, 30 * CHUNK, 2 * CHUNK):  # Every other chunk is bad on either.
            data[at] ^= 1
        data[30 * CHUNK + 9 + number * (len(data) - 30 * CHUNK) // 2] ^= 1
        pack.write_bytes(data)

    assert read(where, 1) == writer.values


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    where, writer = saves(tmp_path, disks=2), Writer(0, SIZES)
    save(where, 4, [writer])
    writer.change("large", 0, 9)
    save(where, 4, [writer])

    assert read(where, 4) == writer.values
    assert where.all() == [(4, "step-00000004")]
    assert not [name for name in where.disks[0].names("") if name.startswith(".")]


def damage(path: Path, how: str, draw: np.random.Generator) -> None:
    """Flip a bit of a file, cut it short, or delete it."""
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: int(draw.integers(0, len(data)))])
    else:
        data[int(draw.integers(0, len(data)))] ^= 1 << int(draw.integers(0, 8))
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "cut", "delete"])
def test_no_damage_is_ever_read_and_the_file_is_named(tmp_path: Path, how: str) -> None:
    writers = [Writer(number, {"a": 3 * CHUNK + 11, "b": 2 * CHUNK}) for number in range(2)]
    expected = {name: value for writer in writers for name, value in writer.values.items()}
    draw = np.random.default_rng(7)
    where = saves(tmp_path / "good")
    save(where, 1, writers)
    files = [path.relative_to(tmp_path / "good") for path in (tmp_path / "good").rglob("*") if path.is_file()]

    for number, file in enumerate(sorted(files) * 6):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", copy)
        damage(copy / file, how, draw)
        there = saves(copy)
        for look in (read, Saves.verify):
            with pytest.raises(CheckpointError) as caught:
                look(there, 1 if look is read else name_of(1))  # type: ignore[operator]
            assert file.name in caught.value.message or file.parent.name in caught.value.message
            assert caught.value.hint
        shutil.rmtree(copy)
    assert read(where, 1) == expected


@pytest.mark.parametrize(("disks", "copies", "parity"), [(3, 2, 0), (4, 1, 2), (5, 1, 1)])
def test_as_many_disks_as_are_promised_may_be_lost_or_damaged(
    tmp_path: Path, disks: int, copies: int, parity: int
) -> None:
    writers = [Writer(number, {"a": 3 * BLOCK + 11, "b": 2 * CHUNK}) for number in range(disks)]
    good = saves(tmp_path / "good", disks=disks, copies=copies, parity=parity)
    save(good, 1, writers)
    writers[0].change("a", 5, 5)
    save(good, 2, writers)
    expected = {name: value for writer in writers for name, value in writer.values.items()}
    draw = np.random.default_rng(3)

    for turn in range(6):
        copy = tmp_path / f"copy{turn}"
        shutil.copytree(tmp_path / "good", copy)
        lost = draw.permutation(disks)[: good.spread.losses]
        for disk in lost:
            if turn % 2:
                shutil.rmtree(copy / f"disk{disk}")
            else:
                for file in [path for path in (copy / f"disk{disk}").rglob("*") if path.is_file()]:
                    damage(file, "flip", draw)
        there = saves(copy, disks=disks, copies=copies, parity=parity)

        assert read(there, 2) == expected
        there.verify(name_of(2))
        mended = repair(there, name_of(2))
        assert mended
        assert repair(there, name_of(2)) == []
        for disk in set(range(disks)) - {int(one) for one in lost}:  # What was mended carries the load alone now.
            if len(set(range(disks)) - {disk}) >= disks - good.spread.losses:
                shutil.rmtree(copy / f"disk{disk}")
                break
        assert read(saves(copy, disks=disks, copies=copies, parity=parity), 2) == expected
        shutil.rmtree(copy)

    for disk in range(good.spread.losses + 1):
        shutil.rmtree(tmp_path / "good" / f"disk{disk}")
    with pytest.raises(CheckpointError, match=r"\.pack|packs/"):
        good.verify(name_of(2))


def test_collection_keeps_what_a_checkpoint_set_aside_needs_and_what_cannot_be_told(tmp_path: Path) -> None:
    where, writer = saves(tmp_path), Writer(0, SIZES)
    save(where, 1, [writer])
    first = dict(writer.values)
    writer.change("large", 0, 40 * CHUNK)
    save(where, 2, [writer], build=False)
    where.set_aside(name_of(1))

    assert where.prune(keep=1, newest=2) == []
    (tmp_path / "disk0" / "aside-step-00000001").rename(tmp_path / "disk0" / "step-00000001")
    assert read(where, 1) == first
    (tmp_path / "disk0" / "step-00000001" / MANIFEST).write_text("garbage")
    with pytest.raises(CheckpointError):
        where.collect()
    assert read(where, 2) == writer.values


def test_a_store_of_objects_holds_saves_as_folders_do() -> None:
    url = "memory://bucket/run"
    where = Saves(Spread(disks=(disk_of(url),)))
    writer = Writer(0, SIZES)
    save(where, 1, [writer])
    writer.change("large", 0, 5)
    assert save(where, 2, [writer]) == CHUNK

    assert read(where, 2) == writer.values
    where.verify(name_of(1))
    where.prune(keep=1, newest=2)
    assert where.all() == [(2, name_of(2))]
    assert read(where, 2) == writer.values
    write_file(where.disks[0], f"{name_of(2)}/{MANIFEST}", b"{}")
    with pytest.raises(CheckpointError, match="no manifest"):
        where.verify(name_of(2))


def test_disks_that_cannot_do_what_is_asked_are_refused_by_key(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for wrong, key in (({"copies": 2}, "copies"), ({"parity": 1}, "parity"), ({"copies": 0}, "copies")):
        with pytest.raises(SpecError, match=f"checkpoint.{key}"):
            Spread(disks=(disk,), **wrong)
    with pytest.raises(CheckpointError, match="no name of a file"):
        write_file(disk, "../outside", b"")


@settings(max_examples=60, deadline=None)
@given(garbage=st.binary(max_size=400), cut=st.integers(0, 10**6))
def test_garbage_in_place_of_a_part_is_never_a_traceback(garbage: bytes, cut: int) -> None:
    writer = Writer(0, {"a": 5})
    whole = Part(pieces=writer.pieces, table=np.zeros(1, dtype=Part(pieces=()).table.dtype)).to_bytes()
    for data in (garbage, whole[: cut % len(whole)], whole[: cut % len(whole)] + garbage + b"."):
        with pytest.raises(CheckpointError, match="no part of a checkpoint"):
            read_part(data, "here")


def test_manifests_are_of_their_step(tmp_path: Path) -> None:
    where, writer = saves(tmp_path), Writer(0, {"a": 5})
    save(where, 1, [writer])
    (tmp_path / "disk0" / name_of(1)).rename(tmp_path / "disk0" / name_of(3))

    with pytest.raises(CheckpointError, match="of step 1"):
        where.verify(name_of(3))
    assert manifest(1).version == 2


def test_a_save_never_builds_on_what_a_disk_has_lost_or_holds_less_safely(tmp_path: Path) -> None:
    writer = Writer(0, {"a": 40 * CHUNK})
    one = saves(tmp_path, disks=3)
    save(one, 1, [writer])
    two = saves(tmp_path, disks=3, copies=2)

    again = save(two, 2, [writer])  # With one copy so far, none of it may be lost.
    nothing = save(two, 3, [writer])
    pack = next(iter(two.manifest(name_of(3)).packs))
    (tmp_path / "disk1" / pack).unlink()
    once_more = save(two, 4, [writer])

    assert [again, nothing, once_more] == [pytest.approx(40 * CHUNK, rel=0.1), 0, again]
    shutil.rmtree(tmp_path / "disk0")
    assert read(two, 4) == writer.values


def test_disks_that_the_power_left_at_two_versions_of_a_step_both_stay_readable(tmp_path: Path) -> None:
    where, writer = saves(tmp_path / "run", disks=2, copies=2), Writer(0, SIZES)
    save(where, 1, [writer])
    old = dict(writer.values)
    shutil.copytree(tmp_path / "run" / "disk1" / name_of(1), tmp_path / "kept")
    writer.change("large", 0, 40 * CHUNK)
    packs = {path: path.read_bytes() for path in (tmp_path / "run").glob("disk*/packs/*")}
    save(where, 1, [writer])
    for path, data in packs.items():  # As if power had gone before the second disk had the new version.
        path.write_bytes(data)
    shutil.rmtree(tmp_path / "run" / "disk1" / name_of(1))
    shutil.copytree(tmp_path / "kept", tmp_path / "run" / "disk1" / name_of(1))

    where.sweep()

    assert read(where, 1) == writer.values
    shutil.rmtree(tmp_path / "run" / "disk0")
    assert read(where, 1) == old


def test_collectors_at_once_beside_a_save_leave_what_is_kept(tmp_path: Path) -> None:
    where, writer = saves(tmp_path, disks=2, copies=2), Writer(0, {"large": 60 * CHUNK})
    for step in range(1, 9):
        writer.change("large", step * CHUNK, 3 * CHUNK)
        save(where, step, [writer])
        before = where.before(name_of(step), where.manifest(name_of(step)), 0)
    writer.change("large", 0, CHUNK)
    troubles: list[Exception] = []

    def collect() -> None:
        try:
            saves(tmp_path, disks=2, copies=2).prune(keep=2, newest=8)
        except Exception as error:  # noqa: BLE001 - whatever it is
            troubles.append(error)

    stored, _ = where.store(9, 0, writer.stream, writer.pieces, before=before)
    threads = [threading.Thread(target=collect) for _ in range(4)]
    for thread in threads:
        thread.start()
    where.commit(manifest(9), [stored])
    for thread in threads:
        thread.join()

    assert troubles == []
    assert [step for step, _ in where.all()] == [7, 8, 9]
    assert read(where, 9) == writer.values
    for step in (7, 8):
        where.verify(name_of(step))
    assert not any(path.name.startswith(".") for path in tmp_path.rglob("*"))


def test_a_disk_holds_one_runs_checkpoints(tmp_path: Path) -> None:
    first, second = saves(tmp_path, disks=2), saves(tmp_path, disks=1)

    first.claim("run of long ago")  # It left nothing.
    first.claim("run one")
    save(first, 1, [Writer(0, {"a": 5})])
    first.claim("run one")

    with pytest.raises(CheckpointError, match="disk0 holds the checkpoints of another run") as caught:
        second.claim("run two")
    assert "checkpoint.disks" in caught.value.hint


def test_an_older_version_is_refused_as_such(tmp_path: Path) -> None:
    where = saves(tmp_path)
    write_file(
        where.disks[0], f"{name_of(1)}/{MANIFEST}", b'{"step": 1, "files": {".metadata": [3, "ab"]}, "version": 1}'
    )

    with pytest.raises(CheckpointError, match="is of version 1, and this is version 2") as caught:
        where.verify(name_of(1))
    assert "use the version" in caught.value.hint


@pytest.mark.parametrize("parity", [0, 1])
def test_stores_of_objects_stand_in_for_each_other_as_disks_do(tmp_path: Path, parity: int) -> None:
    urls = [f"file://{tmp_path}/bucket{number}" for number in range(2)] + [f"memory://other{parity}/run"]
    where = Saves(Spread(disks=tuple(map(disk_of, urls)), copies=1 if parity else 2, parity=parity))
    writer = Writer(0, {"a": 3 * BLOCK, "text": 0})
    writer.values["0.text"] = b"the quick brown fox " * 9000
    save(where, 1, [writer])
    writer.change("a", 0, 5)
    assert save(where, 2, [writer]) == CHUNK

    shutil.rmtree(tmp_path / "bucket1")

    assert read(where, 2) == writer.values
    assert {gap.what for gap in repair(where, name_of(2))} == {"missing"}
    assert repair(where, name_of(2)) == []
    where.set_aside(name_of(1))
    where.prune(keep=1, newest=2)
    shutil.rmtree(tmp_path / "bucket0")
    assert read(where, 2) == writer.values
