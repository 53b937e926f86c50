"""What do all compressors have in common? Buckets announced, steps counted, feedback kept, saved and loaded."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.compressing.lay import Named
from supernode.errors import SpecError


@dataclass(slots=True, kw_only=True)
class Entry:
    """One bucket's part on this rank.

    Attributes:
        kept: tensors that outlive a step, by name; they are in checkpoints.
    """

    kept: dict[str, Tensor]


E = TypeVar("E", bound=Entry)


class Compressor(ABC, Generic[E]):
    """Sums parts of buckets over a group by sending less than they hold; what was not sent is sent later.

    All ranks of the group end with the same bits. Where a sum is not finite, all of them get numbers that are not, and
    the feedback stays as it was, so that a step that is skipped leaves no trace.

    Args:
        warmup: steps whose gradients travel as they are.

    Attributes:
        step: number of the step under way, counted from 0; whoever takes the steps sets it.
    """

    def __init__(self, *, warmup: int = 0) -> None:
        self.warmup = warmup
        self.step = 0
        self.entries: dict[str, E] = {}

    @abstractmethod
    def describe(self) -> str:
        """Return the settings on which the meaning of the feedback depends."""

    @abstractmethod
    def _entry(self, parameters: Named, group: dist.ProcessGroup, *, start: int, length: int, device: str) -> E: ...

    @abstractmethod
    def _sum(self, entry: E, shard: Tensor, group: dist.ProcessGroup) -> None: ...

    def _warm(self, entry: E, shard: Tensor) -> None:
        """See a sum that travelled as it is."""

    def prepare(
        self, key: str, parameters: Named, group: dist.ProcessGroup, *, start: int = 0, length: int | None = None,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        """Announce what travels under a key; its feedback is zero from here on.

        Args:
            parameters: names and shapes of the whole bucket, in its order.
            start: first element of the bucket that this rank exchanges.
            length: elements that it exchanges; to the end by default. Elements behind the last parameter are padding.
        """
        whole = sum(torch.Size(shape).numel() for _, shape in parameters)
        length = whole - start if length is None else length
        entry = self._entry(parameters, group, start=start, length=length, device=device)
        what = (self.describe(), list(parameters), start, length, dist.get_process_group_ranks(group))
        entry.kept["signature"] = torch.tensor(_digest(repr(what)), dtype=torch.int64)
        self.entries[key] = entry

    def exchange(self, shard: Tensor, group: dist.ProcessGroup, key: str) -> None:
        """Put the sum over the group into `shard`, as far as it was sent.

        Args:
            shard: (length,), floating point.

        Raises:
            SpecError: nobody announced the key, and the warm-up is over.
        """
        if self.step < self.warmup:
            dist.all_reduce(shard, group=group)
            if key in self.entries:  # What travels whole need not be announced.
                self._warm(self.entries[key], shard)
            return
        if key not in self.entries:
            raise SpecError(f"nothing is known of bucket `{key}`", hint="announce it with `prepare` first.")
        self._sum(self.entries[key], shard, group)

    def scale(self, factor: float) -> None:
        """Multiply the feedback, as where the scale of the loss changes by that factor."""
        for entry in self.entries.values():
            for name, tensor in entry.kept.items():
                if name.startswith("feedback"):
                    tensor.mul_(factor)
                elif name == "squares":
                    tensor.mul_(factor * factor)

    def state(self, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return what the next step depends on, by name; the tensors themselves, not copies.

        Args:
            keys: of the buckets meant; all by default.
        """
        chosen = self.entries if keys is None else keys
        return {f"{key}.{name}": tensor for key in chosen for name, tensor in self.entries[key].kept.items()}

    def fits(self, state: Mapping[str, Tensor], keys: Iterable[str] | None = None) -> bool:
        """Tell whether a state holds these buckets, cut this way over these ranks."""
        return all(
            name in state
            and tensor.shape == state[name].shape
            and (tensor.is_floating_point() or torch.equal(tensor, state[name]))
            for name, tensor in self.state(keys).items()
        )

    def load(self, state: Mapping[str, Tensor], keys: Iterable[str] | None = None) -> bool:
        """Go on from a state; returns whether it fits. One that does not is left alone, and the feedback is as it was.

        The ranks of a group must all load or all not: ask `fits` on each and agree where that is in doubt.
        """
        if not self.fits(state, keys):
            return False
        for name, tensor in self.state(keys).items():
            tensor.copy_(state[name])
        return True


def _digest(text: str) -> int:
    """Return 63 bits that stand for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
