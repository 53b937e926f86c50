"""Which box of a whole tensor does a rank hold, and which of the ranks that hold the same one writes it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from supernode.errors import CheckpointError
from supernode.storing.part import DTYPES, Piece, lay_out

Box = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Name, kind of numbers, shape of the whole, offsets of the box, shape of the box: as `Piece.box`."""
KINDS: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's own part of a tensor, without what autograd knows."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def box_of(name: str, tensor: Tensor) -> Box:
    """Return where a rank's part of a tensor lies in the whole; a plain tensor is the whole.

    Raises:
        CheckpointError: its kind of numbers is none that a checkpoint can hold.
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in KINDS:
        raise CheckpointError(f"`{name}` is of {tensor.dtype}", hint=f"use one of {', '.join(KINDS)}.")
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return name, kind, whole, (0,) * len(whole), whole
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # A rank beyond the last shard holds nothing, wherever that would begin.
    return name, kind, whole, tuple(min(o, w) for o, w in zip(offsets, whole, strict=True)), tuple(shape)


def share_out(held: Sequence[Sequence[Box]]) -> list[tuple[Piece, ...]]:
    """Return what each rank writes: every box once, spread so that ranks write about equally many bytes.

    Args:
        held: the boxes of each rank, which all ranks know and so decide alike.

    Raises:
        CheckpointError: two ranks hold something else under one name.
    """
    holders: dict[Box, list[int]] = {}
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            name, kind, whole, _, shape = box
            if known.setdefault(name, (kind, whole)) != (kind, whole):
                raise CheckpointError(
                    f"rank {rank} holds `{name}` as {kind}{list(whole)}, and another as "
                    f"{known[name][0]}{list(known[name][1])}",
                    hint="give each parameter one name and one shape on all ranks.",
                )
            if 0 not in shape or shape == whole:
                holders.setdefault(box, []).append(rank)
    _check_apart(holders)
    loads, chosen = [0] * len(held), {}
    for box in sorted(holders, key=lambda box: (-_nbytes(box), box)):
        rank = min(holders[box], key=lambda one: (loads[one], one))
        chosen[box] = rank
        loads[rank] += _nbytes(box)
    return [lay_out([box for box in boxes if chosen.get(box) == rank]) for rank, boxes in enumerate(held)]


def _nbytes(box: Box) -> int:
    count = DTYPES[box[1]]
    for size in box[4]:
        count *= size
    return count


def _check_apart(holders: Mapping[Box, Sequence[int]]) -> None:
    """Check that the boxes of a tensor cover it once: of two writers of one place, chance would choose."""
    covered: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for box in holders:
        name, kind, whole, offsets, _ = box
        covered[name] = covered.get(name, 0) + _nbytes(box)
        sizes[name] = _nbytes((name, kind, whole, offsets, whole))
    for name, total in sizes.items():
        if covered[name] != total:
            what = "hold more than one value of" if covered[name] > total else "do not hold all of"
            raise CheckpointError(
                f"the ranks {what} `{name}`: {covered[name]} of its {total} bytes",
                hint="shard it the same way on all ranks.",
            )
