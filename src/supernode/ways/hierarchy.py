"""How is a sum taken in two tiers at once? Chunks pass through a host's memory while others are between hosts.

Each chunk is copied into shared memory; each rank adds its part from all rows; the parts are summed between hosts, each
part's keepers among themselves; and each rank copies the whole back. Several chunks are under way, so the links between
hosts rest only while the first is added and the last is copied. Tensors that `empty` lent lie in that memory already:
only what others have summed is copied.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.ways.cut import CHUNKS, Cut, add_up
from supernode.ways.hosts import PEER_GONE, Hosts, leave, limit_of, subgroup
from supernode.ways.shared import share

Between = Callable[[Tensor, dist.ProcessGroup, str], None]
"""Sum a part over the group, in place; the key names the part from step to step."""

WINDOW = 4
"""Chunks under way at once. Memory has room for twice as many: when a rank has finished a chunk, the others may still
copy from its row, but they have all finished the chunk that lies a window before."""
_HERE, _SUMMED, _COPIED = b"h", b"s", b"c"
"""What ranks of a host tell each other: a chunk is in memory; my parts of it are summed; I need your tensor no more."""


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
            ConnectionError: a peer is gone, or did not answer within the group's limit, or all was closed before.
            BaseException: what else went wrong on the thread that sums, as it was.
        """
        self._done.wait()
        error = self._error
        if isinstance(error, (OSError, dist.DistError)) or (
            isinstance(error, RuntimeError) and PEER_GONE.search(str(error))
        ):
            raise ConnectionError(str(error)) from error
        if error is not None:
            raise error


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
    is_lent: bool
    rows: list[Tensor]
    left: int = 0  # parts that are between hosts


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
        self._cut = Cut(hosts, is_whole=between is not None)
        self._window = 2 if between else WINDOW
        self._limit = limit_of(group).total_seconds()
        # gloo works on two sums of a group at a time; a second group keeps the links busy where chunks are small.
        self._groups: dict[int, tuple[dist.ProcessGroup, ...]] = {}
        if len(hosts.groups) > 1:
            for part, ranks in enumerate(hosts.keepers()):
                if hosts.me in ranks:
                    copies = range(1 if between else 2)
                    self._groups[part] = tuple(subgroup(group, ranks, f"{name}-{part}-{copy}") for copy in copies)
        self._shared = share(group, hosts, name, slots=2 * self._window, slot=self._cut.most)
        self._lock = threading.Lock()
        self._new: deque[_Chunk] = deque()
        self._pending: deque[Pending] = deque()
        self._back: deque[tuple[_Chunk, BaseException | None]] = deque()
        self._hooks: queue.SimpleQueue[tuple[_Chunk, Callable[[], None]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closing = False
        self._threads = [threading.Thread(target=self._live, name="supernode-meeting", daemon=True)]
        if between:
            self._threads.append(threading.Thread(target=self._compress, name="supernode-between", daemon=True))
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
        lent = self._shared.lent(vector)
        cut = [
            _Chunk(
                tensor=vector[first : first + length],
                key=f"{key}.{number}",
                number=number,
                work=work,
                is_last=False,
                is_lent=bool(lent),
                rows=[row[first : first + length] for row in lent],
            )
            for number, (first, length) in enumerate(self._cut.chunks(vector.numel(), vector.element_size(), chunks))
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

    def empty(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor in the memory of the host, for sums without copying into it; all ranks call this alike.

        The memory is held until `close`. What is written after a sum is done is seen by nobody else.
        """
        return self._shared.lend(elements, dtype)

    def take_back(self) -> None:
        """Lend again what `empty` has lent so far; all ranks call this alike, and use those tensors no more."""
        self._shared.take_back()

    def parts(self, elements: int, itemsize: int, key: str = "") -> list[Part]:
        """Return which parts of a tensor this rank looks after, as `between` will be handed them."""
        return [
            Part(start=first + low, length=high - low, group=self._groups[part][0], key=f"{key}.{number}.{part}")
            for number, (first, length) in enumerate(self._cut.chunks(elements, itemsize, 1))
            for part, low, high in self._cut.own(length)
            if self._groups
        ]

    def close(self) -> None:
        """End the threads and let go of the groups; whoever waits for a sum under way gets a ConnectionError."""
        self._closing = True
        self._hooks.put(None)
        self._shared.wake()
        for thread in self._threads:
            thread.join(timeout=min(5.0, self._limit))
        with self._lock:
            self._error = self._error or ConnectionError("the meeting was closed before the sum was done")
            left = list(self._pending)
        for work in left:
            work.end(self._error)
        if not left:  # Else gloo may still wait in them, and they stay until the process ends.
            for group in (group for groups in self._groups.values() for group in groups):
                leave(group)
        self._groups.clear()
        self._shared.close()

    def _live(self) -> None:
        """Move chunks on, whichever can be, until the end."""
        try:
            with torch.no_grad():
                self._move()
        except BaseException as error:  # noqa: BLE001 - told to everyone who waits
            self._fail(error)

    def _move(self) -> None:
        under_way: deque[_Chunk] = deque()
        leaving: deque[Pending] = deque()
        # Counts since the beginning: of chunks that a rank has put into memory, of those whose parts it has summed,
        # of lent tensors that it has copied from.
        here, summed, copied = ([0] * self._shared.size for _ in range(3))
        ended = 0
        me, first, added = self._shared.index, 0, 0  # `first` is the number of under_way[0]
        while not self._closing:
            moved = False
            while self._new and len(under_way) < self._window:
                with self._lock:
                    chunk = self._new.popleft()
                if not chunk.is_lent:
                    slot = here[me] % (2 * self._window)
                    chunk.rows = self._shared.rows(slot, chunk.tensor.numel(), chunk.tensor.dtype)
                    self._put(chunk)
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
            while self._back:
                chunk, error = self._back.popleft()
                if error is not None:
                    raise error
                chunk.left -= 1
            # Words carry no numbers, so they are told in order, whichever part comes back first.
            while summed[me] < added and under_way[summed[me] - first].left == 0:
                summed[me] += 1
                self._shared.tell(_SUMMED)
                moved = True
            if min(summed) > first:
                chunk = under_way.popleft()
                self._finish(chunk)
                first += 1
                moved = True
                if chunk.is_last and chunk.is_lent:
                    copied[me] += 1
                    self._shared.tell(_COPIED)
                    leaving.append(chunk.work)
                elif chunk.is_last:
                    self._end(chunk.work)
            while min(copied) > ended:
                self._end(leaving.popleft())
                ended += 1
            heard = self._shared.hear(0 if moved else (self._limit if under_way or leaving else None))
            if heard is None and not moved:
                raise ConnectionError(f"wait timeout: no word from the ranks of this host for {self._limit:g} s")
            for number, words in heard or ():
                here[number] += words.count(_HERE)
                summed[number] += words.count(_SUMMED)
                copied[number] += words.count(_COPIED)

    def _put(self, chunk: _Chunk) -> None:
        """Copy into memory what the others will add: all but this rank's own parts."""
        row = chunk.rows[self._shared.index]
        low = 0
        for _, own_low, own_high in (*self._cut.own(chunk.tensor.numel()), (0, chunk.tensor.numel(), 0)):
            row[low:own_low].copy_(chunk.tensor[low:own_low])
            low = own_high

    def _add(self, chunk: _Chunk) -> None:
        """Add up this rank's part of a chunk, and send it on its way between the hosts."""
        me = self._shared.index
        bounds = list(self._cut.own(chunk.tensor.numel()))
        chunk.left = len(bounds) if self._groups else 0
        for part, low, high in bounds:
            total = chunk.rows[me][low:high]
            others = [row[low:high] for index, row in enumerate(chunk.rows) if index != me]
            add_up(total, chunk.tensor[low:high], others)
            if self._groups:
                groups = self._groups[part]
                self._send(chunk, total, groups[chunk.number % len(groups)], f"{chunk.key}.{part}")

    def _send(self, chunk: _Chunk, total: Tensor, group: dist.ProcessGroup, key: str) -> None:
        """Begin the sum of a part between hosts."""
        between = self._between
        if between is not None:
            self._hooks.put((chunk, lambda: between(total, group, key)))
            return
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(lambda future: self._came_back(chunk, future))

    def _came_back(self, chunk: _Chunk, future: torch.futures.Future[list[Tensor]]) -> None:
        """Note that a part is back, on one of gloo's threads."""
        error: BaseException | None = None
        try:
            future.value()
        except BaseException as caught:  # noqa: BLE001 - raised on the thread of the meeting
            error = caught
        self._back.append((chunk, error))
        self._shared.wake()

    def _compress(self) -> None:
        """Do what stands between hosts, one part after the other."""
        while (task := self._hooks.get()) is not None:
            chunk, act = task
            error = None
            try:
                with torch.no_grad():
                    act()
            except BaseException as caught:  # noqa: BLE001 - raised on the thread of the meeting
                error = caught
            self._back.append((chunk, error))
            self._shared.wake()

    def _finish(self, chunk: _Chunk) -> None:
        """Copy the sum back: each part from the row of the rank that looked after it."""
        for row, low, high in self._cut.rows(chunk.tensor.numel()):
            if not chunk.is_lent or row != self._shared.index:
                chunk.tensor[low:high].copy_(chunk.rows[row][low:high])

    def _end(self, work: Pending) -> None:
        with self._lock:
            self._pending.remove(work)
        work.end()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            left = list(self._pending)
        self._shared.hang_up()  # Those of this host hear of it now, wherever they are.
        for work in left:
            work.end(error)
