"""When do sharded weights and their gradients travel? Beside the passes, also where PyTorch's sharding would wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from supernode.axes.tensor import local


class ShardSync:
    """Lets what FSDP2 sends travel while the passes go on, and waits for gradients at the end of backward.

    On a GPU all of it runs on streams of their own and needs no help. On gloo each reduce-scatter would hold backward
    up until it is done, though nothing reads what it yields before the step's end: FSDP2 hands out views of its output
    as gradients. Where something does read it early (a gradient that is there already and is added to, a hook) it is
    waited for at once. Likewise weights are gathered one module ahead, forward and backward.

    Args:
        modules: sharded modules; their gradients must travel in the type that they have, and be summed, not divided.
    """

    def __init__(self, modules: Sequence[FSDPModule], *, overlap: bool = True) -> None:
        self.overlap = overlap
        self._pending: list[tuple[dist.Work, Tensor]] = []
        self._outputs: set[int] = set()
        self._parameters: list[nn.Parameter] = []
        for module in modules:
            assert isinstance(module, nn.Module)
            own = own_parameters(module)
            self._parameters += own
            if own and own[0].device.type == "cpu":
                module.set_custom_reduce_scatter(_ReduceScatter(self, own))  # type: ignore[arg-type]
                module._set_unshard_async_op(overlap)  # documented, for want of streams
            if overlap:
                inside = [other for other in module.modules() if other is not module and isinstance(other, FSDPModule)]
                for one, following in pairwise(inside):
                    one.set_modules_to_forward_prefetch([following])

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self) -> None:
        """Await a step's backward passes."""
        self._pending.clear()
        self._outputs.clear()

    def send(self, output: Tensor, given: Tensor, group: dist.ProcessGroup, own: Iterable[nn.Parameter]) -> None:
        """Sum `given` over the group into each rank's part, `output`."""
        work = dist.reduce_scatter_single(output, given, group=group, async_op=True)
        assert work is not None
        if not self.overlap or any(map(_is_read_early, own)):
            self._wait()
            work.wait()
            return
        self._pending.append((work, given))  # FSDP2 lets go of `given` before it is read to the end.
        self._outputs.add(output.untyped_storage().data_ptr())

    def finish(self) -> float:
        """Wait until every gradient is a sum; returns the seconds spent waiting."""
        begun = time.perf_counter()
        self._wait()
        waited = time.perf_counter() - begun
        for parameter in self._parameters if self._outputs else ():
            if parameter.grad is not None and local(parameter.grad).numel():
                place = local(parameter.grad).untyped_storage().data_ptr()
                assert place in self._outputs, "a gradient was read before it was a sum"
        return waited

    def _wait(self) -> None:
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()


class _ReduceScatter:
    """What FSDP2 calls instead of its own reduce-scatter, as `set_custom_reduce_scatter` documents it."""

    def __init__(self, sync: ShardSync, own: list[nn.Parameter]) -> None:
        self._sync, self._own = sync, own

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        self._sync.send(output_tensor, input_tensor, group, self._own)


def _is_read_early(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a sharded module gathers itself: not a sharded one inside it, and not nobody."""
    groups = fully_shard.state(module)._fsdp_param_groups  # type: ignore[attr-defined]
    own = [held.sharded_param for group in groups for held in group.fsdp_params]
    return [parameter for parameter in own if parameter.requires_grad]
