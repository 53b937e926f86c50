"""Which pieces of a stream are new since the save before? Fixed chunks, each known by its digest."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

CHUNK = 16 * 1024
"""Bytes. Small enough that a few rows of a table of embeddings do not have all of it written again."""
ROW = np.dtype([("digest", "<u8", (2,)), ("offset", "<u8"), ("pack", "<u4"), ("stored", "<u4")])
"""One chunk: its XXH3-128; where in which pack it lies; how many bytes it takes there: 0 for nothing but zeros, as many
as it has as it is, fewer with zstd."""
Table = NDArray[np.void]


def chunk_count(nbytes: int) -> int:
    """Return how many chunks so many bytes take."""
    return -(-nbytes // CHUNK)


def padded(nbytes: int) -> int:
    """Return the bytes of whole chunks that so many bytes take."""
    return chunk_count(nbytes) * CHUNK


def digests_of(stream: memoryview) -> NDArray[np.uint64]:
    """Return the digest of every chunk of whole chunks; (chunks, 2)."""
    digest, found = xxhash.xxh3_128_digest, bytearray(16 * chunk_count(len(stream)))
    for number, start in enumerate(range(0, len(stream), CHUNK)):
        found[16 * number : 16 * number + 16] = digest(stream[start : start + CHUNK])
    return np.frombuffer(bytes(found), dtype="<u8").reshape(-1, 2)


ZEROS = digests_of(memoryview(bytes(CHUNK)))[0]
"""The digest of a chunk of zeros."""


def empty_table(chunks: int) -> Table:
    """Return a table of so many chunks."""
    return np.zeros(chunks, dtype=ROW)


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first, one past the last) of each run of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(first), int(beyond)) for first, beyond in edges.reshape(-1, 2)]
