"""How does state get from one node's memory into another's? Requests and answers over a socket, bytes behind them."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Answer = tuple[Message, memoryview | None]
_HEAD = struct.Struct("<IQ")  # bytes of the JSON, bytes behind it
_MOST_LINE = 2**28
ANSWER_SECONDS = 60.0


class Link:
    """One end of the link to another node's keeper; it asks, and answers what the other asks, at the same time.

    Args:
        answer: (what is asked, where its bytes lie) to what is answered.
        room: what is asked or answered to the memory that the bytes behind it are to go to; None: they are not wanted.
    """

    def __init__(
        self, connection: socket.socket, answer: Callable[[Message], Answer],
        room: Callable[[Message, int], memoryview | None],
    ) -> None:  # fmt: skip
        self._connection, self._answer, self._room = connection, answer, room
        # Who listens must never wait to speak: both ends would, for each other.
        self._out: queue.SimpleQueue[tuple[Message, memoryview | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[threading.Event, list[Message]]] = {}
        self._count = 0
        self.is_closed = False
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._speak, daemon=True).start()

    def ask(self, kind: str, data: memoryview | None = None, **values: Any) -> Message | None:
        """Return the answer to a question; None where the other node is gone or does not answer."""
        with self._lock:
            self._count += 1
            number = self._count
            heard: tuple[threading.Event, list[Message]] = threading.Event(), []
            self._waiting[number] = heard
        self._out.put(({"ask": number, "kind": kind, **values}, data))
        if self.is_closed:
            heard[0].set()
        heard[0].wait(ANSWER_SECONDS)
        self._waiting.pop(number, None)
        return heard[1][0] if heard[1] else None

    def _speak(self) -> None:
        while (said := self._out.get()) is not None:
            self._send(*said)

    def _send(self, message: Message, data: memoryview | None) -> None:
        line = json.dumps(message).encode()
        try:
            self._connection.sendall(_HEAD.pack(len(line), len(data) if data is not None else 0) + line)
            if data is not None:
                self._connection.sendall(data)
        except OSError:
            self._end()

    def _listen(self) -> None:
        try:
            while True:
                length, nbytes = _HEAD.unpack(self._exactly(bytearray(_HEAD.size)))
                if length > _MOST_LINE:
                    raise ValueError("no line is so long")
                message = json.loads(bytes(self._exactly(bytearray(length))))
                self._take(message, nbytes)
        except (OSError, ValueError, EOFError):
            self._end()

    def _take(self, message: Message, nbytes: int) -> None:
        if nbytes:
            into = self._room(message, nbytes)
            self._exactly(into if into is not None else bytearray(nbytes))
        if "to" in message:
            if (waiting := self._waiting.get(message["to"])) is not None:
                waiting[1].append(message)
                waiting[0].set()
            return
        answer, data = self._answer(message)
        self._out.put(({"to": message["ask"], **answer}, data))

    def _exactly(self, into: bytearray | memoryview) -> bytearray | memoryview:
        view = memoryview(into)
        while len(view):
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return into

    def _end(self) -> None:
        self.is_closed = True
        self._out.put(None)
        self._connection.close()
        for event, _ in list(self._waiting.values()):
            event.set()
