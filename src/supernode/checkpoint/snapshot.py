"""How does a rank's state get out of training's way? Copied into a slot while the next step's passes go on.

Passes change no weight and no moment, so these are copied by a thread until the next update, which waits for it. What
passes do change (buffers, a compressor's feedback, whatever a module of the user's moves) is copied before they begin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from supernode.checkpoint.boxes import KINDS, Box, box_of, local_of, share_out
from supernode.checkpoint.source import by_name
from supernode.errors import CheckpointError
from supernode.keeping.client import Keep, check
from supernode.keeping.slots import NOTHING, digest_of
from supernode.storing.part import Piece

_MOVING = ("buffer.", "compressor.")
"""What passes may change, by the beginnings of names."""
_LOOK_SECONDS = 0.05
CHANGED = float(2**20)
"""More than there are ranks: some rank has to agree with all first."""


class Snapshots:
    """Hands one rank's state over to its keeper; all ranks call the same methods at the same steps.

    Args:
        wait: copy everything before going on: updates begin within the passes.
        restored: step whose state the rank has from memory, which must not be overwritten before the next is whole.
        attempt: number of the launch.
    """

    def __init__(self, keep: Keep, *, wait: bool, restored: int = NOTHING, attempt: int = 0) -> None:
        self.keep = keep
        self._wait, self._restored, self._attempt = wait, restored, attempt
        self._offered: Keep | None = None
        self._seen: list[tuple[Any, ...]] = []
        self._looked: list[Box] = []
        self._boxes: list[Box] | None = None
        self._pieces: tuple[Piece, ...] = ()
        self._versions: dict[str, int] = {}
        self._moving: set[str] = set()
        self._behind: set[str] = set()
        self._thread: threading.Thread | None = None
        self._under_way: tuple[int, int, bool] | None = None
        self._held: Mapping[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._knows = self._changed = False
        self.stall = 0.0

    def prepare(self, held: Mapping[str, Tensor]) -> None:
        """Agree with all ranks on who writes what, and make room for it; all call it together, once all is there.

        From here to the next update is seen what passes change.

        Raises:
            CheckpointError: ranks hold different things under one name, or there is no memory.
        """
        self._agree(self._look(held))
        if not self._knows:
            self._versions, self._held = _versions(held), held

    def votes(self) -> float:
        """Return what the ranks' sum of which tells `begin`; asked before the update after whose step a save is due."""
        if self._offered is not self.keep or self._changed:
            return CHANGED
        return 0.0 if self.keep.free() is not None else 1.0

    def begin(
        self, step: int, held: Mapping[str, Tensor], *, votes: float, disk: bool, limit: float,
        beat: Callable[[], None],
    ) -> bool:  # fmt: skip
        """Begin to copy the state of a step; tells whether there was room for it on all ranks.

        Args:
            held: this rank's tensors, as they are in the whole model.
            votes: sum over ranks of what `votes` told; `CHANGED` or more where nobody asked.
            limit: seconds to wait for room; 0 does without this save.
            beat: called while waiting.

        Raises:
            CheckpointError: ranks hold different things under one name, or there is no memory.
        """
        begun = time.perf_counter()
        boxes = self._look(held)
        if votes >= CHANGED or (votes and limit):
            if not self._await_room(boxes, limit, beat):
                return False
        elif votes:
            return False
        slot = self.keep.free()
        if slot is None or boxes != self._boxes:
            # The others go on as agreed. This one has something new, or lost its keeper since.
            self._changed = True
            self.keep.torn(step)
            return True
        self._held, self._under_way = held, (step, slot, disk)
        view = self.keep.view(slot)
        everything = self._wait or not self._knows
        moving: list[Piece] = []
        rest: list[Piece] = []
        for piece in self._pieces:
            is_moving = everything or piece.name.startswith(_MOVING) or piece.name in self._moving
            (moving if is_moving else rest).append(piece)
        self._versions = _versions(held)
        self._digests.clear()
        self._join()
        self._copy(moving, view)
        self._behind = {piece.name for piece in rest}
        if rest:
            self._thread = threading.Thread(target=self._copy, args=(rest, view))
            self._thread.start()
        self.stall = time.perf_counter() - begun
        return True

    def _look(self, held: Mapping[str, Tensor]) -> list[Box]:
        """Return the boxes of tensors; those of last time where nothing about them has changed."""
        seen = [(name, tensor.shape, tensor.dtype, _spread(tensor)) for name, tensor in held.items()]
        if seen != self._seen:
            self._seen, self._looked = seen, [box_of(name, tensor) for name, tensor in held.items()]
        return self._looked

    def _await_room(self, boxes: list[Box], limit: float, beat: Callable[[], None]) -> bool:
        deadline = time.monotonic() + limit
        while True:
            slot = self.keep.free()
            changed = boxes != self._boxes or self._offered is not self.keep
            flags = torch.tensor([float(changed), float(slot is None and not changed), self.keep.is_gone])
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            if flags[0]:
                self._agree(boxes)
                continue
            if not flags[1] and not flags[2]:
                return True
            late = torch.tensor(float(time.monotonic() > deadline))
            dist.all_reduce(late, op=dist.ReduceOp.MAX)
            if late:
                return False
            beat()
            time.sleep(_LOOK_SECONDS)

    def finish(self) -> tuple[int, bool, float] | None:
        """Wait until all is copied and hand it over; returns step, whether it goes to disk, and seconds stood still.

        Called before every update; None where nothing was under way.
        """
        begun = time.perf_counter()
        if self._under_way is not None:
            self._join()
        moved = {name for name, version in _versions(self._held).items() if self._versions[name] != version}
        self._knows |= bool(self._held)
        self._moving |= moved
        self._held = {}
        if self._under_way is None:
            return None
        (step, slot, disk), self._under_way = self._under_way, None
        is_torn = not self._behind.isdisjoint(moved)
        if is_torn:
            self.keep.torn(step)
        else:
            self.keep.whole(slot, step=step, disk=disk, digests=[self._digests[piece.name] for piece in self._pieces])
        return step, disk, self.stall + time.perf_counter() - begun

    def close(self) -> None:
        """Be done with the memory of slots: another launch's state goes there."""
        self._join()
        self._under_way, self._held = None, {}

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _agree(self, boxes: list[Box]) -> None:
        everyone: list[list[Box]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, boxes)
        pieces = share_out(everyone)[dist.get_rank()]
        if pieces != self._pieces or self._offered is not self.keep:
            self.keep.offer(pieces, step=self._restored, writers=dist.get_world_size(), attempt=self._attempt)
        self._boxes, self._pieces, self._offered, self._restored = boxes, pieces, self.keep, NOTHING
        self._changed = False
        if (views := self.keep.fresh()) and pieces:
            # The kernel gives memory as it is first touched, which is half of the time of a first copy.
            self._join()
            self._thread = threading.Thread(target=_touch, args=(views,))
            self._thread.start()

    def _copy(self, pieces: list[Piece], view: memoryview) -> None:
        with torch.no_grad():
            for piece in pieces:
                if piece.nbytes:
                    room = torch.frombuffer(view, dtype=torch.uint8, count=piece.nbytes, offset=piece.start)
                    room.view(KINDS[piece.kind]).view(piece.shape).copy_(local_of(self._held[piece.name]))
                self._digests[piece.name] = digest_of(view, piece)


