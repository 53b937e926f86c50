"""The controller's side of the nodes' keepers: processes, what they hold, and saves under way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supernode.errors import MachineError
from supernode.keeping.lines import Line, Message
from supernode.keeping.pulse import Pulse
from supernode.schema.codec import to_json
from supernode.schema.event import Event, Kept, Saved, Unsaved
from supernode.schema.plan import Plan
from supernode.storing.saves import name_of

_ANSWER_SECONDS = 10.0
_END_SECONDS = 20.0


@dataclass(slots=True)
class _Save:
    """A save under way."""

    attempt: int
    begun: float
    stall: float = 0.0
    manifest: dict[str, Any] | None = None
    stored: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_committing: bool = False


class _Process:
    """One node's keeper."""

    def __init__(self, node: int, order: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self.node = node
        self.process = subprocess.Popen(
            [sys.executable, "-m", "supernode.keeping.keeper", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        theirs.close()
        self.line = Line(ours)
        self.pulse = Pulse()  # Until its first word it imports, and may get no core for a while.
        self.line.send("begin", node=node, **order)


class Keepers:
    """All keepers of a run.

    Args:
        folder: of the run.
        plan: whose ranks' state they keep.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._nodes = min(plan.job.recovery.nodes, plan.ranks)
        self._kept: dict[int, set[int]] = {}
        self._saves: dict[int, _Save] = {}
        self._attempt = 0
        self._failed: set[tuple[int, int]] = set()
        self._grown_old = False
        self._events: deque[Event] = deque()
        self._token = 0
        self._keepers = [self._start(node) for node in range(self._nodes)]
        for node in range(self._nodes):
            self._link(node, range(node))

    def _start(self, node: int) -> _Process:
        spec = json.loads(to_json(self._plan.job.checkpoint))
        return _Process(node, {"nodes": self._nodes, "folder": str(self._folder), "checkpoint": spec})

    def _link(self, node: int, others: Any) -> None:
        for other in others:
            one, two = socket.socketpair()
            self._keepers[node].line.send("link", descriptors=(one.fileno(),), node=other)
            self._keepers[other].line.send("link", descriptors=(two.fileno(),), node=node)
            one.close()
            two.close()

    @property
    def connections(self) -> list[socket.socket]:
        """What to wait for: there is something to `hear` then."""
        return [keeper.line.connection for keeper in self._keepers]

    @property
    def pids(self) -> list[int]:
        """Process numbers, by node."""
        return [keeper.process.pid for keeper in self._keepers]

    def node_of(self, rank: int) -> int:
        """Return the node that a rank lies on: ranks lie in their order, evenly."""
        return rank * self._nodes // self._plan.ranks

    def begin(self, plan: Plan, *, attempt: int) -> None:
        """Get ready for the ranks of a plan, in the same run.

        What other ranks wrote before stays until these have all handed over theirs.

        Args:
            attempt: number of the launch.
        """
        self._plan, self._attempt, self._grown_old = plan, attempt, True
        self._failed = {(step, of) for step, of in self._failed if of >= attempt}
        self._kept.clear()

    def forget(self) -> None:
        """Have all state in memory let go of; what is on disks stays."""
        for keeper in self._keepers:
            keeper.line.send("ranks", writers=[])

    def attach(self, rank: int) -> socket.socket:
        """Return a rank's end of a new line to its keeper."""
        ours, theirs = socket.socketpair()
        self._keepers[self.node_of(rank)].line.send("rank", descriptors=(ours.fileno(),), writer=rank)
        ours.close()
        return theirs

    def renew(self) -> list[int]:
        """Start keepers anew that are gone; returns the ranks that need a new line."""
        ranks: list[int] = []
        for node, keeper in enumerate(self._keepers):
            if keeper.process.poll() is None and not keeper.line.is_closed:
                continue
            keeper.line.close()
            keeper.process.kill()
            keeper.process.wait()
            self._keepers[node] = self._start(node)
            self._link(node, [other for other in range(self._nodes) if other != node])
            ranks += [rank for rank in range(self._plan.ranks) if self.node_of(rank) == node]
            for step in list(self._saves):
                self._give_up(step, f"the keeper of node {node} was lost", "the next save tries again.")
        return ranks

    def expect(self, step: int, manifest: dict[str, Any], *, stall: float, attempt: int) -> None:
        """Take note of a save that ranks have handed over, for which they stood still for `stall` seconds."""
        if (save := self._save(step, attempt)) is not None:
            save.manifest, save.stall = manifest, stall
            self._commit_if_whole(step)

    def _save(self, step: int, attempt: int) -> _Save | None:
        """Return the save of a step that a launch made; None where it has been given up."""
        known = self._saves.get(step)
        if known is not None and known.attempt >= attempt:
            return known if known.attempt == attempt else None
        if (step, attempt) in self._failed or attempt < self._attempt:
            return None
        self._saves[step] = _Save(attempt=attempt, begun=time.monotonic())
        return self._saves[step]

    @property
    def under_way(self) -> list[int]:
        """Steps of the saves that are not on disk yet."""
        return sorted(self._saves)

    def hear(self) -> list[Event]:
        """Return what keepers said."""
        for keeper in self._keepers:
            while (message := keeper.line.take()) is not None:
                keeper.pulse.pid = keeper.process.pid
                keeper.pulse.beat()
                self._take(message)
        events = list(self._events)
        self._events.clear()
        return events

    @property
    def is_lame(self) -> bool:
        """Whether a keeper is gone."""
        return any(keeper.line.is_closed for keeper in self._keepers)

    def end_frozen(self, limit: float) -> bool:
        """End keepers without a sign of life for `limit` seconds; tells whether one is to be renewed."""
        frozen = [keeper for keeper in self._keepers if keeper.pulse.is_frozen(limit)]
        for keeper in frozen:
            keeper.line.close()
            keeper.process.kill()
        return bool(frozen)

    def _take(self, message: Message) -> None:
        kind, step = message["kind"], message.get("step", -1)
        if kind == "kept":
            holders = self._kept.setdefault(step, set())
            holders.add(message["writer"])
            if len(holders) == self._plan.ranks:
                self._events.append(Kept(step=step))
                if self._grown_old:
                    self._grown_old = False
                    for keeper in self._keepers:
                        keeper.line.send("ranks", writers=list(range(self._plan.ranks)))
                self._kept = {other: who for other, who in self._kept.items() if other > step}
        elif kind == "stored":
            # It may be heard before the ranks' own word.
            if (save := self._save(step, message["attempt"])) is not None:
                save.stored[message["stored"]["writer"]] = message["stored"]
                self._commit_if_whole(step)
        elif kind == "unsaved":
            if self._save(step, message["attempt"]) is not None:
                self._give_up(step, message["message"], message["hint"], message["error"])
        elif kind == "committed" and (save := self._save(step, message["attempt"])) is not None:
            del self._saves[step]
            for keeper in self._keepers:
                keeper.line.send("committed", step=step)
            self._events.append(
                Saved(
                    step=step, checkpoint=name_of(step), nbytes=message["nbytes"], seconds=save.stall,
                    took=time.monotonic() - save.begun,
                )
            )  # fmt: skip

    def _commit_if_whole(self, step: int) -> None:
        save = self._saves[step]
        if save.manifest is not None and len(save.stored) == self._plan.ranks and not save.is_committing:
            save.is_committing = True
            self._keepers[0].line.send(
                "commit", manifest=save.manifest, stored=list(save.stored.values()), attempt=save.attempt
            )

    def _give_up(self, step: int, reason: str, hint: str, kind: str = "CheckpointError") -> None:
        attempt = self._saves.pop(step).attempt
        self._failed.add((step, attempt))
        for keeper in self._keepers:
            keeper.line.send("drop", step=step, attempt=attempt)
        self._events.append(Unsaved(step=step, reason=reason, hint=hint, kind=kind))

    def newest(self, *, verify: bool = True) -> tuple[int, str] | None:
        """Return the newest step whose whole state is in memory, and where: `memory`, or a `partner`'s in part.

        Keepers that are gone must be `renew`ed first. Saves that some rank has not handed over are given up.

        Args:
            verify: take no byte for whole that is not what was written.
        """
        self._token += 1
        held: dict[tuple[int, int], set[int]] = {}
        own: dict[tuple[int, int], set[int]] = {}
        for keeper in self._keepers:
            keeper.line.send("steps", token=self._token, verify=verify)
        for node, keeper in enumerate(self._keepers):
            for writer, steps in self._steps_of(keeper).items():
                for step, writers in steps.items():
                    held.setdefault((step, writers), set()).add(writer)
                    if writer * self._nodes // writers == node:
                        own.setdefault((step, writers), set()).add(writer)
        common = {step: (step, of) for (step, of), writers in held.items() if writers == set(range(of))}
        for step, save in list(self._saves.items()):
            handed = held.get((step, self._plan.ranks), set()) | set(save.stored)
            if save.manifest is None or not handed >= set(range(self._plan.ranks)):
                self._give_up(step, "a rank was lost before it had handed over its state", "the next save tries again.")
        if not common:
            return None
        step = max(common)
        at_home = own.get(common[step], set()) == held[common[step]]
        return step, "memory" if at_home else "partner"

    def _steps_of(self, keeper: _Process) -> dict[int, dict[int, int]]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not keeper.line.is_closed:
            message = keeper.line.take(wait=left)
            if message is None:
                continue
            if message["kind"] == "steps" and message["token"] == self._token:
                return {
                    int(writer): {int(step): writers for step, writers in steps.items()}
                    for writer, steps in message["steps"].items()
                }
            self._take(message)
        return {}

    def settle(self, *, limit: float) -> None:
        """Wait until no save is under way, or `limit` seconds; what is not on disk by then is given up."""
        deadline = time.monotonic() + limit
        while self._saves and time.monotonic() < deadline and not self.is_lame:
            for keeper in self._keepers:
                if (message := keeper.line.take(wait=0.02)) is not None:
                    self._take(message)
        for step in list(self._saves):
            self._give_up(step, "it was not on disk in time", "see whether the disk is slow or gone.")

    def close(self) -> None:
        """End the keepers; what only they hold is gone then."""
        for keeper in self._keepers:
            keeper.line.close()
            keeper.process.kill()
        for keeper in self._keepers:
            try:
                keeper.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise MachineError(
                    f"process {keeper.process.pid} does not end within {_END_SECONDS:g} s of being killed",
                    hint="look for processes in state D.",
                ) from error
