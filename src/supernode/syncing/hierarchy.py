"""How is a sum taken in two tiers at once? Chunks pass through a host's memory while others are between hosts.

Each chunk is copied into shared memory; each rank adds its part from all rows; the parts are summed between hosts, each
part's keepers among themselves; and each rank copies the whole back. Several chunks are under way, so the links between
hosts rest only while the first is added and the last is copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.syncing.hosts import Hosts, limit_of, subgroup
from supernode.syncing.shared import share

Between = Callable[[Tensor, dist.ProcessGroup, str], None]
"""Sum a part over the group, in place; the key names the part from step to step."""

WINDOW = 4
"""Chunks under way at once. Memory has room for twice as many: when a rank has finished a chunk, the others may still
copy from its row, but they have all finished the chunk that lies a window before."""
LEAST_CHUNK, MOST_CHUNK = 128 * 2**10, 4 * 2**20
"""Bytes of a chunk: a smaller one is mostly words and waking, a larger one leaves the links idle at start and end."""
CHUNKS = 12
"""Into so many a vector is cut where the bounds allow, unless said otherwise: many for slow links, few for fast."""
MOST_WHOLE = 64 * 2**20
"""Bytes that travel as one chunk where a compressor stands between hosts."""

_HERE, _SUMMED = b"h", b"s"


class Pending:
    """A sum under way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Say that it is done, or why it never will be."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            ConnectionError: a peer is gone, or did not answer within the group's limit.
        """
        self._done.wait()
        if self._error is not None:
            raise ConnectionError(str(self._error)) from self._error


class _Waits(Protocol):
    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank looks after of one tensor: some elements, the group of those who do so on other hosts, a name."""

    start: int
    length: int
    group: dist.ProcessGroup
    key: str


@dataclass(slots=True, kw_only=True)
class _Chunk:
    tensor: Tensor
    key: str
    number: int
    work: Pending
    is_last: bool
    rows: list[Tensor] = field(default_factory=list)


