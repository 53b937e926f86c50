"""A slice in the caller's hands: its cards and guarantees, given back by `release` or at the end of a `with` block."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from supernode.schema.slice import Slice

if TYPE_CHECKING:
    from supernode.scheduling.pool import Pool


class Allocation:
    """Holds a slice of a machine until it is released.

    Attributes:
        slice: what was granted.
    """

    def __init__(self, pool: Pool, granted: Slice) -> None:
        self.slice = granted
        self._pool = pool
        self._held = True

    @property
    def cards(self) -> tuple[int, ...]:
        """The cards, by number."""
        return self.slice.cards

    @property
    def memory(self) -> int:
        """Bytes on each card."""
        return self.slice.memory

    @property
    def bandwidth(self) -> float:
        """Bytes/s from each card to the others of the slice, one direction."""
        return self.slice.bandwidth

    def release(self) -> None:
        """Give the slice back; once more does nothing."""
        if self._held:
            self._held = False
            self._pool.release(self.slice)

    def __enter__(self) -> Allocation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Allocation({self.slice!r})"
