"""Do copies that must be alike still agree? Digests of weights, moments and summed gradients, over their copies.

Copies on the data and context axes start alike and add the same sums, so their bytes are equal after every step; where
they are not, a card has computed or remembered wrongly and said nothing. What every copy has alike (a wrong gradient
that all have added) is not found so; a loss that spikes may tell of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from supernode.checkpoint.source import as_bytes
from supernode.parallel.assemble import Parts
from supernode.parallel.mesh import Place
from supernode.parallel.mixture import is_spread
from supernode.parallel.tensor import local


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Copies differ.

    Attributes:
        ranks: that differ from the most of their copies; all of them where no more than half agree.
        among: ranks that hold copies of one another, in order.
        what: differs.
    """

    ranks: tuple[int, ...]
    among: tuple[int, ...]
    what: str

    @property
    def text(self) -> str:
        """What is to be told of it."""
        return f"{self.what} differ among ranks {', '.join(map(str, self.among))}"


class Comparison:
    """Compares this rank's part of the model with its copies; all ranks that hold copies call `look` together.

    Attributes:
        is_needed: there are copies: neither a single one, nor shards of which each rank has its own.
    """

    def __init__(self, parts: Parts, optimizer: torch.optim.Optimizer, place: Place) -> None:
        self._optimizer = optimizer
        layout = place.layout
        alike = layout.sharding == "replicas"
        trained = [parameter for _, parameter in parts.parameters()] if alike else []
        self._groups: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        for axis, is_own in (("copies", False), ("expert_copies", True)):
            own = [parameter for parameter in trained if is_spread(parameter) == is_own]
            if own and (group := place.group(axis)).size() > 1:
                self._groups.append((group, own))

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self._groups)

    def look(self) -> Difference | None:
        """Return how copies differ, the same on all of them; None where they agree. Call it between steps."""
        for group, parameters in self._groups:
            mine = torch.from_numpy(
                np.array([_digest(self._state(parameters)), _digest(_gradients(parameters))], dtype=np.uint64)
                .view(np.int64)
            )  # fmt: skip
            theirs = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(theirs, mine, group=group)
            ranks = dist.get_process_group_ranks(group)
            # A wrong gradient makes wrong weights; then the gradient is what tells of the card.
            for place, what in ((1, "summed gradients"), (0, "weights or moments")):
                digests = [int(one[place]) for one in theirs]
                if len(set(digests)) > 1:
                    odd = odd_ones(digests)
                    return Difference(ranks=tuple(ranks[number] for number in odd), among=tuple(ranks), what=what)
        return None

    def _state(self, parameters: Iterable[nn.Parameter]) -> Iterable[Tensor]:
        for parameter in parameters:
            yield local(parameter)
            held = self._optimizer.state.get(parameter, {})
            yield from (local(value) for value in held.values() if isinstance(value, Tensor))


def odd_ones(digests: Sequence[int]) -> tuple[int, ...]:
    """Return the places whose digests differ from the most; all of them where no more than half agree.

    >>> odd_ones([7, 7, 3])
    (2,)
    >>> odd_ones([7, 3])
    (0, 1)
    """
    most = max(digests, key=list(digests).count)
    if 2 * list(digests).count(most) <= len(digests):
        return tuple(range(len(digests)))
    return tuple(place for place, digest in enumerate(digests) if digest != most)


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterable[Tensor]:
    return (local(parameter.grad) for parameter in parameters if parameter.grad is not None)


@torch.no_grad()
def _digest(tensors: Iterable[Tensor]) -> int:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(as_bytes(tensor.cpu().contiguous()))
    return found.intdigest()


@torch.no_grad()
def flip_a_bit(parts: Parts) -> None:
    """Change the lowest bit of one weight, as a card that remembers wrongly does."""
    parameter = next(parameter for _, parameter in parts.parameters() if local(parameter).numel())
    local(parameter).view(-1)[:1].view(torch.uint8)[0] ^= 1
