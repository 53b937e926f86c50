"""What is saved comes back to the byte, what has not changed is not written again, and damage is made good or told."""

from __future__ import annotations

import shutil
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
