"""How does a node's state get from memory to disks while training goes on? One piece after another, giving way."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from supernode.errors import CheckpointError, SupernodeError
from supernode.keeping.slots import Slots
from supernode.schema import plain
from supernode.schema.lasting import CheckpointSpec
from supernode.schema.manifest import Manifest
from supernode.storing.manifests import digest
from supernode.storing.pack import PACKS, Before
from supernode.storing.saves import DRAFT, Saves, Stored, name_of, part_name

NICE = 10
"""How far writing gives way: where ranks want all cores it gets about a tenth of one, and where they rest all it wants.
The kernel knows better than we when that is. SCHED_IDLE would get nothing for minutes."""


class Writing:
    """Writes saves in a thread of its own.

    Args:
        home: number of the node's own disk.
        tell: says something to a rank, or (None) to the controller; any thread may call it.

    Attributes:
        writes: by writer, the steps on their way to disk and the slots that hold them.
    """

    def __init__(self, saves: Saves, spec: CheckpointSpec, *, home: int, tell: Callable[..., None]) -> None:
        self._saves, self._spec, self._tell = saves, spec, tell
        self._home = home % len(saves.disks)
        self._before: dict[int, Before] = {}
        self._open: dict[int, dict[int, Before]] = {}
        self._dropped: set[tuple[int, int]] = set()
        self._last: dict[tuple[int, int], int] = {}
        self.writes: dict[int, dict[int, int]] = {}
        self._looked: set[int] = set()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._go, daemon=True).start()

    def store(self, step: int, writer: int, held: Slots, slot: int, *, attempt: int) -> None:
        """Have a writer's stream written, for the save of a step that a launch of this number makes."""
        self.writes.setdefault(writer, {})[step] = slot
        self._last[writer, step] = attempt
        digests = list(held.digests[slot])  # The slot may be another step's by the time that it is written.
        self._jobs.put(lambda: self._store(step, writer, held, slot, digests, attempt))

    def commit(self, manifest: dict[str, Any], stored: list[dict[str, Any]], *, attempt: int) -> None:
        """Have a save committed, of which all writers' shares are durable, and older ones pruned."""
        self._jobs.put(lambda: self._commit(manifest, stored, attempt))

    def committed(self, step: int) -> None:
        """Build on a save from now on: it is whole on all disks."""
        self._jobs.put(lambda: self._before.update(self._open.pop(step, {})))

    def drop(self, step: int, *, attempt: int, first: bool) -> None:
        """Give a save up; the first node deletes what there is of it."""
        self._dropped.add((step, attempt))
        self._jobs.put(lambda: self._drop(step, first=first))

    def _go(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            self._jobs.get()()

    def _store(self, step: int, writer: int, held: Slots, slot: int, digests: list[str], attempt: int) -> None:
        begun = time.perf_counter()
        try:
            if (step, attempt) in self._dropped:
                return
            held.clean(slot)
            stored, part = self._saves.store(
                step, writer, held.stream(slot), held.pieces, home=self._home, before=self._build_on(writer),
                compress=self._spec.compress,
            )  # fmt: skip
            if not held.is_whole(slot, digests):
                raise CheckpointError(
                    f"the state of step {step} changed while it was written", hint="the next save tries again."
                )
        except SupernodeError as error:
            self._unsaved(step, attempt, error)
            return
        except Exception as error:  # noqa: BLE001 - a thread's end would be a hang
            self._unsaved(step, attempt, CheckpointError(f"{type(error).__name__}: {error}", hint="see logs/."))
            return
        finally:
            if self._last.get((writer, step)) == attempt:  # Else a later launch has handed the step over again.
                del self._last[writer, step]
                self.writes.get(writer, {}).pop(step, None)
                self._tell(writer, "stored", step=step)
        self._open.setdefault(step, {})[writer] = Before(part=part, packs=stored.packs)
        seconds = time.perf_counter() - begun
        self._tell(None, "stored", step=step, attempt=attempt, stored=asdict(stored), seconds=seconds)

    def _build_on(self, writer: int) -> Before | None:
        """Return the writer's newest save; a new keeper finds it on disk."""
        if writer not in self._before and writer not in self._looked:
            self._looked.add(writer)
            with suppress(SupernodeError, OSError):
                for _, name in self._saves.all()[-1:]:
                    found = self._saves.before(name, self._saves.manifest(name), writer)
                    if found is not None:
                        self._before[writer] = found
        return self._before.get(writer)

    def _commit(self, manifest: dict[str, Any], stored: list[dict[str, Any]], attempt: int) -> None:
        begun = time.perf_counter()
        draft = plain.value(Manifest, manifest)
        try:
            shares = [plain.value(Stored, one) for one in stored]
            self._check_there(draft.step, shares)
            made = self._saves.commit(draft, shares)
        except SupernodeError as error:
            self._unsaved(draft.step, attempt, error)
            return
        with suppress(SupernodeError):  # It is saved; what could not be deleted is next time.
            self._saves.prune(keep=self._spec.keep, newest=draft.step)
        self._tell(
            None, "committed", step=draft.step, attempt=attempt, seconds=time.perf_counter() - begun,
            nbytes=sum(one["nbytes"] for one in stored), files=len(made.files),
        )  # fmt: skip

    def _check_there(self, step: int, shares: list[Stored]) -> None:
        """Check that what is to be committed lies on the disks: an earlier try at this step may have been deleted late.

        Raises:
            CheckpointError: it does not.
        """
        for one in shares:
            file = f"{DRAFT}{name_of(step)}/{part_name(one.writer)}"
            found = [disk.read(file) if disk.size(file) == one.part[0] else b"" for disk in self._saves.disks]
            packs = {name: pack for name, pack in one.packs.items() if name.startswith(f"{PACKS}/{step:08d}-")}
            if any(digest(data) != one.part[1] for data in found) or not all(
                self._saves.spread.holds(name, pack) for name, pack in packs.items()
            ):
                raise CheckpointError(
                    f"what rank {one.writer} saved of step {step} is gone from a disk",
                    hint="the next save tries again.",
                )

    def _drop(self, step: int, *, first: bool) -> None:
        self._open.pop(step, None)
        if first:
            self._saves.drop_draft(step)

    def _unsaved(self, step: int, attempt: int, error: SupernodeError) -> None:
        self._tell(
            None, "unsaved", step=step, attempt=attempt, error=type(error).__name__, message=error.message,
            hint=error.hint,
        )  # fmt: skip
