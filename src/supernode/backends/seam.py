"""What a backend is: something that runs ranks and tells what happens to them. Simulated, local and Ray look alike."""

from __future__ import annotations

from typing import Protocol

from supernode.schema.event import Await, Event, KillRanks, Launch


class Backend(Protocol):
    """Where processes live. None of these blocks for long, except `poll` for up to its timeout."""

    def now(self) -> float:
        """Return the time in seconds since the epoch, on this backend's clock."""

    def launch(self, command: Launch) -> None:
        """Start every rank of a plan."""

    def in_memory(self) -> int:
        """Return the newest step whose state all nodes have in memory, -1 for none."""

    def kill_rank(self, rank: int) -> None:
        """Kill one rank as a failing card would."""

    def kill_ranks(self, command: KillRanks) -> None:
        """End every rank that is left; none is left when this returns."""

    def ask_to_stop(self) -> None:
        """Tell the ranks to save after the step that they are in, and leave."""

    def await_card(self, command: Await) -> None:
        """Check a card again and again, and tell once it is up, or that it is not when its time is up."""

    def poll(self, timeout: float) -> list[Event]:
        """Return what happened, waiting up to `timeout` seconds for the first of it."""

    def close(self) -> None:
        """End all ranks and let go of everything."""
