"""How is a tensor cut for a sum in two tiers? Into chunks, one behind the other, and chunks into parts with keepers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from supernode.ways.hosts import Hosts

LEAST_CHUNK, MOST_CHUNK = 128 * 2**10, 4 * 2**20
"""Bytes of a chunk: a smaller one is mostly words and waking, a larger one leaves the links idle at start and end."""
CHUNKS = 8
"""Into so many a vector is cut where the bounds allow, unless said otherwise: many for slow links, few for fast."""
MOST_WHOLE = 64 * 2**20
"""Bytes that travel as one chunk where a compressor stands between hosts."""


class Cut:
    """Where chunks and parts begin and end; the same on all ranks.

    Args:
        is_whole: tensors are left whole so far as can be.

    Attributes:
        most: bytes of a chunk at most.
    """

    def __init__(self, hosts: Hosts, *, is_whole: bool) -> None:
        self.most = MOST_WHOLE if is_whole else MOST_CHUNK
        self._is_whole = is_whole
        keepers = hosts.keepers()
        self._mine = [part for part, ranks in enumerate(keepers) if hosts.me in ranks]
        # The rows, by number in this host, that hold the sums of the parts.
        self._row = [hosts.mine.index(ranks[hosts.host]) for ranks in keepers]

    def chunks(self, elements: int, itemsize: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield first element and length of each chunk of a tensor; about so many, where bounds allow."""
        nbytes = elements * itemsize
        chunk = self.most if self._is_whole else min(max(-(-nbytes // count), LEAST_CHUNK), MOST_CHUNK)
        step = chunk // (64 * itemsize) * 64
        for first in range(0, elements, step):
            yield first, min(step, elements - first)

    def rows(self, elements: int) -> Iterator[tuple[int, int, int]]:
        """Yield of each part of a chunk the row that holds its sum, its first element and its end."""
        edges = self._edges(elements)
        for part, row in enumerate(self._row):
            if edges[part + 1] > edges[part]:
                yield row, edges[part], edges[part + 1]

    def own(self, elements: int) -> Iterator[tuple[int, int, int]]:
        """Yield part, first element and end of what this rank looks after of a chunk."""
        edges = self._edges(elements)
        for part in self._mine:
            if edges[part + 1] > edges[part]:
                yield part, edges[part], edges[part + 1]

    def _edges(self, elements: int) -> list[int]:
        """Return where the parts of a chunk begin and the last one ends: on cache lines, so far as it goes."""
        parts = len(self._row)
        return [min(elements, (elements * part // parts + 15) // 16 * 16) for part in range(parts + 1)]


def add_up(total: Tensor, own: Tensor, others: list[Tensor]) -> None:
    """Put the sum into `total`, which may be `own`; halves are added in float32 and rounded once."""
    if not others:
        if total.data_ptr() != own.data_ptr():
            total.copy_(own)
    elif total.dtype in (torch.float16, torch.bfloat16) and len(others) > 1:
        exact = own.float()
        for other in others:
            exact += other
        total.copy_(exact)
    else:
        torch.add(own, others[0], out=total)
        for other in others[1:]:
            total += other
