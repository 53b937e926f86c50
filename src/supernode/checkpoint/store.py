"""Which checkpoints lie in a folder and which can be trusted; loads no torch, so a controller can ask.

A checkpoint is a folder `step-00000050`. It is written under another name, its manifest last, and renamed once it is
whole; so what bears the name is whole, and a manifest's digests tell whether it still is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import xxhash

from supernode.errors import CheckpointError, MachineError
from supernode.schema import plain
from supernode.schema.manifest import VERSION, Manifest

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""Where torch says which file holds what."""
DRAFT = ".draft-"
ASIDE = "aside-"
_PIECE = 2**22
_MOST_MANIFEST_BYTES = 64 * 2**20


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step that a folder name stands for, or -1 if it is no checkpoint's name."""
    digits = name.removeprefix("step-")
    return int(digits) if name.startswith("step-") and digits.isascii() and digits.isdigit() else -1


def checkpoints(folder: Path) -> list[tuple[int, str]]:
    """Return (step, name) of the checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((step_of(entry.name), entry.name) for entry in folder.iterdir() if step_of(entry.name) >= 0)


def digest(path: Path) -> str:
    """Return the XXH3-128 digest of a file, in hex."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
    return hasher.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and see that it is on the disk."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file)
        file.flush()
        os.fsync(file.fileno())


def commit(draft: Path, final: Path) -> None:
    """Give a finished draft its name, durably; what bore the name before is deleted."""
    if final.exists():
        _delete(final, until=lambda: os.replace(draft, final))
    else:
        os.replace(draft, final)
    _sync_folder(final.parent)


def _delete(checkpoint: Path, *, until: Callable[[], None] = lambda: None) -> None:
    """Delete a checkpoint under another name, so that what is half deleted does not bear a checkpoint's.

    Args:
        until: done while the other name keeps it whole.
    """
    doomed = checkpoint.with_name(f"{DRAFT}old-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(checkpoint, doomed)
    until()
    shutil.rmtree(doomed, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is not one.
    """
    path = folder / MANIFEST
    hint = "resume from an older one with `--checkpoint`, or delete this folder."
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}", hint="list them with `supernode status RUN`.")
    try:
        if path.stat().st_size > _MOST_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is larger than a manifest can be", hint=hint)
        manifest = plain.read(Manifest, path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no manifest, so it is not whole", hint=hint) from error
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is no manifest: {error}", hint=hint) from error
    if manifest.version != VERSION:
        raise CheckpointError(
            f"{path} is of version {manifest.version}, and this is version {VERSION}",
            hint="use the version of supernode that wrote it.",
        )
    if name_of(manifest.step) != folder.name:
        raise CheckpointError(f"{path} is of step {manifest.step}, unlike its folder's name", hint=hint)
    return manifest


def verify(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after comparing every byte with it.

    Raises:
        CheckpointError: a file is missing, too short or changed; the message names it.
    """
    manifest = read_manifest(folder)
    hint = "resume from an older one with `--checkpoint`, or delete this folder."
    for name, (size, expected) in manifest.files.items():
        path = folder / name
        try:
            if path.resolve().parent != folder.resolve() or not path.is_file():
                raise CheckpointError(f"{folder} lacks its file {name}", hint=hint)
            if path.stat().st_size != size:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes, and was written with {size}", hint=hint)
            if digest(path) != expected:
                raise CheckpointError(f"{path} is not what was written: its digest differs", hint=hint)
        except (OSError, ValueError) as error:  # The disk, or a name that no file can have.
            raise CheckpointError(f"{folder} lacks its file {name}: {error}", hint=hint) from error
    if METADATA not in manifest.files or len(manifest.files) < 2:
        raise CheckpointError(f"{folder} holds no tensors: its manifest names none of their files", hint=hint)
    return manifest


def prune(folder: Path, *, keep: int, newest: int) -> None:
    """Delete all but the last `keep` checkpoints up to the step `newest`; later ones are another way's, left alone."""
    reached = [name for step, name in checkpoints(folder) if step <= newest]
    for name in reached[:-keep]:
        _delete(folder / name)


def set_aside(folder: Path, name: str) -> None:
    """Rename a checkpoint so that nothing goes on from it and nothing deletes it; one that is not there is no matter.

    Raises:
        MachineError: it cannot be renamed.
    """
    place, number = folder / f"{ASIDE}{name}", 1
    while place.exists():
        number += 1
        place = folder / f"{ASIDE}{name}-{number}"
    try:
        if (folder / name).exists():
            os.replace(folder / name, place)
    except OSError as error:
        raise MachineError(
            f"{folder / name} cannot be renamed: {error.strerror}", hint=f"see to the permissions of {folder}."
        ) from error


def sweep(folder: Path) -> None:
    """Delete what an interrupted save or prune left; nobody may be saving meanwhile."""
    if folder.is_dir():
        for entry in folder.glob(f"{DRAFT}*"):
            shutil.rmtree(entry, ignore_errors=True)
