"""When do gradients leave? In buckets, from inside backward, in the order in which backward yields them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from supernode.axes.tensor import local
from supernode.errors import ModelError
from supernode.ways.meeting import Own, Work

BUCKET_BYTES = 25 * 2**20  # PyTorch DDP's default bucket (Li et al., arXiv:2006.15704, figure 8).
PIECES = 16
"""Buckets that gradients are cut into at least, so that the first leaves early and little is left at the end."""
WORTH, LEAST = 2 * 2**20, 256 * 2**10
"""Bytes below which a bucket, and the last one, are not made smaller: each costs 0.2 ms of a core on gloo."""
LAST_SHARE = 1 / 256
"""Part of all bytes that may travel when no backward is left to hide behind."""
LEAST_NEAR = 2**20
"""Bytes of the last bucket where copies share a host: what travels there costs its cores, not a link's time."""


class Start(Protocol):
    """Begin to sum a flat tensor over the copies, in place; all call it in one order with tensors of one size."""

    def __call__(self, flat: Tensor, key: str = "") -> Work: ...


def all_reduce(group: dist.ProcessGroup) -> Start:
    """Return the group's own all-reduce."""
    return Own(group).start


def settle(parameter: nn.Parameter) -> None:
    """Lay a parameter's gradient out as the parameter is.

    DTensor leaves some gradients (an embedding's, split by vocabulary) as unsummed or whole copies.
    """
    grad = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _nbytes(parameter: nn.Parameter) -> int:
    return local(parameter).numel() * parameter.element_size()