class Hierarchy:
    """Sums over a group: inside hosts by shared memory, between hosts by gloo or by what is handed in.

    All ranks of the group make it at the same time, and start the same sums in the same order.

    Args:
        between: what takes the place of the sum between hosts; called in one order on all ranks, on a thread of its
            own. The vector is not cut into chunks then, as compressors work on matrices.
    """

    name = "hierarchical"

    def __init__(self, group: dist.ProcessGroup, hosts: Hosts, name: str, *, between: Between | None = None) -> None:
        self.hosts = hosts
        self._between = between
        self._most = MOST_WHOLE if between else MOST_CHUNK
        self._window = 2 if between else WINDOW
        self._limit = limit_of(group).total_seconds()
        self._keepers = hosts.keepers()
        # gloo works on two sums of a group at a time; a second group keeps the links busy where chunks are small.
        self._groups: dict[int, tuple[dist.ProcessGroup, ...]] = {}
        if len(hosts.groups) > 1:
            for part, ranks in enumerate(self._keepers):
                if hosts.me in ranks:
                    copies = range(1 if between else 2)
                    self._groups[part] = tuple(subgroup(group, ranks, f"{name}-{part}-{copy}") for copy in copies)
        self._shared = share(group, hosts, name, slots=2 * self._window, slot=self._most)
        self._mine = [part for part, ranks in enumerate(self._keepers) if hosts.me in ranks]
        # The rows, by number in this host, that hold the sums of the parts.
        self._row = [hosts.mine.index(ranks[hosts.host]) for ranks in self._keepers]
        self._lock = threading.Lock()
        self._new: deque[_Chunk] = deque()
        self._pending: deque[Pending] = deque()
        self._between_done: deque[BaseException | None] = deque()
        self._to_wait: deque[Callable[[], None]] = deque()
        self._waits = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._live, name="supernode-meeting", daemon=True),
            threading.Thread(target=self._wait_between, name="supernode-between", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def start(self, flat: Tensor, key: str = "", *, chunks: int = CHUNKS) -> Pending:
        """Begin to sum a contiguous tensor over the group, in place.

        Args:
            key: names the tensor from step to step, where something stands between.
            chunks: to cut it into, where the bounds of a chunk allow and nothing stands between.
        """
        work = Pending()
        vector = flat.detach().view(-1)
        cut = [
            _Chunk(
                tensor=vector[first : first + length], key=f"{key}.{number}", number=number, work=work, is_last=False
            )
            for number, (first, length) in enumerate(self._cut(vector.numel(), vector.element_size(), chunks))
        ]
        if not cut:
            work.end()
            return work
        cut[-1].is_last = True
        with self._lock:
            if self._error is not None:
                work.end(self._error)
                return work
            self._pending.append(work)
            self._new.extend(cut)
        self._shared.wake()
        return work

    def parts(self, elements: int, itemsize: int, key: str = "") -> list[Part]:
        """Return which parts of a tensor this rank looks after, as `between` will be handed them."""
        return [
            Part(start=first + low, length=high - low, group=self._groups[part][0], key=f"{key}.{number}.{part}")
            for number, (first, length) in enumerate(self._cut(elements, itemsize, 1))
            for part, low, high in self._bounds(length)
            if self._groups
        ]

    def close(self) -> None:
        """End the threads; sums under way are dropped."""
        self._closing = True
        self._waits.release()
        self._shared.wake()
        for thread in self._threads:
            thread.join(timeout=min(5.0, self._limit))
        self._shared.close()

    def _cut(self, elements: int, itemsize: int, chunks: int) -> Iterator[tuple[int, int]]:
        """Yield first element and length of each chunk."""
        nbytes = elements * itemsize
        chunk = self._most if self._between else min(max(-(-nbytes // chunks), LEAST_CHUNK), MOST_CHUNK)
        step = chunk // (64 * itemsize) * 64
        for first in range(0, elements, step):
            yield first, min(step, elements - first)

    def _edges(self, elements: int) -> list[int]:
        """Return where the parts of a chunk begin and the last one ends: on cache lines, so far as it goes."""
        parts = len(self._keepers)
        return [min(elements, (elements * part // parts + 15) // 16 * 16) for part in range(parts + 1)]

    def _bounds(self, elements: int) -> Iterator[tuple[int, int, int]]:
        """Yield part, first element and end of what this rank looks after of a chunk."""
        edges = self._edges(elements)
        for part in self._mine:
            if edges[part + 1] > edges[part]:
                yield part, edges[part], edges[part + 1]

    def _live(self) -> None:
        """Move chunks on, whichever can be, until the end."""
        try:
            with torch.no_grad():
                self._move()
        except BaseException as error:  # noqa: BLE001 - told to everyone who waits
            self._fail(error)

    def _move(self) -> None:
        under_way: deque[_Chunk] = deque()
        # Counts of chunks, since the beginning: that a rank has put into memory, and that it has summed.
        here, summed = [0] * self._shared.size, [0] * self._shared.size
        me, first, added = self._shared.index, 0, 0  # `first` is the number of under_way[0]
        while not self._closing:
            moved = False
            while self._new and len(under_way) < self._window:
                with self._lock:
                    chunk = self._new.popleft()
                slot = here[me] % (2 * self._window)
                chunk.rows = self._shared.rows(slot, chunk.tensor.numel(), chunk.tensor.dtype)
                chunk.rows[me].copy_(chunk.tensor)
                under_way.append(chunk)
                here[me] += 1
                self._shared.tell(_HERE)
                moved = True
                if min(here) > added:
                    break  # What can be sent to other hosts goes before what can be copied.
            if min(here) > added:
                self._add(under_way[added - first])
                added += 1
                moved = True
            while self._between_done:
                error = self._between_done.popleft()
                if error is not None:
                    raise error
                summed[me] += 1
                self._shared.tell(_SUMMED)
                moved = True
            if min(summed) > first:
                self._finish(under_way.popleft())
                first += 1
                moved = True
            heard = self._shared.hear(0 if moved else (self._limit if under_way else None))
            if heard is None and not moved:
                raise ConnectionError(f"wait timeout: no word from the ranks of this host for {self._limit:g} s")
            for number, words in heard or ():
                here[number] += words.count(_HERE)
                summed[number] += words.count(_SUMMED)

    def _add(self, chunk: _Chunk) -> None:
        """Add up this rank's part of a chunk, and send it on its way between the hosts."""
        me = self._shared.index
        works: list[_Waits] = []
        hooks: list[tuple[Tensor, dist.ProcessGroup, str]] = []
        for part, low, high in self._bounds(chunk.tensor.numel()):
            others = [row[low:high] for index, row in enumerate(chunk.rows) if index != me]
            total = chunk.rows[me][low:high]
            _add_up(total, others)
            if self._groups:
                group = self._groups[part][chunk.number % len(self._groups[part])]
                if self._between:
                    hooks.append((total, group, f"{chunk.key}.{part}"))
                else:
                    work = dist.all_reduce(total, group=group, async_op=True)
                    assert work is not None
                    works.append(work)
        if not self._groups:
            self._between_done.append(None)
            return

        def settle() -> None:
            for work in works:
                work.wait()
            for tensor, group, key in hooks:
                assert self._between is not None
                self._between(tensor, group, key)

        self._to_wait.append(settle)
        self._waits.release()

    def _wait_between(self) -> None:
        """Wait for what is between hosts, one chunk after the other."""
        while True:
            self._waits.acquire()
            if self._closing:
                return
            error = None
            try:
                with torch.no_grad():
                    self._to_wait.popleft()()
            except BaseException as caught:  # noqa: BLE001 - raised on the other thread
                error = caught
            self._between_done.append(error)
            self._shared.wake()

    def _finish(self, chunk: _Chunk) -> None:
        """Copy the sum back: each part from the row of the rank that looked after it."""
        edges = self._edges(chunk.tensor.numel())
        for row, low, high in zip(self._row, edges[:-1], edges[1:], strict=True):
            chunk.tensor[low:high].copy_(chunk.rows[row][low:high])
        if chunk.is_last:
            with self._lock:
                self._pending.remove(chunk.work)
            chunk.work.end()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            left = list(self._pending)
        self._shared.hang_up()  # Those of this host hear of it now, wherever they are.
        for work in left:
            work.end(error)


def _add_up(total: Tensor, others: list[Tensor]) -> None:
    """Add tensors to the first; halves in float32, rounded once."""
    if total.dtype in (torch.float16, torch.bfloat16) and len(others) > 1:
        exact = total.float()
        for other in others:
            exact += other
        total.copy_(exact)
        return
    for other in others:
        total += other
