"""A process that keeps one node's state, in memory and on disks, whatever becomes of ranks; run as `python -m`.

It is told what to do over the controller's line, takes state in over a line from each rank, and copies it to the
partner's keeper over a link. Writing to disks goes on in a thread that gives way to training. When the controller's end
closes, it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from supernode.keeping.holding import Holding
from supernode.keeping.lines import Line, Message
from supernode.keeping.links import Link
from supernode.keeping.slots import Slots
from supernode.keeping.writing import NICE, Writing
from supernode.schema import plain
from supernode.schema.lasting import CheckpointSpec
from supernode.storing.part import Piece
from supernode.storing.saves import saves_of

_PR_SET_PDEATHSIG = 1
PULSE_SECONDS = 0.5
"""Between signs of life to the controller."""


def main() -> None:
    """Serve on the socket whose descriptor is the first argument, until it closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        # Linux shares cores out among sessions first (autogroup, in sched(7)): this one is to count less than others.
        Path("/proc/self/autogroup").write_text(str(NICE))
    control = Line(socket.socket(fileno=int(sys.argv[1])))
    if os.getppid() == 1 or (order := control.take(wait=None)) is None:
        return
    Keeper(control, order).serve()


class Keeper:
    """One node's keeper.

    Args:
        order: its node's number, how many there are, the run's folder, and where checkpoints go.
    """

    def __init__(self, control: Line, order: Message) -> None:
        self.control, self.node, self.nodes = control, order["node"], order["nodes"]
        folder = Path(order["folder"])
        # The next controller waits until nobody writes in the run's folder any more.
        self.claim = os.open(folder / "logs", os.O_RDONLY)
        fcntl.flock(self.claim, fcntl.LOCK_SH)
        spec = plain.value(CheckpointSpec, order["checkpoint"])
        self.holding = Holding()
        self.ranks: dict[int, Line] = {}
        self.links: dict[int, Link] = {}
        self.wake_read, self.wake_write = os.pipe()
        self._told: queue.SimpleQueue[tuple[int | None, str, dict[str, Any]]] = queue.SimpleQueue()
        self._offers: dict[int, tuple[int, int]] = {}
        self.writing = Writing(saves_of(spec, folder / "checkpoints"), spec, home=self.node, tell=self.tell)
        self._copying: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        threading.Thread(target=self._copy_on, daemon=True).start()

    def tell(self, rank: int | None, kind: str, **values: Any) -> None:
        """Have the main thread say something to a rank, or to the controller; any thread may.

        Descriptors that go along are closed once they are sent.
        """
        self._told.put((rank, kind, values))
        os.write(self.wake_write, b".")

    def serve(self) -> None:
        """Answer until the controller's end closes."""
        self.control.send("ready", pid=os.getpid())
        self._hear_control()  # What came along with the order waits in its line already.
        pulsed = time.monotonic()
        while not self.control.is_closed:
            lines = {line.fileno(): (rank, line) for rank, line in self.ranks.items() if not line.is_closed}
            ready, _, _ = select.select([self.control.fileno(), self.wake_read, *lines], [], [], PULSE_SECONDS)
            if time.monotonic() - pulsed > PULSE_SECONDS:
                pulsed = time.monotonic()
                self.control.send("pulse")
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
            while not self._told.empty():
                rank, kind, values = self._told.get()
                line = self.control if rank is None else self.ranks.get(rank)
                if line is not None:
                    line.send(kind, **values)
                for descriptor in values.get("descriptors", ()):
                    os.close(descriptor)
            for descriptor in ready:
                if descriptor in lines:
                    rank, line = lines[descriptor]
                    while (message := line.take()) is not None:
                        self._hear_rank(rank, line, message)
            if self.control.fileno() in ready:
                self._hear_control()

    def _hear_control(self) -> None:
        while (message := self.control.take()) is not None:
            self._hear_controller(message)

    def _hear_controller(self, message: Message) -> None:
        kind, descriptors = message["kind"], message["fds"]
        if kind == "rank":
            if (old := self.ranks.pop(message["writer"], None)) is not None:
                old.close()
            self.ranks[message["writer"]] = Line(socket.socket(fileno=descriptors[0]))
        elif kind == "link":
            connection = socket.socket(fileno=descriptors[0])
            self.links[message["node"]] = Link(connection, self.holding.answer, self._room)
        elif kind == "ranks":
            self.holding.forget(set(message["writers"]))
        elif kind == "steps":
            self.control.send("steps", token=message["token"], steps=self.holding.steps(verify=message["verify"]))
        elif kind == "commit":
            self.writing.commit(message["manifest"], message["stored"], attempt=message["attempt"])
        elif kind == "committed":
            self.writing.committed(message["step"])
            for rank in self.ranks:
                self.ranks[rank].send("saved", step=message["step"])
        elif kind == "drop":
            self.writing.drop(message["step"], attempt=message["attempt"], first=self.node == 0)
            for rank in self.ranks:
                self.ranks[rank].send("unsaved", step=message["step"])

    def _hear_rank(self, rank: int, line: Line, message: Message) -> None:
        kind = message["kind"]
        if kind == "offer":
            pieces = plain.value(tuple[Piece, ...], message["pieces"])
            self._offers[rank] = message["attempt"], message["writers"]
            held = self.holding.own(rank, pieces)
            if held is None:
                line.send("slots", steps=[], writes={}, copied=self.nodes > 1)
            else:
                writes = dict(self.writing.writes.get(rank, {}))
                line.send(
                    "slots", descriptors=tuple(held.descriptors), steps=held.steps, writes=writes,
                    copied=self.nodes > 1,
                )  # fmt: skip
        elif kind == "new":
            pieces = plain.value(tuple[Piece, ...], message["pieces"])
            self.holding.adopt(rank, Slots(pieces, message["fds"]))
        elif kind == "begin":
            self.holding.begin(rank, message["slot"])
        elif kind == "whole":
            self._whole(rank, message)
        elif kind == "torn":
            self.control.send(
                "unsaved", step=message["step"], attempt=self._offers[rank][0], error="CheckpointError",
                message="the model changed its own weights while they were copied",
                hint="from now on they are copied before the next step begins.",
            )  # fmt: skip
        elif kind == "tables":
            threading.Thread(target=self._say_tables, args=(rank, message["step"]), daemon=True).start()
        elif kind == "want":
            self._want(rank, line, message["writer"], message["step"])

    def _whole(self, rank: int, message: Message) -> None:
        step, slot = message["step"], message["slot"]
        attempt, writers = self._offers[rank]
        held = self.holding.whole(rank, slot, step, message["digests"], writers)
        if held is None:
            return
        if self.nodes > 1:
            self._copying.put((rank, step))
        else:
            self._kept(rank, step)
        if message["disk"]:
            self.writing.store(step, rank, held, slot, attempt=attempt)

    def _kept(self, rank: int, step: int) -> None:
        self.tell(rank, "kept", step=step)
        self.tell(None, "kept", writer=rank, step=step)

    def _copy_on(self) -> None:
        """Copy to the partner's keeper what is whole here, one rank's state after the other."""
        while True:
            rank, step = self._copying.get()
            found = self.holding.find(rank, step)
            link = self.links.get((self.node + 1) % self.nodes)
            if found is None:
                continue
            held, slot = found
            answer = None if link is None else link.ask(
                "put", held.stream(slot), writer=rank, step=step, pieces=[asdict(piece) for piece in held.pieces],
                digests=held.digests[slot], writers=held.writers[slot],
            )  # fmt: skip
            if answer is not None and answer.get("ok"):
                self._kept(rank, step)
            else:
                # The own copy is whole all the same, and the next save is copied again.
                self.tell(rank, "kept", step=step)
                self.tell(None, "uncopied", writer=rank, step=step)

    def _say_tables(self, rank: int, step: int) -> None:
        tables: dict[int, list[dict[str, Any]]] = {}
        for link in list(self.links.values()):
            if (answer := link.ask("tables", step=step)) is not None:
                tables |= {int(writer): pieces for writer, pieces in answer["tables"].items()}
        for writer, pieces in self.holding.tables(step).items():
            tables[writer] = [asdict(piece) for piece in pieces]
        self.tell(rank, "tables", tables=tables)

    def _want(self, rank: int, line: Line, writer: int, step: int) -> None:
        if (found := self.holding.find(writer, step)) is not None:
            held, slot = found
            line.send("here", descriptors=(held.descriptors[slot],), digests=held.digests[slot])
            return
        threading.Thread(target=self._get, args=(rank, writer, step), daemon=True).start()

    def _get(self, rank: int, writer: int, step: int) -> None:
        for link in list(self.links.values()):
            answer = link.ask("get", writer=writer, step=step)
            if answer is not None and answer.get("found"):
                descriptor = answer.pop("descriptor", None)
                if descriptor is None:
                    descriptor = os.memfd_create("supernode-empty", os.MFD_CLOEXEC)
                    os.ftruncate(descriptor, mmap.PAGESIZE)
                self.tell(rank, "here", descriptors=(descriptor,), digests=answer["digests"])
                return
        self.tell(rank, "here", digests=[])

    def _room(self, message: Message, nbytes: int) -> memoryview | None:
        """Return where bytes that come over a link go to."""
        if "to" not in message:
            return self.holding.room(message, nbytes)
        descriptor = os.memfd_create("supernode-got", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        message["descriptor"] = descriptor
        return memoryview(mmap.mmap(descriptor, nbytes))


if __name__ == "__main__":
    main()
