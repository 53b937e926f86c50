"""How gradients meet: summed over whole copies from inside backward, and over the stages that share a parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from supernode.errors import ModelError
from supernode.parallel.assemble import Parts
from supernode.parallel.mesh import Place
from supernode.parallel.tensor import local

BUCKET_BYTES = 25 * 2**20  # PyTorch DDP's default bucket (Li et al., arXiv:2006.15704, figure 8).


def settle(parameter: nn.Parameter) -> None:
    """Lay a parameter's gradient out as the parameter is.

    DTensor leaves some gradients (an embedding's, split by vocabulary) as unsummed or whole copies.
    """
    grad = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


class _Bucket:
    """Gradients that travel together: one flat buffer, and how many of them are still to come."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = local(parameters[0])
        sizes = [local(parameter).numel() for parameter in parameters]
        self.parameters = parameters
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [
            view.view(local(parameter).shape)
            for view, parameter in zip(self.flat.split(sizes), parameters, strict=True)
        ]
        self.missing = 0
        self.work: dist.Work | None = None


class ReplicaSync:
    """Sums gradients over the data axis, bucket by bucket, as backward of the last micro-batch yields them.

    Buckets leave in one fixed order, so all copies agree even where one of them does not use a parameter.

    Args:
        uses: for each parameter, the backward passes of one step that reach it.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], uses: dict[nn.Parameter, int], group: dist.ProcessGroup,
        *, bucket_bytes: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        self.group = group
        self.buckets = [_Bucket(chosen) for chosen in _fill_buckets(list(parameters)[::-1], bucket_bytes)]
        self._uses = uses
        self._left: dict[nn.Parameter, int] = {}
        self._next = 0
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, view))
        self.start()

    def start(self) -> None:
        """Drop the gradients and await a step's backward passes."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing, bucket.work = len(bucket.parameters), None
            for parameter in bucket.parameters:
                self._left[parameter] = self._uses[parameter]
                parameter.grad = None

    def _hook(self, bucket: _Bucket, view: Tensor):  # type: ignore[no-untyped-def]
        def arrived(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            self._left[parameter] -= 1
            if self._left[parameter] < 0:
                raise ModelError(
                    "a parameter received its gradient more often than once a micro-batch, too late to be summed",
                    hint="with torch.utils.checkpoint over shared layers set `use_reentrant=False`.",
                )
            # A first gradient is moved into the bucket, where later micro-batches add to it: cheaper than to zero the
            # bucket and add to that. A DTensor's is moved once it is whole.
            if self._left[parameter] == 0 or not isinstance(parameter, DTensor):
                self._gather(parameter, view)
            if self._left[parameter] == 0:
                bucket.missing -= 1
                self._launch_ready()

        return arrived

    @staticmethod
    def _gather(parameter: nn.Parameter, view: Tensor) -> None:
        settle(parameter)
        if parameter.grad is None:
            view.zero_()
        else:
            part = local(parameter.grad)
            part = part.to_dense() if part.is_sparse else part
            if part.data_ptr() != view.data_ptr():
                view.copy_(part)
        if not isinstance(parameter, DTensor):
            parameter.grad = view

    def _launch_ready(self, *, all_of_them: bool = False) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing and not all_of_them:
                return
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            self._next += 1

    def finish(self) -> None:
        """Wait until every gradient is the sum over the data axis."""
        for bucket in self.buckets[self._next :]:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if self._left[parameter]:
                    self._gather(parameter, view)
        self._launch_ready(all_of_them=True)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                part = local(parameter.grad)
                if part.data_ptr() != view.data_ptr():
                    part.copy_(view)


def _fill_buckets(parameters: list[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        nbytes = local(parameter).numel() * parameter.element_size()
        fits = buckets and size + nbytes <= most and buckets[-1][0].dtype == parameter.dtype
        if fits:
            buckets[-1].append(parameter)
            size += nbytes
        else:
            buckets.append([parameter])
            size = nbytes
    return buckets


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

    def __call__(self) -> None:
        for parameter, group in self._pairs:
            settle(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=group)


def copies(parts: Parts, place: Place) -> dict[nn.Parameter, int]:
    """Return how many ranks hold each parameter's element, so that a sum over all ranks counts each once."""
    holders = {names[0]: len(ranks) for names, ranks in parts.tied}
    counts = {}
    for name, parameter in parts.parameters():
        # A dim of the mesh over which the parameter is sharded holds no second copy.
        shards = 1
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                shards *= 1 if placement.is_replicate() else size
        counts[parameter] = place.layout.copies * place.layout.tensor * holders.get(name, 1) // shards
    return counts
