"""Everything of a run that decides its next number, as named tensors: weights, optimizer, buffers.

Step and data position stand in the manifest; generators follow from seed, step and place, so none is kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from torch import Tensor

from supernode.checkpoint import state
from supernode.checkpoint.source import Source, fill
from supernode.data.corpus import Corpus
from supernode.data.sampler import Sampler
from supernode.errors import CheckpointError
from supernode.parallel.assemble import Parts
from supernode.parallel.mesh import Place
from supernode.passes.logical import empties, take
from supernode.schema.manifest import Manifest
from supernode.schema.plan import Plan


def describe_model(plan: Plan) -> str:
    """Return what a checkpoint must have been made of to fit this plan, as one line."""
    shape = plan.job.shape
    if shape is None:
        return f"module {plan.job.module}"
    record = asdict(shape) | {"vocabulary": plan.vocabulary}
    # What trains differently but fits all the same stays out, and what dense models do not have.
    outside = {"dropout", "rope_base"} | (set() if shape.experts else {"experts", "experts_per_token", "expert_hidden"})
    return json.dumps({k: v for k, v in record.items() if k not in outside}, sort_keys=True)


def make_manifest(plan: Plan, step: int, sampler: Sampler, data: str) -> Manifest:
    """Return the manifest of a checkpoint after `step` steps; its files are still to be named."""
    job = plan.job
    return Manifest(
        step=step, samples=sampler.samples_before(step), seed=job.seed, model=describe_model(plan), data=data,
        layout=str(plan.layout), optimizer=job.optimizer.name,
    )  # fmt: skip


def describe_data(corpus: Corpus | None, sampler: Sampler) -> str:
    """Return what the training data must be for a data position to mean the same."""
    return corpus.fingerprint if corpus is not None else f"data set of {sampler.length} samples"


def tensors(parts: Parts, optimizer: torch.optim.Optimizer, data: int) -> dict[str, Tensor]:
    """Return this rank's tensors by name. Buffers belong to one copy of the model each, so they bear its number."""
    named = {f"model.{name}": parameter.detach() for name, parameter in parts.parameters()}
    named |= state.flatten_optimizer(optimizer, dict(parts.parameters()))
    named |= {f"buffer.{data}.{name}": buffer for name, buffer in parts.buffers()}
    return named


def restore(
    parts: Parts, optimizer: torch.optim.Optimizer, place: Place, source: Source, manifest: Manifest,
    expected: Manifest,
) -> None:  # fmt: skip
    """Fill weights, optimizer and buffers from a checkpoint of any layout.

    Args:
        manifest: of the checkpoint.
        expected: what this run would write at the same step.

    Raises:
        CheckpointError: it is of another model, optimizer or data.
    """
    for what, hint in (
        ("data", "put the data back as it was, or start a new run."),
        ("samples", "put `batch` and the data back as they were, or start a new run."),
        ("model", "put `model` back as it was, or start a new run."),
        ("optimizer", f"set `optimizer.name` to {manifest.optimizer}."),
        ("seed", f"set `seed` to {manifest.seed}."),
    ):
        theirs, ours = getattr(manifest, what), getattr(expected, what)
        if theirs != ours:
            raise CheckpointError(
                f"{source.where} was made with other {what} ({theirs}) than the run has now ({ours})", hint=hint
            )
    state.prepare_optimizer(optimizer, step=manifest.step)
    wanted = tensors(parts, optimizer, place.data)
    there = set(source.pieces)
    saved_copies = 1 + max((int(name.split(".")[1]) for name in there if name.startswith("buffer.")), default=0)
    state.check_complete(set(wanted), source)
    renamed, roomy = {}, empties(wanted, parts, place)
    for name, tensor in roomy.items():
        own = name.startswith("buffer.") and name not in there
        renamed[f"buffer.{place.data % saved_copies}.{name.split('.', 2)[2]}" if own else name] = tensor
    fill(renamed, source)
    take(roomy, wanted, parts, place)
    state.adopt_optimizer(optimizer, wanted, dict(parts.parameters()), step=manifest.step)


def load_weights(parts: Parts, source: Source) -> None:
    """Fill the weights (and the first copy's buffers) of a whole model in one process."""
    named = {f"model.{name}": parameter.detach() for name, parameter in parts.parameters()}
    named |= {f"buffer.0.{name}": buffer for name, buffer in parts.buffers()}
    fill(named, source)
