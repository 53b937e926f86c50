"""A rank's side of its keeper: where its state goes, whether there is room for it now, and how it comes back."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import asdict

import xxhash

from supernode.errors import CheckpointError
from supernode.keeping import slots
from supernode.keeping.lines import Line, Message
from supernode.keeping.slots import NOTHING, Slots, digest_of
from supernode.schema import plain
from supernode.storing.part import Piece

ANSWER_SECONDS = 60.0
"""How long a keeper may take to answer, which may have to get a node's state from another node first."""


class Keep:
    """A rank's slots, and what its keeper says of them.

    Args:
        line: to the keeper.
        writer: number of the rank.

    Attributes:
        kept: newest step whose state is kept: here, and at the partner where there is one.
        saved: newest step of a checkpoint that is whole on disk.
        unsaved: newest step of one that did not get there.
    """

    def __init__(self, line: Line, writer: int) -> None:
        self.line, self.writer = line, writer
        self.kept = self.saved = self.unsaved = NOTHING
        self._slots: Slots | None = None
        self._last: int | None = None
        self._is_copied = self._is_fresh = False
        self._writing: dict[int, int] = {}

    @property
    def is_gone(self) -> bool:
        """Whether there is no keeper any more."""
        return self.line.is_closed

    def offer(self, pieces: tuple[Piece, ...], *, step: int, writers: int = 1, attempt: int = 0) -> None:
        """Agree on the slots that the rank writes to.

        Args:
            pieces: of the rank's stream.
            step: the rank's state now is that of this step, which a slot that has it goes on holding.
            writers: ranks over which the state is spread.
            attempt: number of the launch; what is left of a save of an earlier one is no part of this one's.

        Raises:
            CheckpointError: there is no memory for them.
        """
        self.line.send("offer", pieces=[asdict(piece) for piece in pieces], writers=writers, attempt=attempt)
        answer = self._answer("slots")
        if answer is None:
            return
        if self._slots is not None:
            self._slots.close()
        self._is_copied, self._is_fresh = answer["copied"], not answer["fds"]
        if answer["fds"]:
            self._slots = Slots(pieces, answer["fds"], steps=list(answer["steps"]))
            self._writing = {int(step): slot for step, slot in answer["writes"].items()}
        else:
            made = slots.make(pieces)
            self._slots = Slots(pieces, made)
            self.line.send("new", descriptors=tuple(made), pieces=[asdict(piece) for piece in pieces])
        self._last = self._slots.slot_of(step)
        self.kept = step if self._last is not None else NOTHING

    def free(self) -> int | None:
        """Return the slot that may be written now; None while one is on its way to disk or to the partner."""
        self.hear()
        if self._slots is None or self.is_gone:
            return None
        if self._last is None:
            return next((slot for slot in range(slots.COUNT) if slot not in self._writing.values()), None)
        other = 1 - self._last
        # What is here is whole once it is handed over, which ranks have done before they meet; copies take longer.
        is_kept = not self._is_copied or self.kept >= self._slots.steps[self._last]
        return other if is_kept and other not in self._writing.values() else None

    def fresh(self) -> list[memoryview]:
        """Return the memory of new slots, once."""
        views = self._slots.views if self._slots is not None and self._is_fresh else []
        self._is_fresh = False
        return list(views)

    def view(self, slot: int) -> memoryview:
        """Return a slot's memory, whose state is none from now on."""
        assert self._slots is not None
        self._slots.steps[slot] = NOTHING
        self.line.send("begin", slot=slot)
        return self._slots.views[slot]

    def whole(self, slot: int, *, step: int, disk: bool, digests: list[str] | None = None) -> None:
        """Say that a slot holds the whole state of a step.

        Args:
            disk: it is to go to disk, too.
            digests: of the pieces, where they are known already.
        """
        assert self._slots is not None
        if digests is None:
            digests = [digest_of(self._slots.views[slot], piece) for piece in self._slots.pieces]
        self._slots.steps[slot], self._last = step, slot
        if disk:
            self._writing[step] = slot
        self.line.send("whole", slot=slot, step=step, digests=digests, disk=disk)

    def torn(self, step: int) -> None:
        """Say that the state of a step cannot be kept: something changed it while it was copied."""
        self.line.send("torn", step=step)

    def hear(self, *, wait: float = 0.0) -> None:
        """Take in what the keeper said."""
        while (message := self.line.take(wait=wait)) is not None:
            self._take(message)
            wait = 0.0

    def _take(self, message: Message) -> None:
        if message["kind"] == "kept":
            self.kept = max(self.kept, message["step"])
        elif message["kind"] == "stored":
            self._writing.pop(message["step"], None)
        elif message["kind"] == "saved":
            self.saved = max(self.saved, message["step"])
        elif message["kind"] == "unsaved":
            self.unsaved = max(self.unsaved, message["step"])

    def tables(self, step: int) -> dict[int, tuple[Piece, ...]]:
        """Return the pieces of every writer's state of a step, wherever it is kept.

        Raises:
            CheckpointError: the keeper is gone.
        """
        self.line.send("tables", step=step)
        answer = self._answer("tables")
        if answer is None:
            raise self._lost(step)
        return {int(writer): plain.value(tuple[Piece, ...], pieces) for writer, pieces in answer["tables"].items()}

    def fetch(self, writer: int, step: int) -> tuple[memoryview, list[str]]:
        """Return the memory of a writer's state, from this node or another, and the digests of its pieces.

        Raises:
            CheckpointError: nobody has it any more.
        """
        self.line.send("want", writer=writer, step=step)
        answer = self._answer("here")
        if answer is None or not answer["fds"]:
            raise self._lost(step)
        (descriptor,) = answer["fds"]
        try:
            return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)), list(answer["digests"])
        finally:
            os.close(descriptor)

    def await_saved(self, step: int, *, beat: Callable[[], None], limit: float) -> bool:
        """Wait for a checkpoint to be whole on disk; tells whether it is."""
        deadline = time.monotonic() + limit
        while max(self.saved, self.unsaved) < step and not self.is_gone and time.monotonic() < deadline:
            self.hear(wait=0.1)
            beat()
        return self.saved >= step

    def close(self) -> None:
        """Let go of the line and of the slots, which the keeper goes on holding."""
        self.line.close()
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _answer(self, kind: str) -> Message | None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            message = self.line.take(wait=left)
            if message is None:
                if self.is_gone:
                    return None
                continue
            if message["kind"] == kind:
                return message
            self._take(message)
        return None

    def _lost(self, step: int) -> CheckpointError:
        return CheckpointError(
            f"the state of step {step} is not in memory any more", hint="`supernode resume` goes on from disk."
        )


def check(data: memoryview, piece: Piece, digest: str) -> None:
    """Check a piece's bytes.

    Raises:
        CheckpointError: they are not what was written.
    """
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise CheckpointError(
            f"`{piece.name}` in memory is not what was written", hint="`supernode resume` goes on from disk."
        )
