"""What bears a checkpoint's name is whole, and what is no longer so is named file by file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from supernode.checkpoint import store
from supernode.errors import CheckpointError
from supernode.schema.manifest import Manifest

RECORD = {
    "step": 5, "samples": 40, "seed": 1, "model": "m", "data": "d", "layout": "l", "optimizer": "adamw", "files": {},
    "version": 2,
}  # fmt: skip


def saved(folder: Path, step: int = 5) -> Path:
    """Write a checkpoint of two files the way a save does, and return its folder."""
    draft, final = folder / f"{store.DRAFT}{store.name_of(step)}", folder / store.name_of(step)
    draft.mkdir(parents=True)
    (draft / "__0_0.distcp").write_bytes(b"weights" * 100)
    (draft / ".metadata").write_bytes(b"where")
    files = {path.name: (path.stat().st_size, store.digest(path)) for path in draft.iterdir()}
    store.write_manifest(draft, Manifest(**(RECORD | {"step": step, "files": files})))  # type: ignore[arg-type]
    store.commit(draft, final)
    return final


def test_a_whole_checkpoint_is_trusted(tmp_path: Path) -> None:
    manifest = store.verify(saved(tmp_path))

    assert manifest.step == 5
    assert set(manifest.files) == {"__0_0.distcp", ".metadata"}
    assert store.checkpoints(tmp_path) == [(5, "step-00000005")]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "digest differs"),
        (lambda path: path.unlink(), "lacks its file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "was written with"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "was written with"),
        (lambda path: (path.unlink(), path.mkdir()), "lacks its file"),
    ],
    ids=["changed", "gone", "short", "long", "a folder"],
)
def test_a_file_that_is_not_as_written_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], object], words: str
) -> None:
    folder = saved(tmp_path)
    damage(folder / name)

    with pytest.raises(CheckpointError, match=words) as caught:
        store.verify(folder)

    assert name in caught.value.message
    assert "--checkpoint" in caught.value.hint


def test_a_half_written_checkpoint_is_never_listed(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / f"{store.DRAFT}{store.name_of(6)}").mkdir()
    for name in ("step-", "step-6x", "step--6", "Step-00000006", "step-٦", "notes.txt"):
        (tmp_path / name).mkdir()

    assert store.checkpoints(tmp_path) == [(5, "step-00000005")]
    assert store.checkpoints(tmp_path / "none") == []


def test_a_folder_without_manifest_is_not_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / store.MANIFEST).unlink()

    with pytest.raises(CheckpointError, match="no manifest"):
        store.verify(folder)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.verify(tmp_path / "step-00000009")


GARBAGE: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("zeros", bytes(4096)),
    ("not text", b"\xff\xfe\x00"),
    ("a list", b"[]"),
    ("a number", b"7"),
    ("null", b"null"),
    ("nested too deep", b"[" * 100_000),
    ("no step", json.dumps({k: v for k, v in RECORD.items() if k != "step"}).encode()),
    ("an unknown key", json.dumps(RECORD | {"extra": 1}).encode()),
    ("files as a list", json.dumps(RECORD | {"files": [1]}).encode()),
    ("a file without digest", json.dumps(RECORD | {"files": {"a": [1]}}).encode()),
    ("a size that is text", json.dumps(RECORD | {"files": {"a": ["x", "y"]}}).encode()),
    ("a size that is infinite", json.dumps(RECORD | {"files": {"a": [float("inf"), "y"]}}).encode()),
    ("a step that is text", json.dumps(RECORD | {"step": "five"}).encode()),
    ("a step that is a list", json.dumps(RECORD | {"step": [5]}).encode()),
    ("a negative step", json.dumps(RECORD | {"step": -5}).encode()),
    ("the step of another folder", json.dumps(RECORD | {"step": 50}).encode()),
    ("another version", json.dumps(RECORD | {"version": 2}).encode()),
    ("a version that is text", json.dumps(RECORD | {"version": "one"}).encode()),
]


@pytest.mark.parametrize("content", [case[1] for case in GARBAGE], ids=[case[0] for case in GARBAGE])
def test_what_is_no_manifest_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    folder = saved(tmp_path)
    (folder / store.MANIFEST).write_bytes(content)

    with pytest.raises(CheckpointError, match=r"manifest\.json") as caught:
        store.verify(folder)

    assert caught.value.hint


def test_a_manifest_larger_than_any_can_be_is_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with (folder / store.MANIFEST).open("r+b") as file:
        file.truncate(2**40)  # sparse

    with pytest.raises(CheckpointError, match="larger"):
        store.verify(folder)


@pytest.mark.parametrize("name", ["../secret", "sub/../../secret", "/etc/passwd", "..", ".", "", "a\0b", "x" * 300])
def test_a_manifest_reaches_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s")
    record = RECORD | {"files": {name: [1, store.digest(secret)]}}
    (folder / store.MANIFEST).write_text(json.dumps(record))

    with pytest.raises(CheckpointError, match="lacks its file"):
        store.verify(folder)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        saved(tmp_path, step)

    store.prune(tmp_path, keep=2, newest=10)

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000004", "step-00000010"]
    store.prune(tmp_path, keep=5, newest=10)
    assert len(store.checkpoints(tmp_path)) == 2


def test_a_checkpoint_of_a_later_step_does_not_push_out_the_one_just_saved(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        saved(tmp_path, step)

    store.prune(tmp_path, keep=1, newest=4)

    assert store.checkpoints(tmp_path) == [(4, "step-00000004"), (10, "step-00000010")]


def test_what_is_set_aside_is_kept_and_no_checkpoint_any_more(tmp_path: Path) -> None:
    for _ in range(2):
        saved(tmp_path)
        store.set_aside(tmp_path, "step-00000005")
    store.set_aside(tmp_path, "step-00000005")

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["aside-step-00000005", "aside-step-00000005-2"]
    assert store.checkpoints(tmp_path) == []


@pytest.mark.parametrize("left", [[], [".metadata"], ["__0_0.distcp"]])
def test_a_manifest_that_names_no_tensors_is_of_no_checkpoint(tmp_path: Path, left: list[str]) -> None:
    folder = saved(tmp_path)
    files = {name: entry for name, entry in store.read_manifest(folder).files.items() if name in left}
    store.write_manifest(folder, Manifest(**(RECORD | {"files": files})))  # type: ignore[arg-type]

    with pytest.raises(CheckpointError, match="no tensors"):
        store.verify(folder)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    (saved(tmp_path) / "__0_0.distcp").write_bytes(b"old")

    folder = saved(tmp_path)

    assert store.verify(folder).step == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]


def test_half_of_a_checkpoint_that_is_replaced_never_bears_its_name(tmp_path: Path) -> None:
    saved(tmp_path)
    draft = tmp_path / f"{store.DRAFT}none"  # As if the process died in the middle: nothing takes the name.

    with pytest.raises(FileNotFoundError):
        store.commit(draft, tmp_path / "step-00000005")

    assert store.checkpoints(tmp_path) == []
    (old,) = tmp_path.iterdir()
    assert {entry.name for entry in old.iterdir()} == {"__0_0.distcp", ".metadata", store.MANIFEST}


def test_sweeping_leaves_nothing_but_checkpoints_and_foreign_files(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / f"{store.DRAFT}{store.name_of(6)}" / "deep").mkdir(parents=True)
    (tmp_path / f"{store.DRAFT}old-{store.name_of(4)}").mkdir()
    (tmp_path / "notes.txt").touch()

    store.sweep(tmp_path)
    store.sweep(tmp_path / "none")

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "step-00000005"]