def _touch(views: list[memoryview]) -> None:
    for view in views:
        torch.frombuffer(view, dtype=torch.uint8).zero_()


def _spread(tensor: Tensor) -> Any:
    return (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None


def _versions(held: Mapping[str, Tensor]) -> dict[str, int]:
    return {
        name: (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version
        for name, tensor in held.items()
    }


class InMemory:
    """The state of a step in the memory of the run's nodes.

    Args:
        keep: this rank's line to its own node's keeper, which gets the rest.
    """

    def __init__(self, keep: Keep, step: int) -> None:
        self.where = f"the nodes' memory of step {step}"
        self._keep, self._step = keep, step
        self._tables = keep.tables(step)
        self.pieces: Mapping[str, list[tuple[int, Piece]]] = by_name(self._tables)
        self._views: dict[int, memoryview] = {}
        self._digests: dict[int, dict[tuple[str, int], str]] = {}

    def read(self, writer: int, piece: Piece, into: memoryview) -> None:
        """Copy a piece, and hold what was copied against its digest."""
        if writer not in self._views:
            view, digests = self._keep.fetch(writer, self._step)
            if len(digests) != len(self._tables[writer]):
                raise CheckpointError(f"{self.where} is gone", hint="`supernode resume` goes on from disk.")
            self._views[writer] = view
            self._digests[writer] = {
                (one.name, one.start): digest for one, digest in zip(self._tables[writer], digests, strict=True)
            }
        into[:] = self._views[writer][piece.start : piece.start + piece.nbytes]
        check(into, piece, self._digests[writer][piece.name, piece.start])
