"""A run's tensors on disk and back, in any layout: torch's distributed checkpoint under our manifest."""

from __future__ import annotations

import errno
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from supernode.checkpoint import store
from supernode.errors import CheckpointError, MachineError
from supernode.schema.manifest import Manifest

State = Mapping[str, Tensor]


def save(state: State, folder: Path, manifest: Manifest) -> int:
    """Write a checkpoint together with all other ranks; returns its bytes once it is whole and named.

    Args:
        state: this rank's tensors by their names in the whole model; a name on several ranks is written once.
        folder: of all checkpoints of the run.

    Raises:
        MachineError: the disk is full; the draft is gone and earlier checkpoints are as they were.
        CheckpointError: it cannot be written for another reason.
    """
    draft = folder / f"{store.DRAFT}{store.name_of(manifest.step)}"
    if _is_first():
        shutil.rmtree(draft, ignore_errors=True)
    _barrier()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_saver.save(dict(state), storage_writer=FileSystemWriter(draft, single_file_per_rank=True))
        files = _digests(draft)
        if _is_first():
            store.write_manifest(draft, replace(manifest, files=files))
            store.commit(draft, folder / store.name_of(manifest.step))
    except (CheckpointException, OSError, RuntimeError) as error:
        explained = _explain(error, folder)  # While the draft still takes its space.
        if _is_first():
            shutil.rmtree(draft, ignore_errors=True)
        raise explained from error
    return sum(size for size, _ in files.values())


def _digests(draft: Path) -> dict[str, tuple[int, str]]:
    """Return size and digest of every file, each read by the rank that wrote it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = [p for p in draft.iterdir() if p.name.startswith(f"__{rank}_") or (rank == 0 and p.name == ".metadata")]
    found = {path.name: (path.stat().st_size, store.digest(path)) for path in mine}
    if not dist.is_initialized():
        return found
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {name: entry for files in everyone for name, entry in files.items()}


def load(state: State, folder: Path) -> None:
    """Fill this rank's tensors from a checkpoint, whatever layout wrote it. The caller has verified the bytes.

    Raises:
        CheckpointError: it is of another model; the message names the first tensor that differs.
    """
    reader = _Reader(folder)
    known = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        entry = known.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{folder} holds no `{name}`; it is of another model", hint="resume the run that wrote it."
            )
        if tuple(entry.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"`{name}` is {list(entry.size)} in {folder} and {list(tensor.shape)} in this model",
                hint="resume the run that wrote it, or correct `model`.",
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_loader.load(dict(state), storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, RuntimeError) as error:
        explained = _explain(error, folder)
        raise explained from (None if explained is error else error)


def names_in(folder: Path) -> set[str]:
    """Return the names of the tensors that a checkpoint holds."""
    return set(_Reader(folder).read_metadata().state_dict_metadata)


def find(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose names begin so, whole; each rank may ask for others."""
    known = _Reader(folder).read_metadata().state_dict_metadata
    found = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    if found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_loader.load(dict(found), storage_reader=_Reader(folder), no_dist=True)
    return found


def check_complete(names: set[str], folder: Path) -> None:
    """Check that a checkpoint holds nothing beyond what all ranks together want, buffers of other copies aside.

    Raises:
        CheckpointError: it does, so it is of another model.
    """
    everyone: list[Any] = [names]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, names)
    # What compressors held back of gradients is of use to its own rank alone, and can be done without.
    known = {name for name in names_in(folder) if not name.startswith(("buffer.", "compressor."))}
    if extra := sorted(known.difference(*everyone)):
        raise CheckpointError(
            f"{folder} also holds `{extra[0]}` ({len(extra)} such); it is of another model",
            hint="resume the run that wrote it, or correct `model`.",
        )


_HARMLESS = {
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Reads torch's `.metadata` and nothing that could act: only the classes that it is made of are let in."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _HARMLESS or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


class _Reader(FileSystemReader):
    """torch's reader, which would unpickle anything, with `_Unpickler` in its place."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"holds a {type(metadata).__name__}")
        except Exception as error:  # A damaged pickle can raise anything.
            raise CheckpointError(
                f"{path} cannot be read: {error}", hint="resume from an older checkpoint with `--checkpoint`."
            ) from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, CheckpointException):
        for wrapped in error.failures.values():
            yield from _causes(wrapped[0])
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


def _explain(error: BaseException, folder: Path) -> BaseException:
    """Return the error to raise: a full disk and other file trouble explained, a lost peer as it is."""
    found = list(_causes(error))
    text = " / ".join(str(cause) for cause in found)
    full = any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in found)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = 0
    # torch's writer tells of a write that came out short by its position alone.
    if full or any(sign in text for sign in ("No space left", "PytorchStreamWriter", "unexpected pos")):
        return MachineError(
            f"the disk of {folder} is full ({free} bytes free); the checkpoint was not written",
            hint="free some space or lower `checkpoint.keep`, then `supernode resume`; earlier checkpoints are whole.",
        )
    if any(isinstance(cause, OSError) for cause in found):
        return CheckpointError(f"{folder}: {text}", hint="see that the folder can be written and read.")
    return error


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


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
