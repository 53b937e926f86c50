"""What the user asks for so that nothing is lost: when and where state is kept, and what follows a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from supernode.errors import SpecError
from supernode.schema.spread import FORBID, within

MOST_NODES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When the run's state is saved, and where.

    Attributes:
        every: steps between checkpoints on disk; 0 leaves it to what saves are seen to cost and to
            `recovery.between_failures`.
        memory_every: steps between copies in the nodes' memory alone; 0 leaves it at those that go to disk, too.
        keep: newest whole checkpoints that stay on disk.
        disks: one place a node, folders or URLs that fsspec knows; none: `checkpoints/` in the run's folder.
        copies: disks that hold the whole of each node's new data; one less may be lost.
        parity: disks that may be lost where each node's new data is shared out over all of them; 0 for copies.
        compress: data that shrinks by a seventh or more is compressed.
    """

    __pydantic_config__: ClassVar = FORBID

    every: int = 50
    memory_every: int = 0
    keep: int = 2
    disks: tuple[str, ...] = ()
    copies: int = 1
    parity: int = 0
    compress: bool = True

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint on disk is due after a step, where that is known beforehand."""
        return bool(self.every) and step % self.every == 0

    def __post_init__(self) -> None:
        within(
            "checkpoint", self, every=(0, 10**9), memory_every=(0, 10**9), keep=(1, 10_000), copies=(1, 64),
            parity=(0, 63),
        )  # fmt: skip
        places = max(1, len(self.disks))
        if len(set(self.disks)) != len(self.disks) or not all(self.disks):
            raise SpecError("`checkpoint.disks` names a place twice or none", hint="name each node's own disk once.")
        if self.copies > places:
            raise SpecError(
                f"`checkpoint.copies` is {self.copies}, and there are {places} disks",
                hint=f"set it to at most {places}, or name more `checkpoint.disks`.",
            )
        if self.parity and (self.copies > 1 or self.parity >= places):
            raise SpecError(
                f"`checkpoint.parity` is {self.parity}, with {places} disks and {self.copies} copies",
                hint=f"set it below {places}, and `checkpoint.copies` to 1." if places > 1
                else "name more `checkpoint.disks`.",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySpec:
    """What happens after a failure.

    Attributes:
        most_restarts: restarts in a row without new state in memory or on disk before the run stops.
        silence: seconds in which no card goes on after which the one that the others wait for counts as lost.
        frozen: seconds without a sign of life from one card's process after which it counts as lost.
        nodes: over how many nodes the ranks lie, each with memory of its own that outlives its ranks and is copied to
            the next one's; on one computer they are stand-ins.
        policy: what follows once a card is fenced. `spare`: a spare card takes its place, or as `shrink` where none is
            left; `shrink`: the run goes on with the cards that are left; `wait`: it stands still until the card passes
            a check.
        spares: cards that the run holds besides those that it trains on.
        fence_after: losses of one card within `window` after which it is not used any more; 0: never.
        window: seconds in which losses of a card are counted together.
        patience: seconds that a run waits for a card before it stops.
        check_every: steps between comparisons of the copies of weights, and of their gradients; 0: never.
        between_failures: seconds between failures of the whole run, as expected; for `checkpoint.every` 0 alone.
        spike: a loss so many times the usual deviation above the usual loss is told; 0: none is.
    """

    __pydantic_config__: ClassVar = FORBID

    most_restarts: int = 5
    silence: float = 600.0
    frozen: float = 5.0
    nodes: int = 1
    policy: Literal["spare", "shrink", "wait"] = "spare"
    spares: int = 0
    fence_after: int = 3
    window: float = 3600.0
    patience: float = 600.0
    check_every: int = 0
    between_failures: float = 86_400.0
    spike: float = 0.0

    def __post_init__(self) -> None:
        within(
            "recovery", self, most_restarts=(0, 1000), silence=(1, 86_400), frozen=(0.5, 86_400),
            nodes=(1, MOST_NODES), spares=(0, 1024), fence_after=(0, 1000), window=(1, 10**9), patience=(0, 10**9),
            check_every=(0, 10**9), between_failures=(1, 10**10), spike=(0, 10**6),
        )  # fmt: skip
