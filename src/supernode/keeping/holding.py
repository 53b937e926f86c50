"""What does a node hold in memory: its own ranks' state, and a copy of its partner's? All of it takes a lock."""

from __future__ import annotations

import threading
from dataclasses import asdict

from supernode.keeping import slots
from supernode.keeping.links import Answer, Message
from supernode.keeping.slots import NOTHING, Slots
from supernode.schema import plain
from supernode.storing.part import Piece, stream_bytes


class Holding:
    """Slots by writer, of this node's ranks and of those that another node copies here."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._own: dict[int, Slots] = {}
        self._copies: dict[int, Slots] = {}
        self._arriving: dict[int, int] = {}

    def own(self, writer: int, pieces: tuple[Piece, ...]) -> Slots | None:
        """Return a writer's slots if they are of these pieces."""
        with self._lock:
            held = self._own.get(writer)
            return held if held is not None and held.pieces == pieces else None

    def adopt(self, writer: int, made: Slots) -> None:
        """Take new slots of a writer in the place of its old ones."""
        with self._lock:
            if (old := self._own.pop(writer, None)) is not None:
                old.close()
            self._own[writer] = made

    def begin(self, writer: int, slot: int) -> None:
        """Note that a writer writes to a slot, which holds nothing meanwhile."""
        with self._lock:
            if (held := self._own.get(writer)) is not None:
                held.steps[slot] = NOTHING

    def whole(self, writer: int, slot: int, step: int, digests: list[str], writers: int) -> Slots | None:
        """Note that a slot holds a step, whose state is spread over so many writers; returns the writer's slots."""
        with self._lock:
            held = self._own.get(writer)
            if held is not None:
                held.steps[slot], held.digests[slot], held.writers[slot] = step, digests, writers
            return held

    def find(self, writer: int, step: int) -> tuple[Slots, int] | None:
        """Return the slots that hold a writer's step, and which of them."""
        with self._lock:
            for held in (self._own.get(writer), self._copies.get(writer)):
                if held is not None and (slot := held.slot_of(step)) is not None:
                    return held, slot
        return None

    def steps(self, *, verify: bool) -> dict[int, dict[int, int]]:
        """Return the steps that are held, by writer, and over how many writers each is spread.

        Args:
            verify: let go of what is not what its writer put there.
        """
        with self._lock:
            found: dict[int, dict[int, int]] = {}
            for held in (self._own, self._copies):
                for writer, one in held.items():
                    for slot, step in enumerate(one.steps):
                        if step != NOTHING and verify and not one.is_whole(slot):
                            one.steps[slot] = NOTHING
                        elif step != NOTHING:
                            found.setdefault(writer, {})[step] = one.writers[slot]
            return found

    def tables(self, step: int) -> dict[int, tuple[Piece, ...]]:
        """Return the pieces of each writer whose state of a step is held."""
        with self._lock:
            return {
                writer: held.pieces
                for one in (self._copies, self._own)
                for writer, held in one.items()
                if held.slot_of(step) is not None
            }

    def answer(self, message: Message) -> Answer:
        """Answer another node's keeper."""
        kind = message["kind"]
        if kind == "tables":
            found = self.tables(message["step"])
            return {"tables": {writer: [asdict(piece) for piece in pieces] for writer, pieces in found.items()}}, None
        if kind == "get":
            if (where := self.find(message["writer"], message["step"])) is None:
                return {"found": False}, None
            held, slot = where
            table = [asdict(piece) for piece in held.pieces]
            return {"found": True, "pieces": table, "digests": held.digests[slot]}, held.stream(slot)
        if kind == "put":
            return {"ok": self._arrived(message)}, None
        return {}, None

    def room(self, message: Message, nbytes: int) -> memoryview | None:
        """Return where the bytes of another node's state go to."""
        if message.get("kind") != "put":
            return None
        pieces = plain.value(tuple[Piece, ...], message["pieces"])
        writer = message["writer"]
        if stream_bytes(pieces) != nbytes:
            return None
        with self._lock:
            held = self._copies.get(writer)
            if held is None or held.pieces != pieces:
                if held is not None:
                    held.close()
                held = self._copies[writer] = Slots(pieces, slots.make(pieces))
            oldest = held.steps.index(min(held.steps))
            held.steps[oldest] = NOTHING
            self._arriving[writer] = oldest
            return held.stream(oldest)

    def _arrived(self, message: Message) -> bool:
        """Take up what has arrived, if it is what was sent."""
        writer, digests = message["writer"], message["digests"]
        with self._lock:
            if not message["pieces"]:  # A writer of nothing sends no bytes.
                if (old := self._copies.pop(writer, None)) is not None:
                    old.close()
                self._copies[writer] = Slots((), slots.make(()))
                self._arriving[writer] = 0
            slot, held = self._arriving.pop(writer, None), self._copies.get(writer)
            if held is None or slot is None:
                return False
            held.digests[slot], held.writers[slot] = digests, message["writers"]
        if not held.is_whole(slot):
            return False
        with self._lock:
            held.steps[slot] = message["step"]
        return True

    def forget(self, writers: set[int]) -> None:
        """Let go of the state of ranks that are no more."""
        with self._lock:
            for one in (self._own, self._copies):
                for writer in [writer for writer in one if writer not in writers]:
                    one.pop(writer).close()
