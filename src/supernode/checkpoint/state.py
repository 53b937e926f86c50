"""A run's tensors on disk and back, in any layout, and an optimizer's as plain tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.checkpoint.boxes import box_of, local_of, share_out
from supernode.checkpoint.source import Source, as_bytes, fill, on_disk, whole
from supernode.errors import CheckpointError, SupernodeError
from supernode.schema.manifest import Manifest
from supernode.storing.part import stream_bytes
from supernode.storing.saves import Saves, Stored
from supernode.storing.spread import Spread, disk_of

State = Mapping[str, Tensor]


def save(state: State, saves: Saves, manifest: Manifest) -> int:
    """Write a checkpoint together with all other ranks; returns the bytes of its tensors once it is whole and named.

    Args:
        state: this rank's tensors by their names in the whole model; a name on several ranks is written once.
        saves: all checkpoints of the run.

    Raises:
        MachineError: the disk is full; earlier checkpoints are as they were.
        CheckpointError: it cannot be written for another reason.
    """
    boxes = [box_of(name, tensor) for name, tensor in state.items()]
    rank = dist.get_rank() if dist.is_initialized() else 0
    pieces = share_out(_of_all(boxes))[rank]
    trouble: SupernodeError | None = None
    done: Stored | None = None
    try:
        stream = bytearray(stream_bytes(pieces))
        for piece in pieces:
            stream[piece.start : piece.start + piece.nbytes] = as_bytes(local_of(state[piece.name]).cpu().contiguous())
        done, _ = saves.store(manifest.step, rank, memoryview(stream), pieces)
    except SupernodeError as error:
        trouble = error
    outcomes = _of_all((done, trouble))
    failed = next((error for _, error in outcomes if error is not None), None)
    if failed is None and rank == 0:
        try:
            saves.commit(manifest, [one for one, _ in outcomes if one is not None])
        except SupernodeError as error:
            failed = error
    failed = _of_all(failed)[0]
    if failed is not None:
        if rank == 0:
            saves.drop_draft(manifest.step)
        raise failed
    return sum(one.part[0] + one.nbytes for one, _ in outcomes if one is not None)


def saves_in(folder: Path) -> Saves:
    """Return the checkpoints in a folder, as the only disk."""
    return Saves(Spread(disks=(disk_of(folder),)))


def _of_all(value: Any) -> list[Any]:
    """Return what every rank says, by rank."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def load(state: State, folder: Path) -> None:
    """Fill this rank's tensors from a checkpoint in a folder; raises as `source.fill`."""
    fill(state, on_disk(folder))


def find(source: Source, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose names begin so, whole; each rank may ask for others."""
    return {name: whole(name, source) for name in source.pieces if name.startswith(prefix)}


def check_complete(names: set[str], source: Source) -> None:
    """Check that a checkpoint holds nothing beyond what all ranks together want, buffers of other copies aside.

    Raises:
        CheckpointError: it does, so it is of another model.
    """
    # What compressors held back of gradients is of use to its own rank alone, and can be done without.
    known = {name for name in source.pieces if not name.startswith(("buffer.", "compressor."))}
    if extra := sorted(known.difference(*_of_all(names))):
        raise CheckpointError(
            f"{source.where} also holds `{extra[0]}` ({len(extra)} such); it is of another model",
            hint="resume the run that wrote it, or correct `model`.",
        )


@runtime_checkable
class Encoded(Protocol):
    """An optimizer whose state is no plain tensors: it gives them for a checkpoint, and takes them back."""

    def saved(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the state of each parameter, laid out as the parameter is."""
        ...

    def saved_scaling(self) -> Tensor | None:
        """Return the state of the loss scale, if there is one."""
        ...

    def take(self, saved: Mapping[Tensor, Mapping[str, Tensor]], scaling: Tensor | None, *, step: int) -> None:
        """Take up what a checkpoint held."""
        ...


def flatten_optimizer(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an optimizer's tensors by parameter name, made if they are not there yet; step counts are left out."""
    flat = {}
    held: Mapping[Tensor, Mapping[str, Any]] = optimizer.state
    if isinstance(optimizer, Encoded):
        held = optimizer.saved()
        if (scaling := optimizer.saved_scaling()) is not None:
            flat["scaling"] = scaling
    for name, parameter in named.items():
        for key, value in held.get(parameter, {}).items():
            if isinstance(value, Tensor) and key != "step":
                flat[f"optimizer.{name}.{key}"] = value
    return flat


def adopt_optimizer(
    optimizer: torch.optim.Optimizer, flat: Mapping[str, Tensor], named: Mapping[str, Tensor], *, step: int
) -> None:
    """Give an optimizer back what `flatten_optimizer` made of it, filled from a checkpoint; torch's own hold it."""
    if not isinstance(optimizer, Encoded):
        return
    owners = {f"optimizer.{name}": parameter for name, parameter in named.items()}
    saved: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in flat.items():
        owner, _, what = key.rpartition(".")
        if owner in owners:
            saved.setdefault(owners[owner], {})[what] = value
    optimizer.take(saved, flat.get("scaling"), step=step)


def prepare_optimizer(optimizer: torch.optim.Optimizer, *, step: int) -> None:
    """Give every trained parameter the state that a load fills: zero moments and the step count.

    Raises:
        CheckpointError: the optimizer is of a kind that this cannot do.
    """
    if isinstance(optimizer, Encoded):
        return  # It has its state from the start.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = optimizer.state[parameter]
            if isinstance(optimizer, torch.optim.AdamW):
                entry["step"] = torch.tensor(float(step), dtype=torch.float32)
                entry["exp_avg"] = torch.zeros_like(parameter)
                entry["exp_avg_sq"] = torch.zeros_like(parameter)
            elif isinstance(optimizer, torch.optim.SGD):
                if group["momentum"]:
                    entry["momentum_buffer"] = torch.zeros_like(parameter)
            else:
                raise CheckpointError(f"no state is known for {type(optimizer).__name__}", hint="use adamw or sgd.")
