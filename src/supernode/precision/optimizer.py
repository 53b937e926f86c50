"""How do weights of few bits move? AdamW and SGD whose moments, rounding and gradients' life are chosen apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from supernode.precision.moments import BLOCK, LEAST, Moment, Plain, Positive, Signed
from supernode.precision.rounding import Places, draw, round_to
from supernode.precision.scaling import LossScale

CHUNK = 256 * BLOCK
"""Elements updated at a time: what the update makes on its way stays below a few MB, whatever the parameter's size."""

Keys = Callable[[int, str], int]
"""(updates so far, parameter's name) to 63 bits that decide what is drawn."""


class LowPrecision(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) or SGD with momentum; the arithmetic is in float32.

    One parameter can be updated before the others' gradients are there (`update`); `advance` ends the step.

    Args:
        named: what is trained, by its name in the whole model.
        groups: as torch has them, with `lr` and `weight_decay`.
        state: moments of the parameter's own precision, of float32, or in 8 bits (`precision.moments`).
        rounding: of weights of 16 bits after their update.
        keys: seeds of what is drawn.
        scaling: the loss scale that the gradients still carry; its state is kept with the moments.

    Attributes:
        factor: what gradients are multiplied by as they are read, in float32.
        updates: steps taken; a skipped one is none.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], groups: list[dict[str, Any]], *,
        kind: Literal["adamw", "sgd"], betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8,
        momentum: float = 0.9, state: Literal["same", "float32", "float8"] = "same",
        rounding: Literal["nearest", "stochastic"] = "nearest", keys: Keys, scaling: LossScale | None = None,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.kind, self.betas, self.epsilon, self.momentum = kind, betas, epsilon, momentum
        self.kept, self.rounding, self.scaling = state, rounding, scaling
        self.factor, self.updates = 1.0, 0
        self._keys = keys
        self._name: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
        self._group = {parameter: group for group in self.param_groups for parameter in group["params"]}
        self._places: dict[Tensor, Places] = {}
        self.prepare()

    def prepare(self) -> None:
        """Give every parameter its moments, all zero."""
        wanted = {"adamw": (("exp_avg", Signed), ("exp_avg_sq", Positive)), "sgd": (("momentum_buffer", Signed),)}
        chosen = wanted[self.kind] if self.kind == "adamw" or self.momentum else ()
        for parameter in self._group:
            like = _part(parameter)
            self.state[parameter] = {key: self._moment(parameter, like, low) for key, low in chosen}
            self._places[parameter] = _places(parameter)

    def _moment(self, parameter: Tensor, like: Tensor, low: type[Signed] | type[Positive]) -> Moment:
        if self.kept == "same":
            return Plain(like, like.dtype)
        # By the whole parameter's size, so that a layout decides nothing.
        return low(like) if self.kept == "float8" and parameter.numel() >= LEAST else Plain(like, torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for parameter in self._group:
            if parameter.grad is not None:
                self.update(parameter, _part(parameter.grad))
        self.advance()

    def advance(self) -> None:
        """End a step in which parameters were updated one by one."""
        self.updates += 1

    @torch.no_grad()
    def update(self, parameter: Tensor, grad: Tensor) -> None:
        """Move this rank's part of one parameter by its gradient, which must be finite."""
        weights, grads = _part(parameter), grad.reshape(-1)
        flat = weights.reshape(-1)  # A view, unless the part is laid out in strides.
        group, moments = self._group[parameter], self.state[parameter]
        chance = self.rounding == "stochastic" and flat.element_size() == 2
        draws = chance or self.kept == "float8"
        key = self._keys(self.updates, self._name.get(parameter, "")) if draws else 0
        move = self._adamw if self.kind == "adamw" else self._sgd
        for first in range(0, flat.numel(), CHUNK):
            last = min(first + CHUNK, flat.numel())
            bits = draw(key, self._places[parameter](first, last, flat.device)) if draws else None
            # `to` would hand a float32 gradient or weight over as it is, and it is changed below.
            pull, weight = grads[first:last].float() * self.factor, flat[first:last].float()
            moved = move(weight, pull, group, moments, first, last, bits)
            flat[first:last] = round_to(moved, flat.dtype, bits) if chance and bits is not None else moved
        if flat.data_ptr() != weights.data_ptr():
            weights.copy_(flat.view(weights.shape))

    def _adamw(
        self, weight: Tensor, grad: Tensor, group: dict[str, Any], moments: Mapping[str, Moment],
        first: int, last: int, bits: Tensor | None,
    ) -> Tensor:  # fmt: skip
        (beta, beta_sq), step = self.betas, self.updates + 1
        mean = moments["exp_avg"].read(first, last).lerp_(grad, 1 - beta)
        square = moments["exp_avg_sq"].read(first, last).mul_(beta_sq).addcmul_(grad, grad, value=1 - beta_sq)
        moments["exp_avg"].write(first, last, mean, bits)
        moments["exp_avg_sq"].write(first, last, square, bits)
        width = square.sqrt().div_(math.sqrt(1 - beta_sq**step)).add_(self.epsilon)
        rate = group["lr"]
        return (weight * (1 - rate * group["weight_decay"])).addcdiv_(mean, width, value=-rate / (1 - beta**step))

    def _sgd(
        self, weight: Tensor, grad: Tensor, group: dict[str, Any], moments: Mapping[str, Moment],
        first: int, last: int, bits: Tensor | None,
    ) -> Tensor:  # fmt: skip
        pull = grad.add_(weight, alpha=group["weight_decay"]) if group["weight_decay"] else grad
        if moments:
            pull = moments["momentum_buffer"].read(first, last).mul_(self.momentum).add_(pull)
            moments["momentum_buffer"].write(first, last, pull, bits)
        return weight.sub(pull, alpha=group["lr"])

    def saved(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return all moments decoded and laid out as their parameters are; 8 bits as bfloat16, which holds them."""
        return {
            parameter: {key: self._decoded(parameter, moment) for key, moment in moments.items()}
            for parameter, moments in self.state.items()
        }

    def _decoded(self, parameter: Tensor, moment: Moment) -> Tensor:
        part = _part(parameter)
        whole = torch.empty(part.numel(), dtype=moment.saved_as, device=part.device)
        for first in range(0, part.numel(), CHUNK):
            last = min(first + CHUNK, part.numel())
            whole[first:last] = moment.read(first, last)
        shaped = whole.view(part.shape)
        if not isinstance(parameter, DTensor):
            return shaped
        return DTensor.from_local(
            shaped, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip

    def saved_scaling(self) -> Tensor | None:
        """Return the loss scale's state, if there is one."""
        return self.scaling.saved() if self.scaling is not None else None

    def take(self, saved: Mapping[Tensor, Mapping[str, Tensor]], scaling: Tensor | None, *, step: int) -> None:
        """Take up moments as `saved` gave them, perhaps in another layout, after `step` steps of the run."""
        for parameter, values in saved.items():
            for key, value in values.items():
                flat = _part(value).reshape(-1)
                for first in range(0, flat.numel(), CHUNK):
                    last = min(first + CHUNK, flat.numel())
                    self.state[parameter][key].write(first, last, flat[first:last].float(), None)
        if self.scaling is not None and scaling is not None:
            self.scaling.take(scaling)
        self.updates = step - (self.scaling.skipped if self.scaling is not None else 0)


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _places(parameter: Tensor) -> Places:
    if not isinstance(parameter, DTensor):
        return Places(parameter.shape, parameter.shape, [0] * parameter.ndim)
    part, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Places(parameter.shape, part, offset)
