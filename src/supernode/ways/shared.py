"""How do ranks of one host exchange? Through memory that all of them see, and one-byte words that say when.

The memory has no name: the first rank makes it and hands it to the others over local sockets, so a killed job leaves
nothing behind. A rank that dies closes its sockets, which the others hear at once.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import selectors
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.errors import CapacityError
from supernode.units import show_bytes
from supernode.ways.hosts import Hosts, limit_of

_HELLO = struct.Struct("!II")
_SO_PEERCRED = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


class Shared:
    """What one rank holds of the exchange with the ranks of its host.

    Attributes:
        size: ranks of the host.
        index: this one's number among them.
        slot: bytes of one rank's row of one slot.
    """

    def __init__(
        self, *, index: int, size: int, peers: dict[int, socket.socket], memory: mmap.mmap, slots: int, slot: int
    ) -> None:
        self.index, self.size, self.slot = index, size, slot
        self._peers, self._memory = peers, memory
        # Behind the slots each rank has a room of its own, from which `lend` gives.
        self._rooms = slots * size * slot
        self._room = (len(memory) - self._rooms) // size
        self._lent = 0
        self._base = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        for number, peer in peers.items():
            self._selector.register(peer, selectors.EVENT_READ, number)

    def rows(self, slot: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the first elements of every rank's row of a slot, each (elements,); writing them writes the memory."""
        return [
            torch.frombuffer(self._memory, dtype=dtype, count=elements, offset=(slot * self.size + row) * self.slot)
            for row in range(self.size)
        ]

    def lend(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in this rank's room, which the others see too, if all have called this alike.

        Where the room is used up, which is this rank's share of the computer's memory, the tensor is one that nobody
        else sees.
        """
        nbytes = -(-elements * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if elements == 0 or self._lent + nbytes > self._room:
            return torch.zeros(elements, dtype=dtype)
        start = self._rooms + self.index * self._room + self._lent
        self._lent += nbytes
        return torch.frombuffer(self._memory, dtype=dtype, count=elements, offset=start).zero_()

    def take_back(self) -> None:
        """Lend again what was lent so far; all call this alike, and nobody uses those tensors any more."""
        self._lent = 0

    def lent(self, vector: Tensor) -> list[Tensor]:
        """Return the same place in every rank's room, own row included; empty for a tensor that `lend` did not give."""
        place = vector.data_ptr() - self._base - self._rooms - self.index * self._room
        if vector.numel() == 0 or not 0 <= place < self._lent:
            return []
        return [
            torch.frombuffer(
                self._memory, dtype=vector.dtype, count=vector.numel(), offset=self._rooms + row * self._room + place
            )
            for row in range(self.size)
        ]

    def tell(self, word: bytes) -> None:
        """Say one byte to all other ranks of the host.

        Raises:
            ConnectionError: one of them is gone.
        """
        for number, peer in self._peers.items():
            try:
                peer.sendall(word)
            except OSError as error:
                raise ConnectionError(f"connection closed by local rank {number}: {error}") from error

    def wake(self) -> None:
        """Make `hear` return; from any thread."""
        descriptor = self._wake
        if descriptor >= 0:
            os.eventfd_write(descriptor, 1)

    def hear(self, patience: float | None) -> list[tuple[int, bytes]] | None:
        """Wait for words of the others or for `wake`; return who said what, or None after so many seconds of silence.

        Raises:
            ConnectionError: one of them is gone.
        """
        events = self._selector.select(patience)
        heard = []
        for key, _ in events:
            if key.fd == self._wake:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                continue
            try:
                words = key.fileobj.recv(4096)  # type: ignore[union-attr]
            except OSError as error:
                raise ConnectionError(f"connection closed by local rank {key.data}: {error}") from error
            if not words:
                raise ConnectionError(f"connection closed by local rank {key.data}")
            heard.append((key.data, words))
        return heard if events else None

    def hang_up(self) -> None:
        """End the line to the others, who hear it."""
        for peer in self._peers.values():
            with suppress(OSError):  # gone already
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the sockets; the memory goes with the last tensor in it."""
        self._selector.close()
        for peer in self._peers.values():
            peer.close()
        # Its number may soon be another file's.
        descriptor, self._wake = self._wake, -1
        os.close(descriptor)


def share(group: dist.ProcessGroup, hosts: Hosts, name: str, *, slots: int, slot: int) -> Shared:
    """Join the ranks of this host; all ranks of the group call this at the same time.

    Args:
        name: the same on all ranks, and never used before with these hosts' token.
        slots: how many rows of its own each rank has.
        slot: bytes of a row; pages that are never written take no memory.

    Raises:
        ConnectionError: a rank of this host did not come in time.
        CapacityError: a process may not map so much memory.
    """
    index, size = hosts.mine.index(hosts.me), len(hosts.mine)
    limit = limit_of(group)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        try:
            listener.bind(_address(name, hosts, index))
            listener.listen(size)
            listener.settimeout(limit.total_seconds())
            dist.all_reduce(torch.zeros(1), group=group)  # Now all listen.
            peers = _connect(listener, [_address(name, hosts, other) for other in range(index)], index, size, limit)
            memory = _memory(peers, index, slots * size * slot + size * _room(size))
        except (TimeoutError, OSError) as error:
            raise ConnectionError(f"connection refused by a rank of this host: {error}") from error
    return Shared(index=index, size=size, peers=peers, memory=memory, slots=slots, slot=slot)


def _room(size: int) -> int:
    """Return the bytes of a rank's room. All ranks of a host fill theirs alike, so a part of its memory is enough."""
    return os.sysconf("SC_PHYS_PAGES") // size * mmap.PAGESIZE


def _address(name: str, hosts: Hosts, index: int) -> str:
    # An abstract address (unix(7)): no file, and gone with its socket; of 107 bytes at most. Only who has the token
    # can tell it beforehand, so nobody else sits there already.
    told = hashlib.blake2b(f"{hosts.token} {name} {hosts.host} {index}".encode(), digest_size=16)
    return f"\0supernode-{told.hexdigest()}"


def _connect(
    listener: socket.socket, lower: Sequence[str], index: int, size: int, limit: timedelta
) -> dict[int, socket.socket]:
    peers = {}
    for number, address in enumerate(lower):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(limit.total_seconds())
        peer.connect(address)
        peer.sendall(_HELLO.pack(index, size))
        peers[number] = peer
    while len(peers) < size - 1:
        peer, _ = listener.accept()
        peer.settimeout(limit.total_seconds())
        _, user, _ = _SO_PEERCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _SO_PEERCRED.size))
        if user != os.getuid():
            peer.close()  # Abstract addresses have no permissions; this one is not of our job.
            continue
        number, told = _HELLO.unpack(peer.recv(_HELLO.size, socket.MSG_WAITALL))
        assert told == size
        assert number not in peers
        peers[number] = peer
    return peers


def _memory(peers: dict[int, socket.socket], index: int, nbytes: int) -> mmap.mmap:
    """Return memory that all ranks of the host see: made by the first, handed to the others."""
    if index == 0:
        descriptor = os.memfd_create("supernode-shared", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        for peer in peers.values():
            socket.send_fds(peer, [b"m"], [descriptor])
    else:
        _, received, _, _ = socket.recv_fds(peers[0], 1, 1)
        if not received:
            raise ConnectionError("connection closed by local rank 0")
        descriptor = received[0]
    try:
        return mmap.mmap(descriptor, nbytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise CapacityError(
            f"the ranks of this host cannot map {show_bytes(nbytes)} to exchange through, of which only what they use "
            "takes memory",
            hint="raise the limit on address space (`ulimit -v`), or set `communication.algorithm` to flat, or with "
            "`communication.compress` set `communication.where` to all.",
        ) from error
    finally:
        os.close(descriptor)
