"""The drive loop: an event is journalled, the controller answers it with commands, the backend carries them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from supernode.backends.seam import Backend
from supernode.errors import CheckpointError
from supernode.scheduling.controller import Controller
from supernode.schema.event import (
    AskToStop,
    Await,
    Command,
    Ended,
    Event,
    Finish,
    KillRank,
    KillRanks,
    Launch,
    Rejected,
    Tell,
)
from supernode.schema.report import RunState
from supernode.storing.saves import Saves, step_of

POLL_SECONDS = 0.2


class Record(Protocol):
    """Where events are kept."""

    def append(self, event: Event, time: float) -> None:
        """Add an event that happened at `time`."""


Check = Callable[[str], None]
Others = Callable[[str], tuple[tuple[int, str], ...]]
Watch = Callable[[Event, RunState], None]


def check_in(saves: Saves) -> Check:
    """Return a check that raises `CheckpointError` unless every byte of a checkpoint can be had as it was written."""

    def check(name: str) -> None:
        saves.verify(name)

    return check


def others_in(saves: Saves) -> Others:
    """Return what sets a checkpoint aside and tells (step, name) of those that are left, oldest first."""

    def others(name: str) -> tuple[tuple[int, str], ...]:
        saves.set_aside(name)
        return tuple(saves.all())

    return others


def drive(
    first: Event, *, controller: Controller, backend: Backend, record: Record, check: Check | None = None,
    others: Others = lambda _: (), watch: Watch | None = None, asked: Callable[[], Event | None] = lambda: None,
) -> Ended:  # fmt: skip
    """Run until the controller is done; returns how it ended.

    Args:
        first: what starts it.
        check: raises `CheckpointError` if a checkpoint must not be loaded; None trusts all.
        others: told of one that failed the check; returns (step, name) of those that there are instead.
        watch: told each event and the state after it.
        asked: what a person asked for since the last call, such as `StopAsked`.
    """
    waiting: deque[Event] = deque([first])
    while True:
        if wish := asked():
            waiting.append(wish)
        if not waiting:
            waiting.extend(backend.poll(POLL_SECONDS))
            continue
        event = waiting.popleft()
        time = backend.now()
        record.append(event, time)
        commands = controller.handle(event, time)
        assert controller.state is not None
        if watch is not None:
            watch(event, controller.state)
        for command in commands:
            answer = _carry_out(command, backend, check, others)
            if isinstance(answer, Ended):
                for fact in backend.poll(0):  # Such as that a checkpoint got to disk while the ranks were ended.
                    record.append(fact, backend.now())
                    controller.handle(fact, backend.now())
                record.append(answer, backend.now())
                controller.handle(answer, backend.now())
                if watch is not None:
                    watch(answer, controller.state)
                return answer
            if answer is not None:
                waiting.appendleft(answer)


def _carry_out(command: Command, backend: Backend, check: Check | None, others: Others) -> Event | None:
    """Carry a command out; returns the event that it leads to at once, if any."""
    if isinstance(command, Launch):
        # What is in memory is newer, and its reader checks it.
        is_needed = command.checkpoint and backend.in_memory() < step_of(command.checkpoint)
        if check is not None and is_needed:
            try:
                check(command.checkpoint)
            except CheckpointError as error:
                name = command.checkpoint
                return Rejected(checkpoint=name, reason=error.message, others=others(name))
        backend.launch(command)
    elif isinstance(command, KillRanks):
        backend.kill_ranks(command)
    elif isinstance(command, KillRank):
        backend.kill_rank(command.rank)
    elif isinstance(command, Await):
        backend.await_card(command)
    elif isinstance(command, Tell):
        return command.event
    elif isinstance(command, AskToStop):
        backend.ask_to_stop()
    elif isinstance(command, Finish):
        return command.ended
    return None
