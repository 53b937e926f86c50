"""How is a rank freed that waits for one that is gone? Its connections to all others are shut, so every wait ends.

Gloo has no abort that reaches point-to-point and subgroups' waits: they end by the group's timeout, or when the
connection does. Which connections are gloo's is known by the ports that the ranks' groups listen on.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_LISTENING = 30  # SO_ACCEPTCONN, of asm-generic/socket.h


class Freeing:
    """Ends what this rank waits for. Made before the ranks meet, so that sockets of others are known by then.

    Attributes:
        ports: that the groups of all ranks listen on.
    """

    def __init__(self) -> None:
        self._others = set(_listening())
        self.ports: frozenset[int] = frozenset()

    def learn(self) -> None:
        """Learn all ranks' ports, once all groups are made; every rank calls this."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sorted(set(_listening()) - self._others))
        self.ports = frozenset(port for ports in everyone for port in ports)

    def free(self) -> int:
        """Shut every connection between ranks; whoever waits for them gets an error. Returns how many there were."""
        count = 0
        for one in _sockets():
            with one, suppress(OSError):
                # A listening socket has no peer; gloo would end the process if it were shut.
                ends = {one.getpeername()[1], one.getsockname()[1]}
                if ends & self.ports:
                    one.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


def _sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, as descriptors of their own."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one
            else:
                one.close()


def _listening() -> Iterator[int]:
    for one in _sockets():
        with one, suppress(OSError):
            if one.getsockopt(socket.SOL_SOCKET, _LISTENING):
                yield one.getsockname()[1]
