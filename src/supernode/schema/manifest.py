"""What a checkpoint holds, so that it can be trusted before it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A file of chunks that parts point into.

    Attributes:
        nbytes: of the whole of it, however it is spread.
        digest: XXH3-128 of these, in hex.
        home: number of the disk of its writer, from which its copies or shares are counted.
        copies: disks that hold it.
        parity: of its shares, how many may be lost; 0 where it is not shared out.
        disks: there were when it was written.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    nbytes: int
    digest: str
    home: int = 0
    copies: int = 1
    parity: int = 0
    disks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Written last; a folder without it is not a checkpoint.

    Attributes:
        step: optimizer steps done.
        samples: samples drawn from the training data so far; the data position.
        seed: of the job; every generator is a function of seed, step and place in the mesh.
        model: fingerprint of the parameters' names and logical shapes.
        data: fingerprint of the training data and how it is cut into samples.
        layout: layout that wrote it, for people.
        optimizer: kind of the optimizer whose state is inside.
        files: bytes and XXH3-128 digest of every other file in the folder, which are the writers' parts.
        packs: those that the parts point into, by name; some are older than this checkpoint.
        version: of this format.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    step: int
    samples: int
    seed: int
    model: str
    data: str
    layout: str
    optimizer: str
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    packs: Mapping[str, Pack] = field(default_factory=dict)
    version: int = VERSION
