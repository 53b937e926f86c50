"""How the weights move: the optimizer of a job, and its learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from supernode.axes.tensor import local
from supernode.parallel.chance import seed_for
from supernode.precision.optimizer import LowPrecision
from supernode.precision.scaling import LossScale
from supernode.schema.job import JobSpec, OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then the decay down to the last step.

    >>> learning_rate(OptimizerSpec(learning_rate=1.0, warmup=10, decay="none"), 4, 100)
    0.5
    """
    if step < spec.warmup:
        return spec.learning_rate * (step + 1) / spec.warmup
    if spec.decay == "none":
        return spec.learning_rate
    progress = min(1.0, (step - spec.warmup) / max(1, steps - 1 - spec.warmup))
    shape = (1 + math.cos(math.pi * progress)) / 2 if spec.decay == "cosine" else 1 - progress
    return spec.learning_rate * (spec.final_ratio + (1 - spec.final_ratio) * shape)


def optimizer_for(job: JobSpec, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a job: torch's own, unless numbers of few bits are asked for.

    Args:
        named: what is trained on this rank, by its name in the whole model.
    """
    spec = job.optimizer
    asks = spec.in_backward or spec.rounding != "nearest" or spec.state != "same" or job.precision == "float16"
    if not asks:
        return build_optimizer(spec, list(named.values()))
    scaling = None
    if job.precision == "float16":
        positions = job.batch * (1 if job.data.dataset else job.data.sequence)
        scaling = LossScale(positions=positions, most=spec.most_skips)
    return LowPrecision(
        named, _groups(spec, list(named.values())), kind=spec.name, betas=spec.betas, epsilon=spec.epsilon,
        momentum=spec.momentum, state=spec.state, rounding=spec.rounding, scaling=scaling,
        keys=lambda updates, name: seed_for(job.seed, "round", updates, name),
    )  # fmt: skip


def _groups(spec: OptimizerSpec, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return torch's groups: matrices decay, vectors (norms, biases) do not.

    Parameters that are cut over other ranks have a group of their own, since torch updates a group in one operation.
    So have those laid out in strides (`channels_last`, a transposed matrix): torch 2.13's fused step on the CPU goes
    through memory in order, and their gradients, which lie in buckets, have another order.
    """
    alike: dict[tuple[bool, bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for p in parameters:
        # Autograd lays the gradient of a split weight out as the whole weight is, and the part may be in order.
        is_in_order = p.is_contiguous() and local(p).is_contiguous()
        alike.setdefault((p.ndim >= 2, is_in_order, p.device_mesh if isinstance(p, DTensor) else None), []).append(p)
    groups: list[dict[str, Any]] = [
        {"params": held, "weight_decay": spec.weight_decay if decays else 0.0}
        | ({} if is_in_order else {"fused": False, "foreach": False})
        for (decays, is_in_order, _), held in alike.items()
    ]
    # A pipeline stage may have nothing to train, and torch wants something: a parameter without elements.
    return groups or [{"params": [nn.Parameter(torch.empty(0))]}]


def build_optimizer(spec: OptimizerSpec, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer, whose gradients and moments are of the parameters' precision."""
    groups = _groups(spec, parameters)
    if spec.name == "sgd":
        # DTensor knows neither the fused step nor lists that mix it with plain tensors.
        plain = not any(isinstance(parameter, DTensor) for parameter in parameters)
        return torch.optim.SGD(
            groups, lr=spec.learning_rate, momentum=spec.momentum, fused=plain, foreach=None if plain else False
        )
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.epsilon, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
