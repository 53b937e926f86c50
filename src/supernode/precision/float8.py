"""How is a linear layer multiplied in 8 bits? Operands are scaled to float8's range; weights are kept as they are.

Weights and activations are rounded to e4m3, gradients to e5m2, each tensor by a scale of its own, its greatest number,
found when it is used (dynamic scaling per tensor); products are summed in float32. Embeddings, norms and the model's
head stay as they are, as do layers whose sizes are no multiples of 16, which cards cannot multiply in float8.

torchao.float8 (0.18) does the same, and the tests hold this against it. It replaces the layers themselves, whose
forward the tensor axis replaces, too.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; torchao.float8, recipe `tensorwise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from supernode.errors import CapacityError, ModelError

# N rows (positions), I inputs, O outputs
HEADS = ("head", "lm_head")
"""Last names of layers that give logits; their rounding would go straight into the loss."""
_MULTIPLE = 16
_SMALLEST = 1e-12  # Of a scale's divisor, as in torchao: a tensor of zeros stays one.


def multiply_in_float8(module: nn.Module, *, has_head: bool = False) -> list[str]:
    """Make a module's linear layers multiply in float8; returns the names of those that do.

    Call it once the module is split: each rank scales by its own part.

    Args:
        has_head: the last of them, in the order of modules, gives the model's output whatever its name, and stays.

    Raises:
        CapacityError: the device has no float8 products.
        ModelError: no layer is left to multiply in float8.
    """
    chosen = []
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    for number, (name, part) in enumerate(layers):
        is_head = name.rpartition(".")[2] in HEADS or (has_head and number == len(layers) - 1)
        if not is_head:
            weight = _local(part.weight)
            if not any(size % _MULTIPLE or not size for size in weight.shape):
                check_device(weight.device)
                vars(part)["forward"] = _Product(part)
                chosen.append(name)
    if not chosen:
        raise ModelError(
            f"`arithmetic` is float8, and of {len(layers)} linear layers none but a head has sizes that are multiples "
            f"of {_MULTIPLE}",
            hint="leave out `arithmetic`, choose other widths, or lower `parallelism.tensor`, which cuts them.",
        )
    return chosen


def layers_of(module: nn.Module) -> tuple[int, int]:
    """Return how many of a module's linear layers multiply in float8, and how many there are."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return sum(isinstance(vars(part).get("forward"), _Product) for part in layers), len(layers)


def check_device(device: torch.device) -> None:
    """Check that a device multiplies in float8.

    Raises:
        CapacityError: it does not; the message says why.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= (8, 9):  # Ada and later: CUDA's `cublasLt` has float8 from compute capability 8.9 on.
            return
        why = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and float8 begins at 8.9"
    elif device.type in ("cpu", "meta"):
        return  # Computed, though not faster than in 16 bits.
    else:
        why = f"float8 products on {device.type} are unknown to this program"
    raise CapacityError(why, hint="leave out `arithmetic`, or set it to same.")


class _Product:
    """A linear layer's forward."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        bias = self.layer.bias
        product: Tensor = _Float8Linear.apply(x, _local(self.layer.weight))
        return product if bias is None else product + _local(bias)


class _Float8Linear(torch.autograd.Function):
    """X Wᵀ with both operands in float8; backward G W and Gᵀ X likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        out_NO = _multiply(x.flatten(0, -2), weight_OI, _FORWARD, _FORWARD, x.dtype)
        return out_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_NO, x_NI = grads[0].flatten(0, -2), x.flatten(0, -2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _multiply(grad_NO, weight_OI.t(), _BACKWARD, _FORWARD, x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            if len(x_NI) % _MULTIPLE:  # Rows of zeros add nothing to the sum over positions.
                missing = (0, 0, 0, -len(x_NI) % _MULTIPLE)
                grad_NO, x_NI = F.pad(grad_NO, missing), F.pad(x_NI, missing)
            of_weight = _multiply(grad_NO.t(), x_NI.t(), _BACKWARD, _FORWARD, weight_OI.dtype)
        return of_x, of_weight


_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def _multiply(a_NI: Tensor, b_OI: Tensor, a_type: torch.dtype, b_type: torch.dtype, out: torch.dtype) -> Tensor:
    """Return A Bᵀ; (N, O). The product wants A laid out by rows and Bᵀ by columns."""
    a, a_scale = _scaled(a_NI, a_type)
    b, b_scale = _scaled(b_OI, b_type)
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=out)


def _scaled(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor in float8, laid out by rows, and what it is to be multiplied by."""
    most = torch.finfo(dtype).max
    scale = tensor.detach().abs().amax().float().clamp_(min=_SMALLEST) / most
    return (tensor.float() / scale).clamp_(-most, most).to(dtype).contiguous(), scale


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
