"""The local backend turns what ranks and their server say into events, each once."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from supernode.backends.fork_client import ForkServer
from supernode.backends.local import LocalBackend
from supernode.control.supernode import SuperNode
from supernode.errors import MachineError
from supernode.schema.event import (
    Await,
    CardChecked,
    Evaluated,
    Event,
    KillRanks,
    Launch,
    RankLost,
    RankReady,
    Restored,
)
from supernode.schema.plan import Plan


class SilentServer:
    """A fork server that forks nobody; the test speaks for it and for the ranks."""

    def __init__(self) -> None:
        self.connection, self.own = socket.socketpair()
        self.pending = b""
        self.is_ready = True
        self.has_ended = False
        self.ranks: list[socket.socket] = []
        self.to_keepers: list[socket.socket] = []

    def send(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        # Each rank has a line to the controller and one to its keeper.
        held = [socket.socket(fileno=os.dup(descriptor)) for descriptor in descriptors]
        self.ranks += held[::2]
        self.to_keepers += held[1::2]

    def say(self, **message: Any) -> None:
        self.own.sendall(json.dumps(message).encode() + b"\n")

    def rank_says(self, rank: int, kind: str, **values: Any) -> None:
        self.ranks[rank].sendall(json.dumps({"kind": kind, "fds": 0, "incarnation": 1, **values}).encode() + b"\n")

    def gone(self) -> MachineError:
        return MachineError("the server is gone")

    def close(self) -> None:
        self.has_ended = True
        for line in (self.connection, self.own, *self.ranks, *self.to_keepers):
            line.close()


def backend_plan() -> Plan:
    return SuperNode.discover(cards=2).plan({"parallelism": {"data": 2}})


def meet(backend: LocalBackend, server: SilentServer) -> None:
    """Have both ranks meet; one that has not cannot be freed from waiting for the others."""
    for rank in (0, 1):
        server.rank_says(rank, "met")
        server.rank_says(rank, "ready", seconds=1.0)
    while len([event for event in backend.poll(0.1) if isinstance(event, RankReady)]) == 0:
        pass
    backend.poll(0.1)


@pytest.fixture
def server() -> SilentServer:
    return SilentServer()


@pytest.fixture
def backend(tmp_path: Path, server: SilentServer):  # type: ignore[no-untyped-def]
    made = LocalBackend(tmp_path, silence=60, server=server)  # type: ignore[arg-type]
    made.launch(Launch(incarnation=1, plan=backend_plan(), checkpoint=""))
    assert made.poll(0.0) == [Restored(incarnation=1, step=0, source="start")]
    yield made
    made.close()


def test_a_death_told_by_the_server_and_by_the_rank_s_own_line_is_one_loss(
    backend: LocalBackend, server: SilentServer
) -> None:
    # In this order one look of the selector brings both, the server's word first.
    server.say(kind="exit", incarnation=1, rank=1, code=-9)
    server.ranks[1].close()

    assert backend.poll(1.0) == [RankLost(rank=1, incarnation=1, reason="killed by signal 9")]


def test_what_a_rank_said_before_it_was_ended_is_heard(backend: LocalBackend, server: SilentServer) -> None:
    server.rank_says(0, "ready", seconds=1.0)
    server.rank_says(0, "evaluated", step=2, loss=3.0, seconds=0.5)
    server.say(kind="gone", token=1)

    backend.kill_ranks(KillRanks(incarnation=1))

    # That it was ready has ended with it; what it found out has not.
    assert backend.poll(0.0) == [Evaluated(step=2, loss=3.0, seconds=0.5)]


def test_what_ranks_found_out_is_told_before_the_loss(backend: LocalBackend, server: SilentServer) -> None:
    server.say(kind="exit", incarnation=1, rank=1, code=-9)
    server.rank_says(0, "evaluated", step=2, loss=3.0, seconds=0.5)

    assert [type(event) for event in backend.poll(1.0)] == [Evaluated, RankLost]


def test_what_a_rank_says_of_the_launch_before_is_not_of_this_one(backend: LocalBackend, server: SilentServer) -> None:
    meet(backend, server)
    backend.launch(Launch(incarnation=2, plan=backend_plan(), checkpoint="", keep=True))
    again = server.ranks[0].recv(4096)
    server.rank_says(0, "ready", seconds=1.0)  # on its way since before
    server.rank_says(0, "ready", seconds=1.0, incarnation=2)

    assert b'"incarnation": 2' in again
    assert len(server.ranks) == 2  # Both live, and none was forked anew.
    events = [*backend.poll(1.0), *backend.poll(0.1)]
    assert [(type(event).__name__, event.incarnation) for event in events] == [("Restored", 2), ("RankReady", 2)]  # type: ignore[union-attr]


def test_a_rank_that_does_not_come_back_is_forked_anew_while_the_others_wait(
    backend: LocalBackend, server: SilentServer
) -> None:
    backend.silence = 4.0
    meet(backend, server)
    backend.launch(Launch(incarnation=2, plan=backend_plan(), checkpoint="", keep=True))
    server.rank_says(0, "again", incarnation=2)
    deadline = time.monotonic() + 10
    while len(server.ranks) < 3 and time.monotonic() < deadline:
        backend.poll(0.1)

    assert len(server.ranks) == 3
    server.rank_says(2, "met", incarnation=2)
    assert not any(isinstance(event, RankLost) for event in backend.poll(0.1))


def test_a_server_that_still_imports_is_ended_with_its_ranks_and_another_starts_when_needed(
    backend: LocalBackend, server: SilentServer
) -> None:
    server.is_ready = False
    plan = backend_plan()

    backend.kill_ranks(KillRanks(incarnation=1))  # As Ctrl-C does: not after 20 s, and with no word of state D.
    ended, heard = server.has_ended, backend.poll(0.0)
    backend.launch(Launch(incarnation=2, plan=plan, checkpoint=""))

    assert (ended, heard) == (True, [])
    assert backend.server is not server


def test_a_server_is_ready_once_it_has_said_a_word(backend: LocalBackend, server: SilentServer) -> None:
    server.is_ready = False
    server.say(kind="ready")

    assert backend.poll(1.0) == []
    assert server.is_ready


def test_a_ready_rank_tells_when_it_had_met_the_others(backend: LocalBackend, server: SilentServer) -> None:
    server.rank_says(0, "met")
    server.rank_says(0, "ready", seconds=1.0)

    (event,) = backend.poll(1.0)

    assert isinstance(event, RankReady)
    assert 0 < event.met_seconds <= event.seconds


def test_a_server_that_dies_under_its_ranks_is_replaced(backend: LocalBackend, server: SilentServer) -> None:
    server.rank_says(0, "beat", step=1)
    backend.poll(1.0)
    server.own.close()

    assert backend.poll(1.0) == [RankLost(rank=0, incarnation=1, reason="the server is gone", blamed=False)]
    assert backend.poll(0.0) == []
    backend.kill_ranks(KillRanks(incarnation=1))
    backend.launch(Launch(incarnation=2, plan=backend_plan(), checkpoint=""))
    assert backend.server is not server


def test_a_server_that_dies_with_a_rank_or_while_it_kills_ranks_is_replaced(
    backend: LocalBackend, server: SilentServer
) -> None:
    server.say(kind="exit", incarnation=1, rank=1, code=-9)
    lost = backend.poll(1.0)
    server.own.close()
    for rank in server.ranks:
        rank.close()

    backend.kill_rank(0)
    backend.kill_ranks(KillRanks(incarnation=1))
    backend.launch(Launch(incarnation=2, plan=backend_plan(), checkpoint=""))

    assert lost == [RankLost(rank=1, incarnation=1, reason="killed by signal 9")]
    assert backend.server is not server


def test_a_server_says_how_it_ended() -> None:
    server = ForkServer()
    os.kill(server.pid, signal.SIGKILL)

    assert server.gone().message.endswith("was killed by signal 9")
    server.close()


def test_a_server_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    server = SilentServer()
    server.is_ready = False
    backend = LocalBackend(tmp_path, silence=60, server=server)  # type: ignore[arg-type]
    backend.launch(Launch(incarnation=1, plan=backend_plan(), checkpoint=""))
    backend.poll(0.0)
    server.own.close()

    with pytest.raises(MachineError, match="the server is gone"):
        backend.poll(1.0)
    backend.close()


def test_who_still_waits_to_meet_is_forked_anew_at_once_and_ranks_beyond_the_plan_end(
    backend: LocalBackend, server: SilentServer
) -> None:
    server.rank_says(1, "met")
    smaller = SuperNode.discover(cards=1).plan({"parallelism": {"data": 1}})
    backend.launch(Launch(incarnation=2, plan=smaller, checkpoint="", keep=True))

    # Rank 0 could not be freed from where it waits; rank 1 is none of the plan's.
    assert [len(line.recv(1)) for line in server.ranks[:2]] == [0, 0]
    assert len(server.ranks) == 3


def test_deaths_that_come_together_are_one_loss(backend: LocalBackend, server: SilentServer) -> None:
    server.say(kind="exit", incarnation=1, rank=1, code=-9)
    (lost,) = backend.poll(1.0)
    server.say(kind="exit", incarnation=1, rank=0, code=-9)
    backend.launch(Launch(incarnation=2, plan=backend_plan(), checkpoint="", keep=True))

    assert isinstance(lost, RankLost)
    assert len(server.ranks) == 4  # Both were forked anew, and no rank of this launch counts as lost.
    later = backend.poll(0.1)
    assert all(event.incarnation == 1 for event in later if isinstance(event, RankLost))
    assert Restored(incarnation=2, step=0, source="start") in later


def test_a_card_that_is_waited_for_is_checked_until_it_passes_or_its_time_is_up(
    backend: LocalBackend, server: SilentServer
) -> None:
    backend.await_card(Await(card=1, seconds=60.0))
    assert backend.poll(0.0) == []
    server.say(kind="exit", incarnation=-1, rank=1, code=1)
    assert backend.poll(1.0) == []
    deadline = time.monotonic() + 10
    told: list[Event] = []
    while not told and time.monotonic() < deadline:
        server.say(kind="exit", incarnation=-1, rank=1, code=0)
        told = backend.poll(0.1)

    assert told == [CardChecked(card=1, is_up=True)]
    backend.await_card(Await(card=1, seconds=0.0))
    (never,) = backend.poll(0.0)
    assert isinstance(never, CardChecked)
    assert not never.is_up


def test_memory_that_is_not_what_it_should_be_is_let_go_of_and_the_ranks_begin_again(
    backend: LocalBackend, server: SilentServer
) -> None:
    meet(backend, server)
    server.rank_says(1, "memory_lost", message="`w` in memory is not what was written")

    (lost,) = backend.poll(1.0) or backend.poll(1.0)
    backend.launch(Launch(incarnation=2, plan=backend_plan(), checkpoint="", keep=True))

    assert lost == RankLost(rank=1, incarnation=1, reason="`w` in memory is not what was written", blamed=False)
    assert backend.poll(0.0) == [Restored(incarnation=2, step=0, source="start")]
    assert len(server.ranks) == 2  # Both go on in their processes.
