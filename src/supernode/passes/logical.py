"""How does what a tensor rank holds in several pieces, such as a fused projection, come to a checkpoint and back?

DTensor says where one contiguous part lies. A part in several pieces is put together before it is saved, and cut again
when it is loaded, so that a checkpoint holds logical shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from supernode.parallel.assemble import Parts
from supernode.parallel.mesh import Place
from supernode.roles.shards import Split, to_full, to_local


def wholes(named: Mapping[str, Tensor], parts: Parts, place: Place) -> dict[str, Tensor]:
    """Return tensors to be saved, those in several pieces put together; the tensor ranks call this together.

    Args:
        named: by `model.NAME`, `optimizer.NAME.KEY` and `buffer.COPY.NAME`.
    """
    found = dict(named)
    for key, split in _segmented(named, parts).items():
        own = named[key]
        part = own.full_tensor() if isinstance(own, DTensor) else own
        found[key] = to_full(part, split, place.group("tensor"))
    return found


def empties(named: Mapping[str, Tensor], parts: Parts, place: Place) -> dict[str, Tensor]:
    """Return tensors to be loaded, with room for the whole of those in several pieces."""
    found = dict(named)
    for key, split in _segmented(named, parts).items():
        shape = list(named[key].shape)
        shape[split.dim] = split.size
        found[key] = torch.empty(shape, dtype=named[key].dtype)
    return found


@torch.no_grad()
def take(loaded: Mapping[str, Tensor], named: Mapping[str, Tensor], parts: Parts, place: Place) -> None:
    """Cut this rank's pieces from what was loaded into `empties`."""
    for key, split in _segmented(named, parts).items():
        part, own = to_local(loaded[key], split, place.group("tensor")), named[key]
        if isinstance(own, DTensor):
            part = distribute_tensor(part, own.device_mesh, own.placements, src_data_rank=None)
        own.copy_(part)


def _segmented(named: Mapping[str, Tensor], parts: Parts) -> dict[str, Split]:
    """Return how each tensor that is held in several pieces is split; moments are split as their parameter is."""
    found = {}
    for key, tensor in named.items():
        kind, _, rest = key.partition(".")
        name = {"optimizer": rest.rpartition(".")[0], "buffer": rest.partition(".")[2]}.get(kind, rest)
        split = parts.segments.get(name)
        if split is not None and tensor.ndim > split.dim and dist.is_initialized():
            found[key] = split
    return found
