"""Who else holds a parameter: stages that share it and sum its gradient, and how many copies of it there are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from supernode.parallel.assemble import Parts
from supernode.parallel.mesh import Place
from supernode.parallel.tensor import local
from supernode.syncing.buckets import settle


class TieSync:
    """Sums the gradients of a parameter that several pipeline stages hold, such as a tied embedding."""

    def __init__(self, parts: Parts, place: Place) -> None:
        named = dict(parts.parameters())
        self._pairs: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        layout = place.layout
        for names, holders in parts.tied:
            if len(holders) < 2:
                continue
            for copy in range(layout.copies):
                for tensor in range(layout.tensor):
                    data, context = divmod(copy, layout.context)
                    ranks = [layout.rank(pipeline=p, data=data, context=context, tensor=tensor) for p in holders]
                    group = dist.new_group(ranks, timeout=place.limit)  # Every rank makes every group, in one order.
                    if place.rank in ranks and named[names[0]].requires_grad:
                        self._pairs.append((named[names[0]], group))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank that other stages hold, too."""
        return [parameter for parameter, _ in self._pairs]

    def __call__(self) -> list[nn.Parameter]:
        """Sum them; returns the parameters whose gradient has changed."""
        for parameter, group in self._pairs:
            settle(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=group)
        return [parameter for parameter, _ in self._pairs]


def copies(parts: Parts, place: Place) -> dict[nn.Parameter, int]:
    """Return how many ranks hold each parameter's element, so that a sum over all ranks counts each once."""
    holders = {names[0]: len(ranks) for names, ranks in parts.tied}
    counts = {}
    for name, parameter in parts.parameters():
        # A dim of the mesh over which the parameter is sharded holds no second copy.
        shards = place.layout.tensor if name in parts.segments else 1
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                shards *= 1 if placement.is_replicate() else size
        counts[parameter] = place.layout.copies * place.layout.tensor * holders.get(name, 1) // shards
    return counts
