"""How do ranks meet over links that are really slow? Hosts emulated on this computer, each with a limited card.

A host is a network namespace with one card, `eth0`, joined to the others by a bridge that has a namespace of its own;
nothing of the computer's network is touched. The namespaces have no names and live by file descriptors of this process,
so two runs do not meet and the kernel removes everything when the process ends, however it ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from namespaces import die_with_parent, enter, inside, namespace
from namespaces import words as run_words
from supernode.errors import MachineError

Result = TypeVar("Result")

MBIT = 1e6 / 8
"""Bytes per second of a link of 1 Mbit/s."""
CARD = "eth0"
HEADERS = 14 + 20 + 32
"""Bytes of a frame besides what TCP carries: Ethernet, IPv4, and TCP with timestamps (RFC 7323)."""
BURST, PATIENCE = "256kb", "100ms"
"""What tbf lets through at once, and how long a frame may wait in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What a host's card has sent and received, as the kernel counts it. A packet may hold many wire frames' bytes."""

    sent: int
    received: int
    packets_sent: int
    packets_received: int

    def __sub__(self, other: Count) -> Count:
        return Count(
            sent=self.sent - other.sent,
            received=self.received - other.received,
            packets_sent=self.packets_sent - other.packets_sent,
            packets_received=self.packets_received - other.packets_received,
        )

    @property
    def payload(self) -> int:
        """Bytes sent without the headers of Ethernet, IP and TCP: what the programs wrote."""
        return self.sent - HEADERS * self.packets_sent


class Hosts:
    """Emulated hosts; made by `emulated`. Ranks that `run` forks may call all of it too."""

    def __init__(self, namespaces: list[int], bridge: int) -> None:
        self._namespaces, self._bridge = namespaces, bridge
        self.rate: float | None = None

    def __len__(self) -> int:
        return len(self._namespaces)

    @staticmethod
    def address(host: int) -> str:
        """Return a host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int, function: Callable[[], Result]) -> Result:
        """Call a function on a thread that stands inside a host; sockets and processes that it makes belong there."""
        return inside(self._namespaces[host], function)

    def limit(self, rate: float | None) -> None:
        """Limit what each host sends, and so what it receives from any other.

        Args:
            rate: bytes per second of frames with their headers; None for as fast as the computer can.
        """
        for host in range(len(self)):
            if rate is not None:
                words = f"replace dev {CARD} root tbf rate {round(rate * 8)}bit burst {BURST} latency {PATIENCE}"
            elif self.rate is not None or "tbf" in self.inside(host, lambda: run_words("tc", "qdisc", "show")):
                words = f"del dev {CARD} root"
            else:
                continue
            self.inside(host, lambda words=words: run_words("tc", "qdisc", *words.split()))  # type: ignore[misc]
        self.rate = rate

    def counts(self) -> list[Count]:
        """Return what each host's card has sent and received so far."""
        return [self.inside(host, _count) for host in range(len(self))]

    def goodput(self, nbytes: int = 8 * 2**20, *, source: int = 0, target: int = 1) -> float:
        """Return the bytes per second that one TCP stream carries from host to host, after a start that fills tbf."""
        listener = self.inside(target, lambda: socket.create_server((self.address(target), 0)))
        sender = self.inside(source, lambda: socket.create_connection(listener.getsockname()[:2]))
        receiver, _ = listener.accept()
        warm = 2**20
        block = memoryview(bytes(warm))

        def send() -> None:
            left = warm + nbytes
            while left:
                left -= sender.send(block[: min(left, warm)])

        thread = threading.Thread(target=send, daemon=True)
        with listener, sender, receiver:
            receiver.settimeout(60)
            thread.start()
            buffer = bytearray(2**20)
            got, begun, start = 0, 0.0, 0
            while got < warm + nbytes:
                got += receiver.recv_into(buffer)
                if not begun and got >= warm:
                    begun, start = time.perf_counter(), got
            seconds = time.perf_counter() - begun
            thread.join()
        return (got - start) / seconds

    def run(
        self, function: Callable[[int], Result], placement: Sequence[int], *, patience: float = 600
    ) -> list[Result]:
        """Call a function on every rank of a process group over the hosts; return what each returned.

        The ranks are forks of this process, so import torch (and `torch._dynamo`, if they take optimizer steps) first.
        torch.distributed is ready inside, on gloo; each rank has one thread.

        Args:
            function: takes the rank.
            placement: host of each rank: (0, 0, 1, 1) is two hosts in order, (0, 1, 0, 1) the same interleaved.
            patience: seconds that all of it may take, and any one collective.

        Raises:
            RuntimeError: a rank failed, or the patience is over; all ranks are ended. A rank's own words go to stderr.
        """
        children: dict[int, int] = {}
        with tempfile.TemporaryDirectory(prefix="supernode-hosts-") as folder:
            try:
                for rank, host in enumerate(placement):
                    pid = os.fork()
                    if pid == 0:
                        self._become(rank, host, len(placement), function, Path(folder), patience)
                    children[pid] = rank
                _await(children, patience)
                answers = [Path(folder, f"result-{rank}").read_bytes() for rank in range(len(placement))]
            finally:
                _end(children)
        return [pickle.loads(answer) for answer in answers]  # noqa: S301 - written by the forks above

    def _become(
        self, rank: int, host: int, ranks: int, function: Callable[[int], Any], folder: Path, patience: float
    ) -> None:
        """Turn this fork into a rank; never returns."""
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent()
            enter(self._namespaces[host])
            os.environ["GLOO_SOCKET_IFNAME"] = CARD
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            store = dist.FileStore(str(folder / "store"), ranks)
            limit = timedelta(seconds=patience)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
            result = pickle.dumps(function(rank))
            dist.barrier()
            dist.destroy_process_group()
            (folder / f"result-{rank}").write_bytes(result)
            code = 0
        except BaseException:  # noqa: BLE001 - a fork must never return into the benchmark
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@contextmanager
def emulated(count: int, *, rate: float | None = None) -> Iterator[Hosts]:
    """Lend so many hosts, joined by links of this rate; they are gone afterwards.

    Args:
        rate: as of `Hosts.limit`.

    Raises:
        MachineError: this process may not make network namespaces, or a tool is missing.
    """
    descriptors: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        signal.signal(signal.SIGTERM, _leave)  # Else a SIGTERM would leave the ranks to the kernel alone.
    try:
        for _ in range(count + 1):
            descriptors.append(namespace())
        hosts = Hosts(descriptors[:-1], descriptors[-1])
        _join(hosts, descriptors[-1], descriptors[:-1])
        if rate is not None:
            hosts.limit(rate)
        yield hosts
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _join(hosts: Hosts, bridge: int, namespaces: list[int]) -> None:
    """Give each host a card, and the bridge's namespace the other ends of their cables."""
    lines = ["link add br0 type bridge", "link set br0 up"]
    for host, descriptor in enumerate(namespaces):
        there = f"/proc/{os.getpid()}/fd/{descriptor}"
        lines += [
            f"link add port{host} type veth peer name {CARD} netns {there}",
            f"link set port{host} master br0",
            f"link set port{host} up",
        ]
    inside(bridge, lambda: run_words("ip", "-batch", "-", given="\n".join(lines)))
    for host in range(len(namespaces)):
        # gloo looks for a way to the outside before it binds, so there is a default route.
        lines = [
            "link set lo up",
            f"addr add {hosts.address(host)}/24 dev {CARD}",
            f"link set {CARD} up",
            f"route add default dev {CARD}",
        ]
        hosts.inside(host, lambda lines=lines: run_words("ip", "-batch", "-", given="\n".join(lines)))  # type: ignore[misc]


def _count() -> Count:
    """Return the counters of this thread's host."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == CARD:
            numbers = [int(word) for word in rest.split()]
            return Count(received=numbers[0], packets_received=numbers[1], sent=numbers[8], packets_sent=numbers[9])
    raise MachineError(f"no {CARD} in this namespace", hint="count inside an emulated host.")


def _await(children: dict[int, int], patience: float) -> None:
    """Wait until all ranks have ended well; forgets those that have ended."""
    deadline = time.monotonic() + patience
    while children:
        pid, status = _next_of(children)
        if pid == 0:
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {sorted(children.values())} have not ended after {patience:g} s")
            time.sleep(0.005)
            continue
        rank = children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            raise RuntimeError(f"rank {rank} ended with {code}; its words are above")


def _next_of(children: dict[int, int]) -> tuple[int, int]:
    """Return a child that has ended and its status; (0, 0) if none has."""
    for pid in children:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return ended, status
    return 0, 0


def _end(children: dict[int, int]) -> None:
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in children:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
