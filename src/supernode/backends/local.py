"""Ranks as processes of this computer, forked from a server that has imported torch once."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import socket
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from supernode.backends.fork_client import END_SECONDS, ForkServer
from supernode.backends.rank import Rank
from supernode.errors import MachineError
from supernode.keeping.keepers import Keepers
from supernode.keeping.lines import Line
from supernode.keeping.slots import NOTHING
from supernode.schema.codec import to_json
from supernode.schema.event import (
    Evaluated,
    Event,
    Kept,
    KillRanks,
    Launch,
    Noted,
    RankFailed,
    RankLost,
    RankReady,
    RanksEnded,
    Restored,
    Saved,
    StepDone,
    Timed,
    Unsaved,
)
from supernode.storing.saves import step_of

_FORKS_AT_ONCE = 100  # Two descriptors each; the kernel passes at most 253 in one message (SCM_MAX_FD).
_START_SECONDS = 120.0
_BACK_SECONDS = 5.0
"""How long a rank that was told to begin again may take to let go of what it did."""
_BLAME_SECONDS = 0.5
"""How long a rank that lost a peer waits for that peer's own end, which tells more."""


_TOGETHER_SECONDS = 0.05
"""How long deaths are waited for that come with one: a node takes all its ranks along."""
_AGAIN = ("incarnation", "plan", "meeting", "checkpoint", "memory", "threads")
"""What a rank is told that begins again in its process."""
_FACTS = (StepDone, Evaluated, Saved, Unsaved, Kept, Noted)
"""What a rank or keeper says that does not end with it."""


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
        self.server = server or ForkServer()
        self._ranks: dict[int, Rank] = {}
        self._keepers: Keepers | None = None
        self._request: dict[str, Any] = {}
        self._incarnation = 0
        self._launched = 0.0
        self._ended = False
        self._token = 0
        self._selector = DefaultSelector()
        self._selector.register(self.server.connection, EVENT_READ, None)
        self._events: deque[Event] = deque()
        self._unexplained: tuple[float, RankLost] | None = None
        self._was_served = self.server.is_ready

    def now(self) -> float:
        """Return the time in seconds since the epoch."""
        return time.time()

    def launch(self, command: Launch) -> None:
        """Fork the ranks of a plan, or those that are missing, and have the others begin again."""
        plan = command.plan
        if command.keep:
            self._hear_other_deaths()
        if not command.keep or self.server.has_ended:
            self._drop_ranks()
        if self.server.has_ended:
            self._start_server()
        self._launched, self._ended, self._unexplained = time.monotonic(), False, None
        meeting = self.folder / "meeting" / str(command.incarnation)
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)
        for folder in (meeting, self.folder / "logs", self.folder / "checkpoints"):
            folder.mkdir(parents=True, exist_ok=True)
        if self._keepers is None:
            self._keepers = Keepers(self.folder, plan)
            self._watch_keepers()
        self._events += self._keepers.hear()
        new_lines = self._renew_keepers()
        self._keepers.begin(plan, attempt=command.incarnation)
        found = self._keepers.newest()
        memory, source = found if found is not None else (NOTHING, "")
        saved = step_of(command.checkpoint) if command.checkpoint else 0
        if memory < max(saved, 1):
            memory, source = NOTHING, "disk" if command.checkpoint else "start"
        self._events += self._keepers.hear()
        step = memory if memory != NOTHING else saved
        self._incarnation = command.incarnation
        self._events.append(Restored(incarnation=command.incarnation, step=step, source=source))
        self._request = {
            "kind": "fork", "incarnation": command.incarnation, "plan": to_json(plan), "folder": str(self.folder),
            "meeting": str(meeting), "checkpoint": command.checkpoint, "memory": memory,
            "pipeline": plan.layout.pipeline > 1,
            "threads": plan.job.threads or max(1, len(os.sched_getaffinity(0)) // plan.ranks),
        }  # fmt: skip
        self._hear_last_words()
        living = [rank for rank in self._ranks.values() if rank.can_go_on and rank.number < plan.ranks]
        for rank in [rank for rank in self._ranks.values() if rank not in living]:
            self._forget(rank)
        for rank in living:
            rank.begin_again()
            keeper = self._keepers.attach(rank.number) if rank.number in new_lines else None
            rank.line.send(
                "again", descriptors=(keeper.fileno(),) if keeper is not None else (),
                **{key: self._request[key] for key in _AGAIN},
            )  # fmt: skip
            if keeper is not None:
                keeper.close()
        self._fork([number for number in range(plan.ranks) if number not in self._ranks])

    def in_memory(self) -> int:
        """Return the newest step whose state all nodes have in memory, -1 for none."""
        if self._keepers is None:
            return NOTHING
        found = self._keepers.newest(verify=False)
        return found[0] if found is not None else NOTHING

    def _fork(self, numbers: list[int]) -> None:
        assert self._keepers is not None
        for start in range(0, len(numbers), _FORKS_AT_ONCE):
            batch = numbers[start : start + _FORKS_AT_ONCE]
            pairs = [socket.socketpair() for _ in batch]
            keepers = [self._keepers.attach(number) for number in batch]
            theirs = [one.fileno() for pair, keeper in zip(pairs, keepers, strict=True) for one in (pair[1], keeper)]
            with suppress(MachineError):  # The server is gone, which `poll` tells.
                self.server.send(self._request | {"ranks": batch}, tuple(theirs))
            for number, (ours, other), keeper in zip(batch, pairs, keepers, strict=True):
                other.close()
                keeper.close()
                self._ranks[number] = Rank(number, Line(ours), launch=self._incarnation)
                self._selector.register(ours, EVENT_READ, number)

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

    @property
    def keeper_pids(self) -> list[int]:
        """Process numbers of the keepers, by node."""
        return self._keepers.pids if self._keepers is not None else []

    def kill_rank(self, rank: int) -> None:
        """Kill one rank as a failing card would."""
        if rank in self._ranks:
            with suppress(MachineError):  # The server is gone and all ranks with it, which `poll` tells.
                self.server.send({"kind": "kill", "incarnation": self._ranks[rank].launch, "rank": rank})

    def kill_ranks(self, command: KillRanks) -> None:
        """End every rank that is left; none is left when this returns."""
        if self.server.is_ready and not self.server.has_ended:
            self._have_ranks_ended()
        else:
            self._end_server()
        self._hear_last_words()
        if self._keepers is not None:  # What all ranks had handed over gets to disk all the same.
            self._keepers.newest()
            self._keepers.settle(limit=END_SECONDS)
            self._events += self._keepers.hear()
        self._drop_ranks()
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)

    def _have_ranks_ended(self) -> None:
        self._token += 1
        with suppress(MachineError):  # Reading tells that it is gone.
            self.server.send({"kind": "kill_all", "token": self._token})
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            messages = self._server_lines(wait=1.0)
            if messages is None:
                self._end_server()
                return
            if any(m["kind"] == "gone" and m["token"] == self._token for m in messages):
                break
        else:
            raise MachineError(
                f"ranks do not end within {END_SECONDS:g} s of being killed", hint="look for processes in state D."
            )

    def _end_server(self) -> None:
        """End a server that is gone, or still imports torch and hears nothing; the next launch starts another one.

        It may have got ready and forked this very moment: the kernel ends its ranks with it, and their lines then end.
        """
        with suppress(KeyError, ValueError):  # It was ended before.
            self._selector.unregister(self.server.connection)
        self.server.close()
        deadline = time.monotonic() + END_SECONDS
        for rank in self._ranks.values():
            while not rank.line.is_closed and time.monotonic() < deadline:
                self._hear_rank(rank)
                time.sleep(0.0 if rank.line.is_closed else 0.01)

    def _start_server(self) -> None:
        self._end_server()
        self.server = ForkServer()
        self._selector.register(self.server.connection, EVENT_READ, None)

    def ask_to_stop(self) -> None:
        """Tell the first rank, which tells the others with the step's next collective."""
        if 0 in self._ranks:
            self._ranks[0].line.send("stop")

    def poll(self, timeout: float) -> list[Event]:
        """Return what happened, waiting up to `timeout` seconds for the first of it."""
        if not self._events:
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    self._hear_server()
                elif key.data == "keepers":
                    self._hear_keepers()
                elif key.data in self._ranks:
                    self._hear_rank(self._ranks[key.data])
            self._check_ranks()
            self._end_if_all_is_done()
        if self._unexplained is not None and time.monotonic() > self._unexplained[0]:
            self._events.append(self._unexplained[1])
            self._unexplained = None
        found = list(self._events)
        self._events.clear()
        return found

    def close(self) -> None:
        """End all ranks and the server."""
        self._drop_ranks()
        self._selector.close()
        self.server.close()
        if self._keepers is not None:
            self._keepers.close()
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)

    def _hear_last_words(self) -> None:
        """Read what ranks said and nobody has read yet: a checkpoint may have been saved."""
        for rank in self._ranks.values():
            self._hear_rank(rank)

    def _hear_other_deaths(self) -> None:
        deadline = time.monotonic() + _TOGETHER_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not self.server.has_ended:
            if not select.select([self.server.connection], [], [], left)[0]:
                break
            self._hear_server()

    def _forget(self, rank: Rank) -> None:
        """Let go of a rank that is gone, or end one that is not."""
        if not rank.told_end:
            self.kill_rank(rank.number)
        with suppress(KeyError, ValueError):
            self._selector.unregister(rank.line.connection)
        rank.line.close()
        self._ranks.pop(rank.number, None)

    def _drop_ranks(self) -> None:
        """Forget the ranks, and of what is still to be told all but what stays true without them."""
        for rank in self._ranks.values():
            with suppress(KeyError, ValueError):
                self._selector.unregister(rank.line.connection)
            rank.line.close()
        self._ranks.clear()
        facts = [event for event in self._events if isinstance(event, _FACTS)]
        self._events = deque(facts)
        self._unexplained = None

    def _server_lines(self, *, wait: float | None) -> list[dict[str, Any]] | None:
        """Return what the server said; None if it is gone."""
        self.server.connection.settimeout(wait)
        try:
            data = self.server.connection.recv(65_536)
        except (TimeoutError, BlockingIOError):
            return []
        except OSError:
            data = b""
        finally:
            with suppress(OSError):
                self.server.connection.settimeout(None)
        if not data:
            return None
        *lines, self.server.pending = (self.server.pending + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if message["kind"] == "broken":
                raise MachineError(
                    f"ranks cannot start: {message['message']}",
                    hint="install them with `pip install 'supernode-sdk[train]'`.",
                )
            self.server.is_ready = self._was_served = True
        return messages

    def _hear_server(self) -> None:
        messages = self._server_lines(wait=5.0)
        if messages is None:
            self._lose_server()
            return
        for message in messages:
            rank = self._ranks.get(message["rank"]) if message["kind"] == "exit" else None
            if rank is not None and message["incarnation"] == rank.launch:
                self._exited(rank, message["code"])

    def _lose_server(self) -> None:
        """Count the death of the server as a loss: the kernel ends its ranks with it."""
        gone = self.server.gone()
        if not self._was_served:
            raise gone  # It cannot even start, and nor would another.
        self._end_server()
        self._hear_last_words()
        self._events.append(RankLost(rank=0, incarnation=self._incarnation, reason=gone.message))

    def _hear_keepers(self) -> None:
        assert self._keepers is not None
        self._events += self._keepers.hear()
        for rank in self._renew_keepers():
            if rank in self._ranks:
                keeper = self._keepers.attach(rank)
                self._ranks[rank].line.send("keeper", descriptors=(keeper.fileno(),))
                keeper.close()
        self._events += self._keepers.hear()

    def _hear_rank(self, rank: Rank) -> None:
        while (message := rank.line.take()) is not None:
            self._take(rank, message)
        if (
            rank.line.is_closed
        ):  # It may be found twice: told by the server, and here.
            with suppress(KeyError, ValueError):
                self._selector.unregister(rank.line.connection)

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        kind, incarnation = message.pop("kind"), message.pop("incarnation")
        message.pop("fds")
        current = incarnation == self._incarnation
        rank.pulse(message if kind == "pulse" else {})
        if kind == "pulse":
            return
        if current:
            rank.heard, rank.spoke = time.monotonic(), True
        if kind == "step":
            self._events.append(StepDone(incarnation=incarnation, **message))
        elif kind == "evaluated":
            self._events.append(Evaluated(**message))
        elif kind == "saving" and self._keepers is not None:
            self._keepers.expect(message["step"], message["manifest"], stall=message["stall"], attempt=incarnation)
            self._events += self._keepers.hear()
        elif kind == "unsaved":
            self._events.append(
                Unsaved(
                    step=message["step"], reason="the save before it is still on its way to disk",
                    hint="save less often with `checkpoint.every`, or to a faster disk.",
                )
            )  # fmt: skip
        elif kind == "note":
            self._events.append(Noted(**message))
        if not current:
            return
        if kind == "met":
            rank.met_seconds, rank.has_met = time.monotonic() - self._launched, True
        elif kind == "ready":
            seconds = time.monotonic() - self._launched
            self._events.append(
                RankReady(rank=rank.number, incarnation=incarnation, seconds=seconds, met_seconds=rank.met_seconds)
            )  # fmt: skip
        elif kind == "timed":
            self._events.append(Timed(incarnation=incarnation, step=message["step"], busy=tuple(message["busy"])))
        elif kind == "peer_lost":
            rank.lost_peer = message["message"]
            if self._unexplained is None:
                reason = f"lost a peer: {rank.lost_peer}"
                lost = RankLost(rank=rank.number, incarnation=self._incarnation, reason=reason)
                self._unexplained = time.monotonic() + _BLAME_SECONDS, lost
        elif kind == "failed":
            rank.failed = message
        elif kind == "done":
            rank.done = True
        rank.step = message.get("step", rank.step)

    def _exited(self, rank: Rank, code: int) -> None:
        """Judge a rank's end by the last words it sent and its exit code."""
        self._hear_rank(rank)
        rank.told_end = True
        if rank.failed or not rank.done or code:
            self._hear_last_words()  # They come first: what to go on from is decided when the loss is heard.
        if rank.failed:
            self._unexplained = None
            self._events.append(
                RankFailed(
                    rank=rank.number, incarnation=self._incarnation, kind=rank.failed["error"],
                    message=rank.failed["message"], hint=rank.failed["hint"],
                )
            )  # fmt: skip
        elif not rank.done or code:
            reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self._unexplained = None
            self._lose(rank, reason)

    def _lose(self, rank: Rank, reason: str) -> None:
        rank.is_lost = True
        self._events.append(RankLost(rank=rank.number, incarnation=self._incarnation, reason=reason))

    def _end_if_all_is_done(self) -> None:
        """Tell that the ranks have ended once all have, and what they handed over is on disk."""
        ranks = self._ranks.values()
        if self._ended or not ranks or not all(rank.told_end and rank.done for rank in ranks):
            return
        assert self._keepers is not None
        if self._keepers.under_way:
            return
        self._ended = True
        step = max(rank.step for rank in ranks)
        self._events.append(RanksEnded(incarnation=self._incarnation, step=step))

    def _check_ranks(self) -> None:
        """Look for ranks that are frozen, that do not come back, or that all wait for one."""
        living = [rank for rank in self._ranks.values() if not rank.told_end and not rank.is_lost]
        for rank in living:
            if rank.is_frozen(self.frozen):
                self._lose(rank, f"frozen: no sign of life for {self.frozen:g} s")
                self.kill_rank(rank.number)
                return
        late = [rank for rank in living if rank.is_late(min(_BACK_SECONDS, self.silence / 2))]
        for rank in late:  # It is stuck where nothing frees it; the others wait for it to meet.
            self._forget(rank)
        if late:
            self._fork([rank.number for rank in late])
        if not living or late:
            return
        behind = min(living, key=lambda rank: (rank.has_pulse, rank.waits, rank.step, rank.heard))
        silent = time.monotonic() - max(rank.heard for rank in living)
        # Before their first word the server may still be importing torch.
        limit = self.silence if all(rank.spoke for rank in living) else max(self.silence, _START_SECONDS)
        if silent > limit:
            for rank in living:
                rank.heard = time.monotonic()
            waiting = [str(rank.number) for rank in living if rank.waits and rank is not behind]
            told = f"ranks {', '.join(waiting)} wait for it in a collective" if waiting else "no rank went on"
            place = f" ({behind.at})" if behind.at else ""
            self._lose(behind, f"{told} for {silent:.0f} s; it is at step {behind.step}{place}")
            self.kill_rank(behind.number)
