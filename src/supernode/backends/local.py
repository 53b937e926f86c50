"""Ranks as processes of this computer, forked from a server that has imported torch once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from supernode.backends.fork_client import END_SECONDS, ForkServer
from supernode.errors import MachineError
from supernode.schema.codec import to_json
from supernode.schema.event import (
    Evaluated,
    Event,
    KillRanks,
    Launch,
    Noted,
    RankFailed,
    RankLost,
    RankReady,
    RanksEnded,
    Saved,
    StepDone,
    Timed,
)

_FORKS_AT_ONCE = 200  # The kernel passes at most 253 descriptors in one message (SCM_MAX_FD).
_START_SECONDS = 120.0
_BLAME_SECONDS = 0.5
"""How long a rank that lost a peer waits for that peer's own end, which tells more."""


_FACTS = (StepDone, Evaluated, Saved, Noted)
"""What a rank says that does not end with it."""


@dataclass(slots=True)
class _Rank:
    """What the controller knows of one living rank."""

    number: int
    connection: socket.socket
    heard: float
    met_seconds: float = 0.0
    step: int = 0
    pending: bytes = b""
    gone: bool = False
    spoke: bool = False
    told_end: bool = False
    lost_peer: str = ""
    done: bool = False
    failed: dict[str, Any] = field(default_factory=dict)


