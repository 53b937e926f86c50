"""Ranks as processes of this computer, forked from a server that has imported torch once."""

from __future__ import annotations

import math
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from supernode.backends.awaiting import CHECK, Awaited
from supernode.backends.fork_client import END_SECONDS, ForkServer
from supernode.backends.hearing import Ranks
from supernode.backends.rank import Rank
from supernode.backends.serving import Serving
from supernode.keeping.keepers import Keepers
from supernode.keeping.lines import Line
from supernode.keeping.slots import NOTHING
from supernode.schema.codec import to_json
from supernode.schema.event import Await, Event, KillRanks, Launch, RanksEnded, Restored
from supernode.storing.saves import step_of

_FORKS_AT_ONCE = 100  # Two descriptors each; the kernel passes at most 253 in one message (SCM_MAX_FD).
_AGAIN = ("incarnation", "plan", "meeting", "checkpoint", "memory", "threads")
"""What a rank is told that begins again in its process."""


_LOOK_SECONDS = 1.0
"""Between looks whether saves can still become whole once the ranks have left."""


class LocalBackend:
    """Runs a plan's ranks on this computer.

    Args:
        folder: of the run; logs and the ranks' meeting place lie in it.
        silence: seconds without progress of any rank after which the one that is behind counts as lost.
        frozen: seconds without a sign of life from one rank after which it counts as lost.
        server: a server started earlier; this backend ends it.
    """

    def __init__(
        self, folder: Path, *, silence: float, frozen: float = math.inf, server: ForkServer | None = None
    ) -> None:
        self.folder, self.silence, self.frozen = folder, silence, frozen
        self._serving = Serving(server, self._exited)
        self._ranks = Ranks(self._saving)
        self._keepers: Keepers | None = None
        self._looked = 0.0
        self._request: dict[str, Any] = {}
        self._has_ended = False
        self._awaited: Awaited | None = None
        self._selector = DefaultSelector()
        self._selector.register(self.server.connection, EVENT_READ, None)

    @property
    def server(self) -> ForkServer:
        """What ranks are forked from."""
        return self._serving.server

    def now(self) -> float:
        """Return the time in seconds since the epoch."""
        return time.time()

    def launch(self, command: Launch) -> None:
        """Fork the ranks of a plan, or those that are missing, and have the others begin again."""
        plan = command.plan
        if command.keep and len(self._ranks) and self._serving.hear_more() is not None:
            self._end_server()
        if not command.keep or self.server.has_ended:
            self._drop_ranks()
        if self.server.has_ended:
            self._start_server()
        self._ranks.launched = time.monotonic()
        self._has_ended, self._awaited = False, None
        meeting = self.folder / "meeting" / str(command.incarnation)
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)
        for folder in (meeting, self.folder / "logs", self.folder / "checkpoints"):
            folder.mkdir(parents=True, exist_ok=True)
        if self._keepers is None:
            self._keepers = Keepers(self.folder, plan)
            self._watch_keepers()
        self._ranks.events += self._keepers.hear()
        new_lines = self._renew_keepers()
        self._keepers.begin(plan, attempt=command.incarnation)
        memory = self._go_on_from(command)
        self._ranks.begin(command.incarnation)
        self._request = {
            "kind": "fork", "incarnation": command.incarnation, "plan": to_json(plan), "folder": str(self.folder),
            "meeting": str(meeting), "checkpoint": command.checkpoint, "memory": memory,
            "pipeline": plan.layout.pipeline > 1,
            "threads": plan.job.threads or max(1, len(os.sched_getaffinity(0)) // plan.ranks),
        }  # fmt: skip
        for rank in self._ranks:
            if rank.can_go_on and rank.number < plan.ranks:
                self._tell_again(rank, new_line=rank.number in new_lines)
            else:
                self._forget(rank)
        self._fork([number for number in range(plan.ranks) if number not in self._ranks])

    def _go_on_from(self, command: Launch) -> int:
        """Tell where ranks have their state from; returns the step that they take from memory, or -1."""
        assert self._keepers is not None
        self._distrust()
        found = self._keepers.newest()
        memory, source = found if found is not None else (NOTHING, "")
        step = step_of(command.checkpoint) if command.checkpoint else 0
        if memory < max(step, 1):
            memory, source = NOTHING, "disk" if command.checkpoint else "start"
        self._ranks.events += self._keepers.hear()
        step = memory if memory != NOTHING else step
        self._ranks.events.append(Restored(incarnation=command.incarnation, step=step, source=source))
        return memory

    def _distrust(self) -> None:
        """Let go of what is in memory where a rank found that it is not what it should be."""
        if self._ranks.memory_lost and self._keepers is not None:
            self._ranks.memory_lost = ""
            self._keepers.forget()

    def in_memory(self) -> int:
        """Return the newest step whose state all nodes have in memory, -1 for none."""
        if self._keepers is None:
            return NOTHING
        self._distrust()
        found = self._keepers.newest(verify=False)
        return found[0] if found is not None else NOTHING

    def _tell_again(self, rank: Rank, *, new_line: bool) -> None:
        assert self._keepers is not None
        rank.begin_again()
        keeper = self._keepers.attach(rank.number) if new_line else None
        descriptors = (keeper.fileno(),) if keeper is not None else ()
        rank.line.send("again", descriptors=descriptors, **{key: self._request[key] for key in _AGAIN})
        if keeper is not None:
            keeper.close()

    def _fork(self, numbers: list[int]) -> None:
        assert self._keepers is not None
        for start in range(0, len(numbers), _FORKS_AT_ONCE):
            batch = numbers[start : start + _FORKS_AT_ONCE]
            pairs = [socket.socketpair() for _ in batch]
            keepers = [self._keepers.attach(number) for number in batch]
            theirs = [one.fileno() for pair, keeper in zip(pairs, keepers, strict=True) for one in (pair[1], keeper)]
            self._serving.fork(self._request | {"ranks": batch}, tuple(theirs))
            for number, (ours, other), keeper in zip(batch, pairs, keepers, strict=True):
                other.close()
                keeper.close()
                self._ranks.add(Rank(number, Line(ours), launch=self._ranks.incarnation))
                self._selector.register(ours, EVENT_READ, number)

    def kill_rank(self, rank: int) -> None:
        """Kill one rank as a failing card would."""
        if (found := self._ranks.get(rank)) is not None:
            self._serving.kill(found)

    def kill_ranks(self, command: KillRanks) -> None:
        """End every rank that is left; none is left when this returns."""
        is_up = self.server.is_ready and not self.server.has_ended
        if not is_up or not self._serving.kill_all():
            self._end_server()
        self._ranks.hear_all()
        if self._keepers is not None:  # What all ranks had handed over goes to disk all the same.
            self._keepers.newest(verify=False)
            self._keepers.settle(limit=END_SECONDS)
            self._ranks.events += self._keepers.hear()
        self._drop_ranks()
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)

    def ask_to_stop(self) -> None:
        """Tell the first rank, which tells the others with the step's next collective."""
        if (first := self._ranks.get(0)) is not None:
            first.line.send("stop")

    def await_card(self, command: Await) -> None:
        """Check a card until it computes as it should, or its time is up."""
        self._awaited = Awaited(command.card, until=time.monotonic() + command.seconds)

    def poll(self, timeout: float) -> list[Event]:
        """Return what happened, waiting up to `timeout` seconds for the first of it."""
        if not self._ranks.events:
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    self._hear_server()
                elif key.data == "keepers":
                    self._hear_keepers()
                elif (rank := self._ranks.get(key.data)) is not None:
                    self._hear_rank(rank)
            if self._keepers is not None and self._keepers.end_frozen(self.frozen):
                self._hear_keepers()
            self._check_ranks()
            self._check_card()
            self._end_if_all_is_done()
        return self._ranks.take_events()

    def close(self) -> None:
        """End all ranks and the server."""
        self._drop_ranks()
        self._selector.close()
        self.server.close()
        if self._keepers is not None:
            self._keepers.close()
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)

    def _start_server(self) -> None:
        self._end_server()
        self._serving.renew()
        self._selector.register(self.server.connection, EVENT_READ, None)

    def _end_server(self) -> None:
        """End a server that is gone, or still imports torch and hears nothing; the next launch starts another one.

        It may have got ready and forked this very moment: the kernel ends its ranks with it, and their lines then end.
        """
        with suppress(KeyError, ValueError):  # It was ended before.
            self._selector.unregister(self.server.connection)
        self.server.close()
        deadline = time.monotonic() + END_SECONDS
        for rank in self._ranks:
            while not rank.line.is_closed and time.monotonic() < deadline:
                self._hear_rank(rank)
                time.sleep(0.0 if rank.line.is_closed else 0.01)

    def _hear_server(self) -> None:
        gone = self._serving.hear()
        if gone is not None:  # The kernel ends its ranks with it.
            self._end_server()
            self._ranks.hear_all()
            self._ranks.lose_all(gone.message)

    def _check_card(self) -> None:
        """Have a process on the card that the run waits for compute what is known, until one does it right."""
        if self._awaited is None:
            return
        if self._awaited.is_due:
            self._serving.fork(self._request | self._awaited.begin(), ())
        if (told := self._awaited.verdict()) is not None:
            self._awaited = None
            self._ranks.events.append(told)

    def _exited(self, launch: int, number: int, code: int) -> None:
        if launch == CHECK:
            if self._awaited is not None and self._awaited.card == number:
                self._awaited.exited(code)
            return
        rank = self._ranks.get(number)
        if rank is not None and rank.launch == launch:
            self._ranks.exited(rank, code)

    def _hear_rank(self, rank: Rank) -> None:
        self._ranks.hear(rank)
        if rank.line.is_closed:
            with suppress(KeyError, ValueError):  # It may be found twice: told by the server, and here.
                self._selector.unregister(rank.line.connection)

    def _saving(self, step: int, manifest: dict[str, Any], stall: float, incarnation: int) -> None:
        if self._keepers is not None:
            self._keepers.expect(step, manifest, stall=stall, attempt=incarnation)
            self._ranks.events += self._keepers.hear()

    def _watch_keepers(self) -> None:
        assert self._keepers is not None
        for connection in self._keepers.connections:
            with suppress(KeyError):
                self._selector.register(connection, EVENT_READ, "keepers")

    def _renew_keepers(self) -> list[int]:
        """Start keepers anew that are gone; returns the ranks that need a new line to theirs."""
        assert self._keepers is not None
        if not self._keepers.is_lame:
            return []
        for key in list(self._selector.get_map().values()):
            if key.data == "keepers":
                self._selector.unregister(key.fileobj)
        ranks = self._keepers.renew()
        self._watch_keepers()
        return ranks

    def _hear_keepers(self) -> None:
        assert self._keepers is not None
        self._ranks.events += self._keepers.hear()
        for number in self._renew_keepers():
            if (rank := self._ranks.get(number)) is not None:
                keeper = self._keepers.attach(number)
                rank.line.send("keeper", descriptors=(keeper.fileno(),))
                keeper.close()
        self._ranks.events += self._keepers.hear()

    @property
    def keeper_pids(self) -> list[int]:
        """Process numbers of the keepers, by node."""
        return self._keepers.pids if self._keepers is not None else []

    def _forget(self, rank: Rank) -> None:
        """Let go of a rank that is gone, or end one that is not."""
        if not rank.told_end:
            self._serving.kill(rank)
        with suppress(KeyError, ValueError):
            self._selector.unregister(rank.line.connection)
        rank.line.close()
        self._ranks.remove(rank)

    def _drop_ranks(self) -> None:
        for rank in self._ranks:
            with suppress(KeyError, ValueError):
                self._selector.unregister(rank.line.connection)
            rank.line.close()
        self._ranks.clear()

    def _check_ranks(self) -> None:
        """Look for ranks that live and do not go on."""
        if late := self._ranks.late:  # They are stuck where nothing frees them; the others wait for them to meet.
            for rank in late:
                self._forget(rank)
            self._fork([rank.number for rank in late])
        elif (rank_behind := self._ranks.missed(frozen=self.frozen, silence=self.silence)) is not None:
            self._serving.kill(rank_behind)

    def _end_if_all_is_done(self) -> None:
        """Tell that the ranks have ended once all have, and what they handed over is on disk."""
        if self._has_ended or not self._ranks.are_done or self._keepers is None:
            return
        if self._keepers.under_way:
            if time.monotonic() > self._looked + _LOOK_SECONDS:
                self._looked = time.monotonic()
                self._keepers.newest(verify=False)  # What some rank never handed over is given up.
                self._ranks.events += self._keepers.hear()
            return
        self._has_ended = True
        step = max(rank.step for rank in self._ranks)
        self._ranks.events.append(RanksEnded(incarnation=self._ranks.incarnation, step=step))
