"""How do gradients meet with a compressor in the way? Between hosts alone, or among all, on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.compressing.compressor import Compressor
from supernode.compressing.lay import Named
from supernode.ways.hierarchy import Hierarchy, Pending
from supernode.ways.hosts import find_hosts, leave, subgroup


class OneByOne:
    """Calls a function on tensors in the order in which they are started, on a thread of its own."""

    def __init__(self, function: Callable[[Tensor, str], None]) -> None:
        self._function = function
        self._tasks: queue.SimpleQueue[tuple[Tensor, str, Pending] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="supernode-compressed", daemon=True)
        self._thread.start()

    def start(self, flat: Tensor, key: str = "") -> Pending:
        """Begin."""
        work = Pending()
        self._tasks.put((flat.detach().view(-1), key, work))
        return work

    def close(self) -> None:
        """End the thread once what was started is done."""
        self._tasks.put(None)
        self._thread.join()

    def _live(self) -> None:
        while (task := self._tasks.get()) is not None:
            flat, key, work = task
            try:
                with torch.no_grad():
                    self._function(flat, key)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                work.end(error)
            else:
                work.end()


class Compressed:
    """A meeting in which a compressor sums what goes between hosts, or everything.

    All ranks of the group make it at the same time. Buckets are announced (`prepare`) before they are summed; a state
    given before that (`load`) is taken up then, if it is of these buckets on all ranks, and dropped otherwise.

    Args:
        slow_only: hosts sum among themselves first, whole, and only what goes between them is compressed. On one host
            nothing is.

    Attributes:
        travels: whether anything is compressed at all; nothing is where a rank is alone.
        kept: whether the state given was taken up; None where none was given, or nothing is announced yet.
    """

    name = "compressed"

    def __init__(self, compressor: Compressor[Any], group: dist.ProcessGroup, *, slow_only: bool) -> None:
        self.compressor = compressor
        self.kept: bool | None = None
        self._parent, self._group = group, group
        self._hierarchy: Hierarchy | None = None
        self._waiting: dict[str, Tensor] | None = None
        hosts = find_hosts(group)
        self.travels = len(hosts.groups) > 1 or (not slow_only and group.size() > 1)
        if self.travels and slow_only and max(hosts.sizes) > 1:
            self._hierarchy = Hierarchy(group, hosts, hosts.token, between=compressor.exchange)
            self._way: Hierarchy | OneByOne = self._hierarchy
        else:
            # Of its own, so that what this thread sends is not mistaken for what others do.
            self._group = subgroup(group, range(group.size()), hosts.token)
            self._way = OneByOne(self._exchange if self.travels else self._whole)

    def _exchange(self, flat: Tensor, key: str) -> None:
        self.compressor.exchange(flat, self._group, key)

    def _whole(self, flat: Tensor, key: str) -> None:
        dist.all_reduce(flat, group=self._group)

    def begin(self, step: int) -> None:
        """Await the sums of a step, counted from 0."""
        self.compressor.step = step

    def prepare(self, buckets: Sequence[tuple[str, Named, Tensor]]) -> None:
        """Announce buckets: key, parameters and the tensor that holds them. All ranks call this at the same time."""
        keys: list[str] = []
        for key, parameters, flat in buckets if self.travels else ():
            device = str(flat.device)
            if self._hierarchy is None:
                self.compressor.prepare(key, parameters, self._group, device=device)
                keys.append(key)
                continue
            for part in self._hierarchy.parts(flat.numel(), flat.element_size(), key):
                self.compressor.prepare(
                    part.key, parameters, part.group, start=part.start, length=part.length, device=device
                )
                keys.append(part.key)
        if self._waiting is not None:
            # All take up what was saved or none does: factors that are kept warm are the same on all ranks.
            fits = torch.tensor(float(self.compressor.fits(self._waiting, keys)))
            dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=self._parent)
            self.kept = bool(fits) and self.compressor.load(self._waiting, keys)
            for name in self.compressor.state(keys):
                self._waiting.pop(name, None)

    def start(self, flat: Tensor, key: str = "") -> Pending:
        """Begin to sum a contiguous tensor over the group, in place; `key` was announced."""
        return self._way.start(flat, key)

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on, by name."""
        return self.compressor.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state as buckets are announced that it fits. All ranks call this, or none."""
        self._waiting = dict(state)

    def close(self) -> None:
        """Let go of threads, sockets, memory and groups; no sum may be under way."""
        self._way.close()
        if self._hierarchy is None:
            leave(self._group)
