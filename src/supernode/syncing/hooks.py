"""How does plain PyTorch send compressed gradients? A hook for DistributedDataParallel, and a function for FSDP2."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future

from supernode.compressing.choose import COMPRESSORS, compressor
from supernode.compressing.compressor import Compressor
from supernode.compressing.lay import Named
from supernode.errors import ModelError, SpecError
from supernode.registry import did_you_mean
from supernode.schema.codec import adapter
from supernode.schema.spread import Communication
from supernode.syncing.compressed import Compressed, OneByOne
from supernode.syncing.shards import own_parameters
from supernode.ways.hierarchy import Pending
from supernode.ways.hosts import find_hosts, leave, subgroup


class HookState:
    """What `hook` keeps between steps. All ranks make it at the same time, after `init_process_group`.

    The first step of a process travels whole, since PyTorch makes its buckets anew after it; what a loaded state holds
    waits until then. A resumed run so differs from an unbroken one by that step, and loses nothing.

    Args:
        compress: as `communication.compress` of a job; `none` sends gradients as they are.
        where: `all` compresses among all ranks, `slow` between hosts only.
        group: of the model's copies; all ranks by default.
        warmup: first steps that travel whole.
        rank: of PowerSGD's factors.
        density: part of the numbers that `topk` sends.

    Raises:
        SpecError: an argument is unknown, of another kind, or out of its limits.
        ModelError: ranks have not met yet.
    """

    def __init__(
        self, compress: str, *, where: str = "all", group: dist.ProcessGroup | None = None, warmup: int = 0,
        rank: int = 4, density: float = 0.01, seed: int = 0,
    ) -> None:  # fmt: skip
        if not dist.is_initialized():
            raise ModelError(
                "`HookState` is made before the ranks have met",
                hint="call `torch.distributed.init_process_group` first.",
            )
        made = _made(compress, where=where, rank=rank, density=density, warmup=warmup, seed=seed)
        found = group if group is not None else dist.group.WORLD
        if not isinstance(found, dist.ProcessGroup):
            raise SpecError(f"`group` is {found!r}, not a process group", hint="leave it out for all ranks.")
        self.size = found.size()
        self.steps = 0
        self._taken = 0
        self._known: dict[str, tuple[int, ...]] = {}
        self._compressed = Compressed(made, found, slow_only=where == "slow") if made else None
        self._plain: OneByOne | None = None
        if self._compressed is None:
            self._own = subgroup(found, range(found.size()), find_hosts(found).token)
            self._plain = OneByOne(_all_reduce(self._own))
        # One thread waits, so futures are fulfilled in the order in which PyTorch asked.
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="supernode-hook")

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to average a bucket over the group; the future's value is its buffer."""
        key, flat = f"bucket-{bucket.index()}", bucket.buffer()
        way = self._compressed or self._plain
        assert way is not None
        if self._compressed is not None:
            # A step below 0 is before any warm-up's end.
            self._compressed.begin(self.steps if self._taken else -1)
            if self._taken:
                self._announce(self._compressed, key, bucket)
        if bucket.is_last():
            self.steps += 1
            self._taken += 1
        future: Future[Tensor] = Future()
        self._waiter.submit(self._fulfil, future, way.start(flat, key), flat)
        return future

    def _announce(self, way: Compressed, key: str, bucket: GradBucket) -> None:
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        sizes = tuple(itertools.chain.from_iterable(shapes))
        if self._known.get(key) != sizes:
            named = [(f"{key}.{number}", shape) for number, shape in enumerate(shapes)]
            way.prepare([(key, named, bucket.buffer())])
            self._known[key] = sizes

    def _fulfil(self, future: Future[Tensor], work: Pending, flat: Tensor) -> None:
        try:
            work.wait()
            future.set_result(flat.div_(self.size))
        except Exception as error:  # noqa: BLE001 - raised where PyTorch waits for the gradients
            future.set_exception(error)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's state by name, as tensors; each rank has its own."""
        kept = self._compressed.state() if self._compressed is not None else {}
        return {"steps": torch.tensor(self.steps)} | {f"kept.{name}": tensor for name, tensor in kept.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave on this rank of as many; all ranks call this, before the next step.

        Raises:
            ModelError: it is no such state.
        """
        self.steps = _count(state, "steps")
        if self._compressed is not None:
            kept = {name: tensor.clone() for name, tensor in state.items() if name.startswith("kept.")}
            self._compressed.load({name.removeprefix("kept."): tensor for name, tensor in kept.items()})
            self._known.clear()

    def close(self) -> None:
        """End the threads and let go of the groups; no step may be under way, and all ranks call this."""
        self._waiter.shutdown()
        if self._compressed is not None:
            self._compressed.close()
        if self._plain is not None:
            self._plain.close()
            leave(self._own)


def hook(state: HookState, bucket: GradBucket) -> Future[Tensor]:
    """Average one bucket's gradients: `ddp_model.register_comm_hook(HookState("powersgd"), hook)`."""
    return state.send(bucket)


# PyTorch compares the annotations themselves, and they are text here.
hook.__annotations__.update(bucket=GradBucket, **{"return": Future[Tensor]})


class ShardState:
    """What `compress_fsdp` keeps between steps: a compressor, and how often each module has sent."""

    def __init__(self, made: Compressor[Any]) -> None:
        self.compressor = made
        self.steps: dict[str, int] = {}
        self._group: dict[str, dist.ProcessGroup] = {}

    def announce(self, key: str, parameters: Named, group: dist.ProcessGroup) -> None:
        """Get to know a module's gradients, as they will lie in one vector."""
        self.compressor.prepare(key, parameters, group)
        self.steps[key], self._group[key] = 0, group

    def average(self, flat: Tensor, key: str, *, divisor: int) -> None:
        """Put the sum over the module's group, divided, into `flat`."""
        self.compressor.step = self.steps[key]
        self.steps[key] += 1
        if self._group[key].size() > 1:  # Alone, a rank would round for nobody.
            self.compressor.exchange(flat, self._group[key], key)
        if divisor > 1:
            flat.div_(divisor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's state by name, as tensors; each rank has its own."""
        steps = {f"steps.{key}": torch.tensor(count) for key, count in self.steps.items()}
        return steps | {f"kept.{name}": tensor for name, tensor in self.compressor.state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave on this rank of as many; all ranks call this.

        Raises:
            ModelError: it is of other modules, ranks or settings.
        """
        steps = {key: _count(state, f"steps.{key}") for key in self.steps}
        kept = {name.removeprefix("kept."): tensor for name, tensor in state.items() if name.startswith("kept.")}
        if not self.compressor.load(kept):
            raise ModelError(
                "the state of the compressor is of other modules, ranks or settings",
                hint="load it where as many ranks shard the same modules with the same arguments, or start without it.",
            )
        self.steps = steps


def compress_fsdp(
    model: nn.Module, compress: str, *, replicas: dist.ProcessGroup | None = None, warmup: int = 0, rank: int = 4,
    density: float = 0.01, seed: int = 0,
) -> ShardState:  # fmt: skip
    """Let the gradients of modules under `fully_shard` travel compressed.

    Args:
        model: with all its sharded modules, each over a mesh of one dim.
        compress: as `communication.compress` of a job, without `none`.
        replicas: ranks that hold the same shards. Given, what is compressed is the average over them, and the
            reduce-scatter within a mesh travels whole, as fits fast links inside hosts and slow ones between: shard
            over the inner dim of a mesh of two, and name the outer dim's group here. Not given, the reduce-scatter is.

    Returns:
        What is to be saved and loaded beside the model.

    Raises:
        SpecError: an argument is unknown, of another kind, or out of its limits.
        ModelError: no module is sharded.
    """
    made = _made(compress, rank=rank, density=density, warmup=warmup, seed=seed)
    if made is None:
        raise SpecError("`compress` is none", hint="leave out `compress_fsdp`, or name a compressor.")
    state = ShardState(made)
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule) or not (own := own_parameters(module)):  # type: ignore[arg-type]
            continue
        key, mesh = name or "root", _mesh(own[0])
        shards = [(f"{key}.{number}", _padded(parameter, mesh.size())) for number, parameter in enumerate(own)]
        if replicas is not None:
            state.announce(key, shards, replicas)
            module.set_all_reduce_hook(partial(state.average, key=key, divisor=replicas.size()))
            continue
        # FSDP2 lays the shards of all parameters side by side, rank by rank.
        chunks = [(f"{part}.{chunk}", shape) for chunk in range(mesh.size()) for part, shape in shards]
        state.announce(key, chunks, mesh.get_group())
        module.set_custom_reduce_scatter(_ReduceScatter(state, key))  # type: ignore[arg-type]
    if not state.steps:
        raise ModelError("no module of the model is sharded", hint="call `fully_shard` before `compress_fsdp`.")
    return state


class _ReduceScatter:
    """What FSDP2 calls instead of its own reduce-scatter, as `set_custom_reduce_scatter` documents it."""

    def __init__(self, state: ShardState, key: str) -> None:
        self._state, self._key = state, key

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        divisor = group.size() if op == dist.ReduceOp.AVG else 1
        assert divisor > 1 or op == dist.ReduceOp.SUM, "FSDP2 sums or averages on a mesh of one dim"
        self._state.average(input_tensor, self._key, divisor=divisor)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def _made(compress: str, *, seed: int, **said: Any) -> Compressor[Any] | None:
    """Return the compressor that the caller's arguments name, held against the kinds and limits of a job's keys."""
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise SpecError(f"`seed` is {seed!r}", hint="choose a whole number from 0 to 4,294,967,295.")
    if isinstance(compress, str) and compress not in ("none", *COMPRESSORS):
        raise SpecError(f"unknown compressor `{compress}`", hint=did_you_mean(compress, COMPRESSORS))
    try:
        # Strict JSON, as a job file is read: neither "4" nor 4.5 for a whole number.
        checked = adapter(Communication).validate_json(
            json.dumps({"compress": compress, **said}, default=repr), strict=True
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise SpecError(
            f"`{problem['loc'][0]}` is {problem['input']!r}", hint=f"{problem['msg'].lower()}, as in a job file."
        ) from None
    return compressor(checked, seed=seed)


def _count(state: Mapping[str, Tensor], name: str) -> int:
    """Return a number of steps that `state_dict` gave."""
    value = state.get(name) if isinstance(state, Mapping) else None
    if isinstance(value, Tensor) and value.dtype == torch.int64 and value.numel() == 1 and value >= 0:
        return int(value)
    raise ModelError(
        f"the state of the compressor has no number of steps under `{name}`",
        hint="load what `state_dict` gave on this rank, or start without it.",
    )


def _all_reduce(group: dist.ProcessGroup) -> Any:
    return lambda flat, key: dist.all_reduce(flat, group=group)


def _mesh(parameter: nn.Parameter) -> Any:
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh


def _padded(parameter: nn.Parameter, ranks: int) -> tuple[int, ...]:
    """Return the shape of what each rank is sent of a parameter; one dim where it is not cut by rows."""
    assert isinstance(parameter, DTensor)
    rows = -(-parameter.shape[0] // ranks)
    cut = parameter.placements[0]
    if isinstance(cut, Shard) and cut.dim != 0:
        return (parameter.numel() // ranks,)
    return (rows, *parameter.shape[1:])
