"""How are weights updated from inside backward, so that gradients are never all there at once?

As soon as a parameter's gradient is whole it is summed over the copies, its update is made and it is let go. What waits
is the gradients of one or two groups on their way, and through micro-batches (accumulation, pipelines) what these add
up; the last micro-batch lets them go.

What is guaranteed where a gradient is not finite: it is looked at before its update, so neither it nor any that comes
after it on this rank reaches a weight or a moment; the step ends with an error on every rank before anything is saved.
Parameters that were updated before it in the same step stay updated: unlike an update after backward, the state in
memory is then between two steps, and a run goes on from its last checkpoint.

Sources: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO),
arXiv:2306.09782; PyTorch, "How to save memory by fusing the optimizer step into the backward pass".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from supernode.errors import ModelError
from supernode.parallel.tensor import local
from supernode.precision.optimizer import LowPrecision
from supernode.syncing.buckets import Start, settle, weakly
from supernode.ways.meeting import Work

GROUP_BYTES = 2**20
"""Gradients that travel together: enough to hide a message's own cost, few enough to be no state."""


class _Group:
    """Parameters whose gradients travel together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.flat: Tensor | None = None
        self.work: Work | None = None


class EarlyUpdates:
    """Updates parameters as backward yields their gradients.

    Args:
        trained: in the order of the model.
        uses: backward passes of one step that bring each parameter a gradient.
        held: ranks that hold each parameter's element, so that a sum over all ranks counts it once.
        late: parameters whose gradients are still changed after backward; `finish` leaves them for `rest`.
        start: sums over copies; None where there is one.
    """

    def __init__(
        self, optimizer: LowPrecision, trained: Sequence[nn.Parameter], *, uses: Mapping[nn.Parameter, int],
        held: Mapping[nn.Parameter, int], late: Collection[nn.Parameter] = (), start: Start | None = None,
    ) -> None:  # fmt: skip
        self.optimizer, self.trained, self.start = optimizer, list(trained), start
        self._uses, self._held, self._late = uses, held, set(late)
        self._left: dict[nn.Parameter, int] = {}
        self._groups = [_Group(chosen) for chosen in _grouped(self.trained[::-1])] if start else []
        self._group = {parameter: group for group in self._groups for parameter in group.parameters}
        self._next = 0
        self._travelling: deque[_Group] = deque()
        self.squares = 0.0
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(weakly(self._arrive))

    def begin(self, factor: float) -> None:
        """Await a step's backward passes, whose gradients times `factor` are those of the loss."""
        self.optimizer.factor, self.squares, self._next = factor, 0.0, 0
        for parameter in self.trained:
            self._left[parameter], parameter.grad = self._uses[parameter], None
        for group in self._groups:
            group.missing = len(group.parameters)

    def _arrive(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._left[parameter] -= 1
        if self._left[parameter] < 0:
            raise ModelError(
                "a parameter received its gradient more often than once a micro-batch, after its update",
                hint="set `optimizer.in_backward` to false, or torch.utils.checkpoint's `use_reentrant=False`.",
            )
        if self._left[parameter] == 0:
            self._whole(parameter)

    def _whole(self, parameter: nn.Parameter) -> None:
        settle(parameter)
        if self.start is not None:
            self._group[parameter].missing -= 1
            self._send()
        elif parameter not in self._late:
            self._apply(parameter, self._grad(parameter))
            parameter.grad = None

    def _send(self) -> None:
        """Start the groups whose turn has come, in one order on all copies; two travel at a time."""
        assert self.start is not None
        while self._next < len(self._groups) and not self._groups[self._next].missing:
            group = self._groups[self._next]
            group.flat = torch.cat([self._grad(parameter).reshape(-1) for parameter in group.parameters])
            for parameter in group.parameters:
                parameter.grad = None
            group.work = self.start(group.flat)
            self._travelling.append(group)
            self._next += 1
            if len(self._travelling) > 2:
                self._receive()

    def _receive(self) -> None:
        group = self._travelling.popleft()
        assert group.work is not None
        assert group.flat is not None
        group.work.wait()
        sizes = [local(parameter).numel() for parameter in group.parameters]
        for parameter, grad in zip(group.parameters, group.flat.split(sizes), strict=True):
            if parameter in self._late:
                parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).copy_(grad.view(local(parameter).shape))
            else:
                self._apply(parameter, grad)
        group.flat = group.work = None

    @staticmethod
    def _grad(parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            return torch.zeros_like(local(parameter))
        grad = local(parameter.grad)
        return grad.to_dense() if grad.is_sparse else grad

    def _apply(self, parameter: nn.Parameter, grad: Tensor) -> None:
        norm = float(torch.linalg.vector_norm(grad, dtype=torch.float32)) if grad.numel() else 0.0
        self.squares += norm * norm / self._held[parameter]
        if math.isfinite(self.squares):
            self.optimizer.update(parameter, grad.detach())

    def finish(self) -> None:
        """Update what no backward pass reached, as with a gradient of zeros, and all that still travels."""
        for parameter in self.trained:
            if self._left[parameter] > 0:
                self._left[parameter] = 0
                self._whole(parameter)
        while self._travelling:
            self._receive()

    def rest(self) -> None:
        """Update the late ones, and end the step."""
        for parameter in self.trained:
            if parameter in self._late:
                self._apply(parameter, self._grad(parameter))
                parameter.grad = None
        if math.isfinite(self.squares):
            self.optimizer.advance()


def _grouped(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        nbytes = local(parameter).numel() * parameter.element_size()
        if groups and size + nbytes <= GROUP_BYTES and groups[-1][0].dtype == parameter.dtype:
            groups[-1].append(parameter)
            size += nbytes
        else:
            groups.append([parameter])
            size = nbytes
    return groups
