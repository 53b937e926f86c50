"""Everything of a run that decides its next number, as named tensors: weights, optimizer, buffers.

Step and data position stand in the manifest; generators follow from seed, step and place, so none is kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from supernode.checkpoint import state
from supernode.data.sampler import Sampler
from supernode.errors import CheckpointError
from supernode.schema.manifest import Manifest
from supernode.schema.plan import Plan
from supernode.training.assemble import Parts
from supernode.training.mesh import Place


def describe_model(plan: Plan) -> str:
    """Return what a checkpoint must have been made of to fit this plan, as one line."""
    shape = plan.job.shape
    if shape is None:
        return f"module {plan.job.module}"
    record = asdict(shape) | {"vocabulary": plan.vocabulary}
    # What trains differently but fits all the same stays out.
    return json.dumps({k: v for k, v in record.items() if k not in ("dropout", "rope_base")}, sort_keys=True)


def make_manifest(plan: Plan, step: int, sampler: Sampler, data: str) -> Manifest:
    """Return the manifest of a checkpoint after `step` steps; its files are still to be named."""
    job = plan.job
    return Manifest(
        step=step, samples=sampler.samples_before(step), seed=job.seed, model=describe_model(plan), data=data,
        layout=str(plan.layout), optimizer=job.optimizer.name,
    )  # fmt: skip


def tensors(parts: Parts, optimizer: torch.optim.Optimizer, data: int) -> dict[str, Tensor]:
    """Return this rank's tensors by name. Buffers belong to one copy of the model each, so they bear its number."""
    named = {f"model.{name}": parameter.detach() for name, parameter in parts.parameters()}
    named |= state.flatten_optimizer(optimizer, dict(parts.parameters()))
    named |= {f"buffer.{data}.{name}": buffer for name, buffer in parts.buffers()}
    return named


def restore(
    parts: Parts, optimizer: torch.optim.Optimizer, place: Place, plan: Plan, folder: Path, manifest: Manifest,
    *, data: str,
) -> None:  # fmt: skip
    """Fill weights, optimizer and buffers from a checkpoint of any layout.

    Args:
        data: fingerprint of the training data at hand.

    Raises:
        CheckpointError: it is of another model, optimizer or data.
    """
    if manifest.data != data:
        raise CheckpointError(
            f"{folder} was trained on other data than what is there now",
            hint="put the data of `data.text` or `data.tokens` back as it was, or start a new run.",
        )
    if manifest.optimizer != plan.job.optimizer.name:
        raise CheckpointError(
            f"{folder} holds the state of {manifest.optimizer}, and the job wants {plan.job.optimizer.name}",
            hint=f"set `optimizer.name` to {manifest.optimizer}.",
        )
    state.prepare_optimizer(optimizer, step=manifest.step)
    wanted = tensors(parts, optimizer, place.data)
    there = state.names_in(folder)
    saved_copies = 1 + max((int(name.split(".")[1]) for name in there if name.startswith("buffer.")), default=0)
    state.check_complete(set(wanted), folder)
    renamed = {}
    for name, tensor in wanted.items():
        own = name.startswith("buffer.") and name not in there
        renamed[f"buffer.{place.data % saved_copies}.{name.split('.', 2)[2]}" if own else name] = tensor
    state.load(renamed, folder)


def load_weights(parts: Parts, folder: Path) -> None:
    """Fill the weights (and the first copy's buffers) of a whole model in one process."""
    named = {f"model.{name}": parameter.detach() for name, parameter in parts.parameters()}
    named |= {f"buffer.0.{name}": buffer for name, buffer in parts.buffers()}
    state.load(named, folder)