class LocalBackend:
    """Runs a plan's ranks on this computer.

    Args:
        folder: of the run; logs and the ranks' meeting place lie in it.
        silence: seconds without a word from a rank after which it counts as lost.
        server: a server started earlier; this backend ends it.
    """

    def __init__(self, folder: Path, *, silence: float, server: ForkServer | None = None) -> None:
        self.folder, self.silence = folder, silence
        self.server = server or ForkServer()
        self._ranks: dict[int, _Rank] = {}
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
        """Fork every rank of a plan."""
        self._drop_ranks()
        if self.server.has_ended:
            self._start_server()
        plan = command.plan
        self._incarnation, self._launched, self._ended = command.incarnation, time.monotonic(), False
        meeting = self.folder / "meeting"
        shutil.rmtree(meeting, ignore_errors=True)
        for folder in (meeting, self.folder / "logs", self.folder / "checkpoints"):
            folder.mkdir(exist_ok=True)
        pairs = [socket.socketpair() for _ in range(plan.ranks)]
        request = {
            "kind": "fork",
            "incarnation": command.incarnation,
            "plan": to_json(plan),
            "folder": str(self.folder),
            "meeting": str(meeting),
            "checkpoint": command.checkpoint,
            "pipeline": plan.layout.pipeline > 1,
            "threads": plan.job.threads or max(1, len(os.sched_getaffinity(0)) // plan.ranks),
        }
        for start in range(0, plan.ranks, _FORKS_AT_ONCE):
            batch = range(start, min(start + _FORKS_AT_ONCE, plan.ranks))
            with suppress(MachineError):  # The server is gone, which `poll` tells.
                self.server.send(request | {"ranks": list(batch)}, tuple(pairs[number][1].fileno() for number in batch))
        for number, (ours, theirs) in enumerate(pairs):
            theirs.close()
            ours.setblocking(False)
            self._ranks[number] = _Rank(number, ours, heard=time.monotonic())
            self._selector.register(ours, EVENT_READ, number)

    def kill_rank(self, rank: int) -> None:
        """Kill one rank as a failing card would."""
        with suppress(MachineError):  # The server is gone and all ranks with it, which `poll` tells.
            self.server.send({"kind": "kill", "incarnation": self._incarnation, "rank": rank})

    def kill_ranks(self, command: KillRanks) -> None:
        """End every rank that is left; none is left when this returns."""
        if self.server.is_ready and not self.server.has_ended:
            self._have_ranks_ended()
        else:
            self._end_server()
        self._hear_last_words()
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
            while not rank.gone and time.monotonic() < deadline:
                self._hear_rank(rank)
                time.sleep(0.0 if rank.gone else 0.01)

    def _start_server(self) -> None:
        self._end_server()
        self.server = ForkServer()
        self._selector.register(self.server.connection, EVENT_READ, None)

    def ask_to_stop(self) -> None:
        """Tell the first rank, which tells the others with the step's next collective."""
        if 0 in self._ranks:
            with suppress(OSError):
                self._ranks[0].connection.send(b"stop\n")

    def poll(self, timeout: float) -> list[Event]:
        """Return what happened, waiting up to `timeout` seconds for the first of it."""
        if not self._events:
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    self._hear_server()
                elif key.data in self._ranks:
                    self._hear_rank(self._ranks[key.data])
            self._check_silence()
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
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)

    def _hear_last_words(self) -> None:
        """Read what ranks said and nobody has read yet: a checkpoint may have been saved."""
        for rank in self._ranks.values():
            self._hear_rank(rank)

    def _drop_ranks(self) -> None:
        """Forget the ranks, and of what is still to be told all but what stays true without them."""
        for rank in self._ranks.values():
            if not rank.gone:
                self._selector.unregister(rank.connection)
            rank.connection.close()
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
            current = message["kind"] == "exit" and message["incarnation"] == self._incarnation
            if current and message["rank"] in self._ranks:
                self._exited(self._ranks[message["rank"]], message["code"])

    def _lose_server(self) -> None:
        """Count the death of the server as a loss: the kernel ends its ranks with it."""
        gone = self.server.gone()
        if not self._was_served:
            raise gone  # It cannot even start, and nor would another.
        self._end_server()
        self._hear_last_words()
        self._events.append(RankLost(rank=0, incarnation=self._incarnation, reason=gone.message))

    def _hear_rank(self, rank: _Rank) -> None:
        while not rank.gone:  # One look of the selector may find a rank's end twice: told by the server, and its own.
            try:
                data = rank.connection.recv(65_536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(rank.connection)
                rank.gone = True
                return
            rank.heard, rank.spoke = time.monotonic(), True
            *lines, rank.pending = (rank.pending + data).split(b"\n")
            for line in lines:
                self._take(rank, json.loads(line))

    def _take(self, rank: _Rank, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "met":
            rank.met_seconds = time.monotonic() - self._launched
        elif kind == "ready":
            seconds = time.monotonic() - self._launched
            self._events.append(
                RankReady(
                    rank=rank.number, incarnation=self._incarnation, seconds=seconds, met_seconds=rank.met_seconds
                )
            )  # fmt: skip
        elif kind == "step":
            rank.step = message["step"]
            self._events.append(StepDone(incarnation=self._incarnation, **message))
        elif kind == "timed":
            self._events.append(Timed(incarnation=self._incarnation, step=message["step"], busy=tuple(message["busy"])))
        elif kind == "beat":
            rank.step = message["step"]
        elif kind == "evaluated":
            self._events.append(Evaluated(**message))
        elif kind == "saved":
            self._events.append(Saved(**message))
        elif kind == "note":
            self._events.append(Noted(**message))
        elif kind == "peer_lost":
            rank.lost_peer = message["message"]
        elif kind == "failed":
            rank.failed = message
        elif kind == "done":
            rank.done, rank.step = True, message["step"]

    def _exited(self, rank: _Rank, code: int) -> None:
        """Judge a rank's end by the last words it sent and its exit code."""
        self._hear_rank(rank)
        rank.told_end = True
        if rank.failed or not rank.done or code:
            self._hear_last_words()  # They come first: what to go on from is decided when the loss is heard.
        if rank.failed:
            self._events.append(
                RankFailed(
                    rank=rank.number, incarnation=self._incarnation, kind=rank.failed["error"],
                    message=rank.failed["message"], hint=rank.failed["hint"],
                )
            )  # fmt: skip
        elif not rank.done or code:
            reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            reason = f"lost a peer: {rank.lost_peer}" if rank.lost_peer else reason
            lost = RankLost(rank=rank.number, incarnation=self._incarnation, reason=reason)
            if not rank.lost_peer:
                self._events.append(lost)
            elif self._unexplained is None:
                self._unexplained = time.monotonic() + _BLAME_SECONDS, lost
        elif all(other.told_end and other.done for other in self._ranks.values()) and not self._ended:
            self._ended = True
            self._events.append(RanksEnded(incarnation=self._incarnation, step=rank.step))

    def _check_silence(self) -> None:
        living = [rank for rank in self._ranks.values() if not rank.told_end]
        if not living:
            return
        oldest = min(living, key=lambda rank: (rank.step, rank.heard))
        silent = time.monotonic() - max(rank.heard for rank in living)
        # Before their first word the server may still be importing torch.
        limit = self.silence if all(rank.spoke for rank in living) else max(self.silence, _START_SECONDS)
        if silent > limit:
            for rank in living:
                rank.heard = time.monotonic()
            reason = f"no rank said a word for {silent:.0f} s; this one is behind, at step {oldest.step}"
            self._events.append(RankLost(rank=oldest.number, incarnation=self._incarnation, reason=reason))
