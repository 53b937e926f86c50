"""How are weights of 16 bits used in float32 arithmetic without a float32 copy? Cast up layer by layer, each time.

Cards whose products of 16 bits are slow, or too coarse, hold weights in two bytes all the same. A module's weights are
cast when its forward begins and the casts go when it ends: what backward needs of them is kept as the weight itself and
cast again there. Gradients come back in the weights' precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Put a module's parameters, not its buffers, into a precision."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def compute_in_float32(module: nn.Module) -> None:
    """Make every part of a module that holds parameters compute with casts of them.

    Call it once the module is split and before it is sharded. A part's own code may use its own parameters alone, as
    modules do; those of others are in 16 bits.
    """
    for part in module.modules():
        holders = [part]
        if isinstance(part, nn.MultiheadAttention):  # It reads its output's weight without calling that layer.
            holders += [child for child in part.children() if isinstance(child, NonDynamicallyQuantizableLinear)]
        if any(True for holder in holders for _ in holder.parameters(recurse=False)):
            vars(part)["forward"] = _CastUp(part.forward, holders)


class _CastUp:
    """A module's forward on casts of its parameters."""

    def __init__(self, forward: Callable[..., Any], holders: list[nn.Module]) -> None:
        self.forward, self.holders = forward, holders

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = [(holder, dict(holder._parameters)) for holder in self.holders]
        casts: dict[int, Tensor] = {}
        try:
            for holder, parameters in kept:
                for name, parameter in parameters.items():
                    if parameter is not None and parameter.is_floating_point() and parameter.element_size() == 2:
                        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                        cast = part.float()
                        casts[cast.untyped_storage().data_ptr()] = part.detach()
                        vars(holder)["_parameters"][name] = cast
            with _remembering(casts):
                return self.forward(*args, **kwargs)
        finally:
            for holder, parameters in kept:
                holder._parameters.update(parameters)


def _remembering(casts: dict[int, Tensor]) -> saved_tensors_hooks:
    """Return hooks that keep weights in the place of their casts, and leave all else to the hooks around them."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        weight = casts.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if weight is not None and tensor.dtype is torch.float32:
            return weight, tensor.shape, tensor.stride(), tensor.storage_offset()
        return (around[0](tensor),) if around else (tensor,)

    def unpack(packed: Any) -> Tensor:
        if len(packed) == 4:
            weight, shape, stride, offset = packed
            return weight.float().as_strided(shape, stride, offset)
        found: Tensor = around[1](packed[0]) if around else packed[0]
        return found

    return saved_tensors_hooks(pack, unpack)