class Bucket:
    """Gradients that travel together.

    Attributes:
        flat: their numbers, one after the other; nothing but `Start` writes to it while they travel.
        views: `flat` cut and shaped as the parameters are.
        key: names the bucket from step to step.
        missing: parameters whose gradient is still to come in this step.
        work: the sum under way.
    """

    def __init__(self, parameters: list[nn.Parameter], key: str) -> None:
        first = local(parameters[0])
        sizes = [local(parameter).numel() for parameter in parameters]
        self.parameters, self.key = parameters, key
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [
            view.view(local(parameter).shape)
            for view, parameter in zip(self.flat.split(sizes), parameters, strict=True)
        ]
        self.missing = len(parameters)
        self.work: Work | None = None

    def lie_in(self, flat: Tensor) -> None:
        """Move to another buffer of the same size, before anything is in it."""
        sizes = [view.numel() for view in self.views]
        self.flat = flat
        self.views = [new.view(old.shape) for new, old in zip(flat.split(sizes), self.views, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.flat.numel() * self.flat.element_size()


class ReplicaSync:
    """Sums gradients over copies, bucket by bucket, as backward of the last micro-batch yields them.

    The first step only notes in which order gradients arrive; the copies agree on the first one's order, and from then
    on buckets leave in it, so all copies agree even where one of them does not use a parameter. A parameter that comes
    later than it did then holds up what follows it, up to `finish`. Whether buckets leave early changes no bit: what is
    summed with what depends on the buckets alone.

    Args:
        uses: for each parameter, the backward passes of one step that reach it.
        group: the copies.
        start: how a bucket is summed; the group's own all-reduce by default.
        bucket_bytes: most bytes of a bucket; a larger parameter has one for itself.
        overlap: buckets leave as soon as they can, and not all in `finish`.
        filled: is given the buckets once they are known, before the first is summed.
        near: the copies share a host, so that buckets need not be small.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], uses: dict[nn.Parameter, int], group: dist.ProcessGroup,
        *, start: Start | None = None, bucket_bytes: int = BUCKET_BYTES, overlap: bool = True,
        filled: Callable[[Sequence[Bucket]], None] = lambda _: None, near: bool = False,
    ) -> None:  # fmt: skip
        self.parameters = list(parameters)
        self.group, self.overlap = group, overlap
        self.start = start or all_reduce(group)
        self.buckets: list[Bucket] = []
        self.unused: list[nn.Parameter] = []
        """Parameters to which no copy's backward came in the first step; known after it."""
        self._bucket_bytes, self._filled, self._near = bucket_bytes, filled, near
        self._uses = uses
        self._left: dict[nn.Parameter, int] = {}
        self._arrived: list[nn.Parameter] = []
        self._home: dict[nn.Parameter, tuple[Bucket, Tensor]] = {}
        self._next = 0
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(weakly(self._arrive))
        self.begin()

    def begin(self) -> None:
        """Drop the gradients and await a step's backward passes."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing, bucket.work = len(bucket.parameters), None
        for parameter in self.parameters:
            self._left[parameter] = self._uses[parameter]
            parameter.grad = None

    def _arrive(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._left[parameter] -= 1
        left = self._left[parameter]
        if left < 0:
            raise ModelError(
                "a parameter received its gradient more often than once a micro-batch, too late to be summed",
                hint="with torch.utils.checkpoint over shared layers set `use_reentrant=False`.",
            )
        if not self.buckets:
            if left == 0:
                self._arrived.append(parameter)
            return
        bucket, view = self._home[parameter]
        # A first gradient is moved into the bucket, where later micro-batches add to it: cheaper than to zero the
        # bucket and add to that. A DTensor's is moved once it is whole.
        if left == 0 or not isinstance(parameter, DTensor):
            _gather(parameter, view)
        if left == 0:
            bucket.missing -= 1
            if self.overlap:
                self._launch(ready_only=True)

    def _launch(self, *, ready_only: bool) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing and ready_only:
                return
            bucket.work = self.start(bucket.flat, bucket.key)
            self._next += 1

    def finish(self, summed: Callable[[Sequence[nn.Parameter]], None] = lambda _: None) -> float:
        """Wait until every gradient is the sum over the copies; returns the seconds spent waiting.

        Args:
            summed: is given each bucket's parameters as soon as their gradients are sums, while later ones travel.
        """
        if not self.buckets and self.parameters:
            self._learn()
        for bucket in self.buckets[self._next :]:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                _gather(parameter, view)
        self._launch(ready_only=False)
        waited = 0.0
        for bucket in self.buckets:
            assert bucket.work is not None
            begun = time.perf_counter()
            bucket.work.wait()
            waited += time.perf_counter() - begun
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                _scatter(parameter, view)
            summed(bucket.parameters)
        return waited

    def _learn(self) -> None:
        """Agree with the other copies on the order of arrival, and fill the buckets by it."""
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        order = [numbers[parameter] for parameter in self._arrived]
        seen = set(order)
        order += [number for number in reversed(range(len(numbers))) if number not in seen]
        device = self.parameters[0].device
        agreed = torch.tensor(order, device=device)
        dist.broadcast(agreed, group_src=0, group=self.group)
        used = torch.tensor([parameter.grad is not None for parameter in self.parameters], device=device).int()
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        self.unused = [
            parameter for parameter, any_copy in zip(self.parameters, used.tolist(), strict=True) if not any_copy
        ]
        filled = fill([self.parameters[number] for number in agreed.tolist()], self._bucket_bytes, near=self._near)
        self.buckets = [Bucket(chosen, f"bucket-{number}") for number, chosen in enumerate(filled)]
        self._filled(self.buckets)
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                self._home[parameter] = bucket, view
        self._arrived.clear()


def weakly(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a method as a hook that does not keep its object.

    A parameter holds its hooks where Python's collector does not look: with the object that they are of, which holds
    the parameter, it would never be freed.
    """
    held = weakref.WeakMethod(hook)

    def called(parameter: Tensor) -> None:
        if (own := held()) is not None:
            own(parameter)

    return called


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


def _scatter(parameter: nn.Parameter, view: Tensor) -> None:
    """See to it that a parameter's gradient is what its part of the bucket holds."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    part = local(parameter.grad)
    if part.data_ptr() != view.data_ptr():
        part.copy_(view)


def fill(order: Sequence[nn.Parameter], most: int, *, near: bool = False) -> list[list[nn.Parameter]]:
    """Return parameters, given in order of arrival, as buckets that leave in that order.

    What arrives last has no backward left to hide behind, so the last bucket is small and each before it up to twice as
    large; the first is small too, so that the link does not idle while it fills. A bucket holds one kind of number.

    Args:
        most: bytes of a bucket; a larger parameter has one for itself.
        near: no link is to be kept busy; but for the first and the last, buckets are as large as they may be.
    """
    total = sum(map(_nbytes, order))
    most = most if near else min(most, max(total // PIECES, WORTH))
    limit = min(most, max(int(total * LAST_SHARE), LEAST_NEAR if near else LEAST))
    first = min(most, 4 * limit)
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(order):
        if buckets and size + _nbytes(parameter) <= limit and _alike(buckets[-1][0], parameter):
            buckets[-1].append(parameter)
            size += _nbytes(parameter)
        else:
            if buckets:
                limit = most if near else min(most, 2 * limit)
            buckets.append([parameter])
            size = _nbytes(parameter)
    buckets = [bucket[::-1] for bucket in buckets[::-1]]
    if buckets and sum(map(_nbytes, buckets[0])) > first:
        buckets[:1] = _cut(buckets[0], first)
    return buckets


def _alike(one: nn.Parameter, other: nn.Parameter) -> bool:
    return one.dtype == other.dtype and one.device == other.device


def _cut(bucket: list[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Return a bucket as one of at most so many bytes, or one parameter, and the rest if there is any."""
    size, count = 0, 0
    while count < len(bucket) and (not count or size + _nbytes(bucket[count]) <= most):
        size += _nbytes(bucket[count])
        count += 1
    return [part for part in (bucket[:count], bucket[count:]) if part]
