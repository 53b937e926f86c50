"""Steps whose sequences are shared by ranks, over a context axis or along a tensor axis, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from one_step import alone, feed_of, one_step, plan_of, sharpen
from supernode.errors import SpecError
from supernode.parallel.assemble import assemble
from supernode.parallel.chance import seed_for, seed_generators
from supernode.parallel.mesh import place_of
from supernode.planning.layout import resolve_layout
from supernode.planning.memory import memory_use
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism

Together = Callable[..., list[Any]]
SHAPE = DecoderShape(layers=4, width=16, heads=4, kv_heads=2, vocabulary=11, tied=True)
LAYOUTS: dict[str, dict[str, object]] = {
    "context 4": {"context": 4},
    "context 2, data 2": {"context": 2, "data": 2},
    "context 2, data 2, fsdp": {"context": 2, "data": 2, "sharding": "fsdp"},
    "context 4, fsdp": {"context": 4, "sharding": "fsdp"},
    "context 2, tensor 2": {"context": 2, "tensor": 2},
    "context 2, tensor 2, sequence": {"context": 2, "tensor": 2, "sequence": True},
    "context 2, pipeline 2": {"context": 2, "pipeline": 2},
    "context 2, pipeline 2, gpipe": {"context": 2, "pipeline": 2, "schedule": "gpipe"},
    "context 2, pipeline 2, interleaved": {
        "context": 2, "pipeline": 2, "schedule": "interleaved", "interleave": 2,
    },
    "context 2, pipeline 2, zero bubble": {"context": 2, "pipeline": 2, "schedule": "zero_bubble"},
    "context 4, recompute": {"context": 4, "recompute": "full"},
    "context 4, recompute the core": {"context": 4, "recompute": "selective"},
    "tensor 4, sequence": {"tensor": 4, "sequence": True},
    "tensor 2, sequence, data 2": {"tensor": 2, "sequence": True, "data": 2},
    "tensor 2, sequence, data 2, fsdp": {"tensor": 2, "sequence": True, "data": 2, "sharding": "fsdp"},
    "tensor 2, sequence, pipeline 2": {"tensor": 2, "sequence": True, "pipeline": 2},
    "tensor 2, sequence, pipeline 2, zero bubble": {
        "tensor": 2, "sequence": True, "pipeline": 2, "schedule": "zero_bubble",
    },
    "tensor 2, sequence, recompute, pipeline 2": {
        "tensor": 2, "sequence": True, "pipeline": 2, "recompute": "full",
    },
}  # fmt: skip
SHORT = 3
"""Samples that the step lacks of a whole batch, so that ranks count unlike numbers of positions."""


def shape_of(degrees: dict[str, object]) -> DecoderShape:
    """Return the shape that a layout can cut: four tensor ranks need four key heads."""
    return replace(SHAPE, kv_heads=4) if degrees.get("tensor") == 4 else SHAPE


def plainly(plan: Plan) -> tuple[float, float, dict[str, Tensor]]:
    """Return loss, norm and gradients of the mean over all positions, all samples in one pass of one process."""
    parts = assemble(alone(plan), None)
    sharpen(parts)
    single = replace(alone(plan), micro_batch=plan.job.batch - SHORT, micro_batches=1)
    batch = feed_of(single, None, short=SHORT).training(0)
    loss = torch.nn.functional.cross_entropy(
        parts.modules[0](batch.inputs[0]).flatten(0, 1), batch.targets[0].flatten()
    )
    loss.backward()
    grads = {name: p.grad for name, p in parts.parameters() if p.grad is not None}
    return loss.item(), float(torch.stack([g.norm() for g in grads.values()]).norm()), grads


def test_shared_sequences_give_one_processes_loss_and_gradients(together: Together) -> None:
    plans = {name: plan_of(shape_of(degrees), degrees) for name, degrees in LAYOUTS.items()}

    def steps(rank: int) -> dict[str, tuple[float, float, dict[str, Tensor]]]:
        found = {}
        for name, plan in plans.items():
            outcome, grads, _ = one_step(plan, place_of(plan.layout, rank), short=SHORT)
            found[name] = (outcome.loss, outcome.norm, grads)
        return found

    everyones = together(steps, ranks=4)

    for name, plan in plans.items():
        loss, norm, grads = plainly(plan)
        for rank, found in enumerate(everyones):
            assert found[name][0] == pytest.approx(loss, rel=1e-5), name
            assert found[name][1] == pytest.approx(norm, rel=1e-4), name
            for parameter, grad in found[name][2].items():
                gap = (grad - grads[parameter]).norm() / grads[parameter].norm()
                assert gap < 1e-4, f"{name}, rank {rank}, {parameter}: {gap:.1e}"
        held = {parameter for found in everyones for parameter in found[name][2]}
        assert held == grads.keys(), name


def kept(plan: Plan, rank: int) -> dict[str, int]:
    """Return the bytes that a rank's forward leaves for its backward: all, and of activations what norms keep."""
    place = place_of(plan.layout, rank)
    parts = assemble(plan, place)
    weights = {p.untyped_storage().data_ptr() for module in parts.modules for p in locals_of(module)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = feed_of(plan, place, short=0).training(0)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        stream = parts.modules[0](batch.inputs[0])
    assert stream.requires_grad
    return {"bytes": sum(saved.values()), "tokens": batch.inputs[0].numel()}


def locals_of(module: torch.nn.Module) -> list[Tensor]:
    return [getattr(p, "_local_tensor", p).detach() for p in module.parameters()]


def test_activations_fall_as_their_tokens_are_shared(together: Together) -> None:
    shape = DecoderShape(layers=3, width=128, heads=4, kv_heads=2, vocabulary=16)
    ways: dict[str, dict[str, object]] = {
        "data": {"data": 2}, "context": {"context": 2}, "tensor": {"tensor": 2},
        "sequence": {"tensor": 2, "sequence": True},
        "sequence, recompute": {"tensor": 2, "sequence": True, "recompute": "full"},
    }  # fmt: skip
    plans = {name: plan_of(shape, degrees, batch=8, micro_batches=2) for name, degrees in ways.items()}

    held = together(lambda rank: {name: kept(plan, rank) for name, plan in plans.items()})[0]

    # The data axis halves the samples of a micro-batch, the context axis the tokens of each: as many tokens.
    assert held["context"]["tokens"] == held["data"]["tokens"]
    # Rotary angles are float32 tables beside them; the ring keeps keys and values once, as attention does.
    assert held["context"]["bytes"] == pytest.approx(held["data"]["bytes"], rel=0.03)
    # With a tensor axis alone every rank keeps the whole stream and its norms; along the sequence its half of them.
    assert held["sequence"]["bytes"] == pytest.approx(held["data"]["bytes"], rel=0.03)
    assert held["tensor"]["bytes"] > 1.25 * held["sequence"]["bytes"]
    # Computed again, each layer leaves this rank's half of its input; the ends of the model are kept beside that.
    assert held["sequence, recompute"]["bytes"] < 0.2 * held["sequence"]["bytes"]
    for name in ("data", "context", "sequence"):
        foreseen = memory_use(plans[name])
        assert foreseen is not None
        assert held[name]["bytes"] == pytest.approx(foreseen.activations, rel=0.15), name


def test_ranks_with_other_tokens_drop_other_ones(together: Together) -> None:
    shape = DecoderShape(layers=1, width=16, heads=2, vocabulary=11, dropout=0.5)
    ways: dict[str, dict[str, object]] = {
        "context": {"context": 2}, "sequence": {"tensor": 2, "sequence": True}, "tensor": {"tensor": 2},
    }  # fmt: skip
    plans = {name: plan_of(shape, degrees) for name, degrees in ways.items()}

    def draws(rank: int) -> dict[str, Tensor]:
        found = {}
        for name, plan in plans.items():
            seed_generators(seed_for(plan.job.seed, "step", 0, *place_of(plan.layout, rank).tokens))
            found[name] = torch.rand(8)
            outcome, _, _ = one_step(plan, place_of(plan.layout, rank))
            assert 0 < outcome.loss < 100
        return found

    first, second = together(draws)

    assert torch.equal(first["tensor"], second["tensor"])
    assert not torch.equal(first["context"], second["context"])
    assert not torch.equal(first["sequence"], second["sequence"])


@pytest.mark.parametrize(
    ("degrees", "sequence", "says", "hint"),
    [
        ({"context": 2}, 10, "2 × context 2 = 4", "`data.sequence` to 8"),
        ({"tensor": 2, "sequence": True}, 9, "tensor 2 = 2", "`data.sequence` to 8"),
        ({"context": 2, "tensor": 2, "sequence": True}, 20, "2 × context 2 × tensor 2 = 8", "`data.sequence` to 16"),
    ],
)
def test_a_sequence_that_does_not_divide_is_refused_with_the_nearest_that_does(
    degrees: dict[str, object], sequence: int, says: str, hint: str
) -> None:
    job = replace(plan_of(SHAPE, {}).job, data=DataSpec(sequence=sequence), parallelism=Parallelism(data=1, **degrees))  # type: ignore[arg-type]

    with pytest.raises(SpecError, match=says) as refused:
        resolve_layout(job, 8)

    assert hint in refused.value.hint


def test_a_module_of_the_users_own_has_no_context_axis() -> None:
    job = JobSpec(model="net.py:build", parallelism=Parallelism(data=1, context=2))

    with pytest.raises(SpecError, match="your own module, whose attention and positions are not known"):
        resolve_layout(job, 2)
