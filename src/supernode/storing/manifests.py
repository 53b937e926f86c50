"""Is a checkpoint's manifest what was written? Nothing else of the checkpoint is looked at before it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import xxhash

from supernode.errors import CheckpointError
from supernode.schema import plain
from supernode.schema.manifest import VERSION, Manifest
from supernode.storing.disk import Disk

MANIFEST = "manifest.json"
PART = re.compile(r"part-\d{4,6}")
PACK = re.compile(r"packs/\d{8,12}-\d{4,6}-[0-9a-f]{8}\.pack")
_MOST_MANIFEST_BYTES = 64 * 2**20


def digest(data: bytes) -> str:
    """Return the XXH3-128 of bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return a manifest as its file holds it: with a digest of the rest."""
    record = asdict(manifest)
    return json.dumps(record | {"digest": digest(_canonical(record))}).encode()


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def read_manifest(disk: Disk, name: str) -> Manifest:
    """Return the manifest of a checkpoint as a disk has it.

    Raises:
        CheckpointError: it is missing, or not what was written.
    """
    where = f"{disk.where}/{name}"
    hint = "resume from an older one with `--checkpoint`, or delete this folder."
    size = disk.size(f"{name}/{MANIFEST}")
    if size < 0:
        what = "has no manifest, so it is not whole" if name in disk.names("") else "is not there"
        raise CheckpointError(f"{where} {what}", hint=hint)
    if size > _MOST_MANIFEST_BYTES:
        raise CheckpointError(f"{where}/{MANIFEST} is larger than a manifest can be", hint=hint)
    try:
        record = json.loads(disk.read(f"{name}/{MANIFEST}"))
        said = record.pop("digest", "") if isinstance(record, dict) else ""
        version = record.get("version") if isinstance(record, dict) else None
        if isinstance(version, int) and version != VERSION:  # Another one may have other keys.
            raise CheckpointError(
                f"{where} is of version {version}, and this is version {VERSION}",
                hint="use the version of supernode that wrote it.",
            )
        manifest = plain.read(Manifest, json.dumps(record).encode())
        if said != digest(_canonical(asdict(manifest))):
            raise ValueError("it is not what was written")
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{where}/{MANIFEST} is no manifest: {error}", hint=hint) from error
    stray = [file for file in manifest.files if not PART.fullmatch(file)]
    stray += [pack for pack in manifest.packs if not PACK.fullmatch(pack)]
    if stray:
        raise CheckpointError(f"{where}/{MANIFEST} names {stray[0]!r}, which no writer can have written", hint=hint)
    return manifest
