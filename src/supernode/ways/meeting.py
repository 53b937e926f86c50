"""How does a tensor become the sum over a group? One call, whichever way is taken behind it."""

from __future__ import annotations

import queue
import threading
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.collectives.message import Schedule
from supernode.ways.execute import Executor
from supernode.ways.hierarchy import Hierarchy, Pending
from supernode.ways.hosts import Hosts, leave, subgroup


class Work(Protocol):
    """A sum under way."""

    def wait(self) -> object:
        """Return when the tensor holds the sum; raise what looks like a lost peer if it never will."""


class Meeting(Protocol):
    """Where the ranks of a group sum tensors. All start the same sums in the same order.

    Attributes:
        name: of the way it takes.
    """

    name: str

    def start(self, flat: Tensor, key: str = "") -> Work:
        """Begin to sum a contiguous tensor over the group, in place; `key` names it from step to step."""

    def empty(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor that is summed without being copied first, where there is such a thing.

        All ranks call this alike. It is held until `close`, so it is for tensors that meet again and again.
        """

    def close(self) -> None:
        """Let go of threads, sockets and memory."""


class Done:
    """A sum over one rank."""

    def wait(self) -> None:
        """Return at once."""


class Own:
    """The group's own all-reduce: on gloo, one ring in the order of its ranks.

    Args:
        is_made: the group was made for this alone, by `subgroup`, and goes with it.
    """

    def __init__(self, group: dist.ProcessGroup, *, name: str = "given", is_made: bool = False) -> None:
        self.name, self._group, self._is_made = name, group, is_made

    def start(self, flat: Tensor, key: str = "") -> Work:
        """Begin a sum."""
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        return Done() if work is None else work

    def empty(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor like any other."""
        return torch.zeros(elements, dtype=dtype)

    def close(self) -> None:
        """Let go of the group if it was made for this."""
        if self._is_made:
            leave(self._group)


def ordered(group: dist.ProcessGroup, hosts: Hosts, name: str) -> Own:
    """Return gloo's ring host by host, so that it crosses each link between hosts once, whatever the ranks' order."""
    if hosts.are_in_order:
        return Own(group, name="ordered")
    return Own(subgroup(group, hosts.order, f"{name}-ordered"), name="ordered", is_made=True)


class Coarse:
    """A hierarchy with few chunks: less waking, more idle links. For fast links and small tensors."""

    def __init__(self, hierarchy: Hierarchy, chunks: int) -> None:
        self.name = f"hierarchical/{chunks}"
        self._hierarchy, self._chunks = hierarchy, chunks

    def start(self, flat: Tensor, key: str = "") -> Work:
        """Begin a sum."""
        return self._hierarchy.start(flat, key, chunks=self._chunks)

    def empty(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor in the memory of the host."""
        return self._hierarchy.empty(elements, dtype)

    def close(self) -> None:
        """Leave the hierarchy to those who made it."""


class Executed:
    """A described all-reduce, message by message, on a thread of its own.

    Args:
        hosts: whose order numbers the schedule's ranks: those of a host are neighbours.
        chunk: bytes of the vector that go through the schedule together.
    """

    def __init__(self, name: str, schedule: Schedule, group: dist.ProcessGroup, hosts: Hosts, *, chunk: int) -> None:
        self.name = name
        self._executor = Executor(schedule, subgroup(group, hosts.order, f"{hosts.token}-{name}"), chunk=chunk)
        self._tasks: queue.SimpleQueue[tuple[Tensor, Pending] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="supernode-executed", daemon=True)
        self._thread.start()

    def start(self, flat: Tensor, key: str = "") -> Pending:
        """Begin a sum."""
        work = Pending()
        self._tasks.put((flat.detach().view(-1), work))
        return work

    def empty(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor like any other."""
        return torch.zeros(elements, dtype=dtype)

    def close(self) -> None:
        """End the threads once what was started is done."""
        self._tasks.put(None)
        self._thread.join()
        self._executor.close()
        leave(self._executor.group)

    def _live(self) -> None:
        while (task := self._tasks.get()) is not None:
            flat, work = task
            try:
                self._executor.run(flat)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                work.end(error)
            else:
                work.end()
