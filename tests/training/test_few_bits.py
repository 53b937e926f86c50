"""Weights of two bytes, moments of one and updates inside backward: what one process computes, on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from one_step import MACHINE, SEQUENCE, feed_of
from supernode.checkpoint import state
from supernode.checkpoint.source import on_disk
from supernode.errors import RunError, SpecError
from supernode.parallel.assemble import Parts, assemble
from supernode.parallel.mesh import Place, place_of
from supernode.parallel.tensor import SplitCrossEntropy, cross_entropy, local
from supernode.planning.planner import make_plan
from supernode.precision.optimizer import LowPrecision
from supernode.precision.scaling import GROWTH_STEPS
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Layout, Plan
from supernode.schema.spread import Communication, Parallelism
from supernode.storing.saves import name_of
from supernode.training.optimizer import optimizer_for
from supernode.training.saving import make_manifest, restore, tensors
from supernode.training.step import Stepper

Together = Callable[..., list[Any]]
SHAPE = DecoderShape(layers=2, width=64, heads=4, hidden=128, vocabulary=64)
LOW = OptimizerSpec(learning_rate=1e-2, rounding="stochastic", state="float8", in_backward=True)


def plan_of(
    degrees: dict[str, object], optimizer: OptimizerSpec = LOW, *, micro_batches: int = 1, precision: str = "bfloat16",
    arithmetic: str = "float32",
) -> Plan:  # fmt: skip
    job = JobSpec(
        model=SHAPE, batch=8, gradient_accumulation=micro_batches, data=DataSpec(sequence=SEQUENCE), seed=3, steps=8,
        parallelism=Parallelism(**{"data": 1} | degrees), optimizer=optimizer, precision=precision,  # type: ignore[arg-type]
        arithmetic=arithmetic,  # type: ignore[arg-type]
    )  # fmt: skip
    return make_plan(job, MACHINE, vocabulary=SHAPE.vocabulary)


def stepper_of(plan: Plan, place: Place) -> tuple[Stepper, Parts]:
    parts = assemble(plan, place)
    optimizer = optimizer_for(plan.job, dict(parts.parameters()))
    loss = SplitCrossEntropy(place.group("tensor"), plan.vocabulary) if plan.layout.tensor > 1 else cross_entropy
    return Stepper(plan, place, parts, feed_of(plan, place, short=0), optimizer, loss), parts


def whole(parts: Parts) -> dict[str, Tensor]:
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parts.parameters()}


def trained(plan: Plan, rank: int, *, steps: int = 4) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, gradient norms and whole weights after some steps; no gradient may be left."""
    stepper, parts = stepper_of(plan, place_of(plan.layout, rank))
    outcomes = [stepper.train(step) for step in range(steps)]
    if plan.job.optimizer.in_backward:
        assert all(parameter.grad is None for parameter in stepper.trained)
    return [o.loss for o in outcomes], [o.norm for o in outcomes], whole(parts)


LAYOUTS: tuple[tuple[dict[str, object], int], ...] = (
    ({"tensor": 2}, 1),
    ({"data": 2}, 1),
    ({"data": 2}, 2),
    ({"data": 2, "sharding": "fsdp"}, 1),
    ({"data": 2, "sharding": "fsdp"}, 2),
    ({"pipeline": 2}, 2),
    ({"pipeline": 2, "schedule": "zero_bubble"}, 2),
    ({"tensor": 2, "sequence": True}, 1),
)


def test_every_layout_learns_what_one_process_learns_and_copies_stay_equal(together: Together) -> None:
    plans = [plan_of(degrees, micro_batches=micro) for degrees, micro in LAYOUTS]

    (one,) = together(lambda rank: trained(plan_of({}), rank), ranks=1)
    both = together(lambda rank: [trained(plan, rank) for plan in plans], ranks=2)

    for (degrees, micro), *results in zip(LAYOUTS, *both, strict=True):
        for losses, norms, weights in results:
            # Gradients are rounded to bfloat16 (2⁻⁹) where they meet, and blocks of moments lie elsewhere.
            assert losses == pytest.approx(one[0], rel=2e-3), (degrees, micro)
            assert norms == pytest.approx(one[1], rel=2e-2), (degrees, micro)
            for name, weight in weights.items():
                assert weight.dtype == torch.bfloat16
                moved = (one[2][name].float() - weight.float()).norm() / weight.float().norm()
                assert float(moved) < 0.05, (degrees, micro, name)
        for name in results[0][2].keys() & results[1][2].keys():
            assert torch.equal(results[0][2][name], results[1][2][name]), (degrees, micro, name)


def test_updates_inside_backward_are_those_after_it_to_the_bit(together: Together) -> None:
    for settings in ({"state": "float8", "rounding": "stochastic"}, {"state": "float32"}):
        early = replace(LOW, rounding="nearest", state="same", in_backward=True)
        plans = [plan_of({}, replace(early, **settings, in_backward=flag)) for flag in (True, False)]  # type: ignore[arg-type]

        ((inside, after),) = together(lambda rank, plans=plans: [trained(plan, rank) for plan in plans], ranks=1)

        assert inside[0] == after[0]
        assert inside[1] == pytest.approx(after[1], rel=1e-6)
        assert all(torch.equal(inside[2][name], after[2][name]) for name in inside[2])


def test_float32_by_our_own_update_is_torchs(together: Together) -> None:
    plain = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1)
    plans = [
        plan_of({}, replace(plain, in_backward=flag), precision="float32", arithmetic="same") for flag in (True, False)
    ]

    ((ours, torchs),) = together(lambda rank: [trained(plan, rank) for plan in plans], ranks=1)

    assert ours[0] == pytest.approx(torchs[0], rel=1e-5)
    for name, weight in torchs[2].items():
        assert torch.allclose(ours[2][name], weight, rtol=1e-4, atol=1e-5), name


def saved_and_restored(rank: int, folder: Path, first: Plan, second: Plan) -> tuple[Any, ...]:
    """Train by one plan, save, go on; then restore into another plan and go on from there, too."""
    place = place_of(first.layout, rank)
    stepper, parts = stepper_of(first, place)
    for step in range(3):
        stepper.train(step)
    manifest = make_manifest(first, 3, stepper.feed.sampler, "text")
    state.save(tensors(parts, stepper.optimizer, place.data), state.saves_in(folder), manifest)
    before = moments_of(stepper, parts)
    undisturbed = [stepper.train(step).loss for step in range(3, 6)], whole(parts)
    place = place_of(second.layout, rank)
    stepper, parts = stepper_of(second, place)
    source = on_disk(folder / name_of(3))
    restore(
        parts, stepper.optimizer, place, source, source.manifest,
        make_manifest(second, 3, stepper.feed.sampler, "text"),
    )  # fmt: skip
    after = moments_of(stepper, parts)
    resumed = [stepper.train(step).loss for step in range(3, 6)], whole(parts)
    return before, after, undisturbed, resumed


def moments_of(stepper: Stepper, parts: Parts) -> dict[str, Tensor]:
    flat = state.flatten_optimizer(stepper.optimizer, dict(parts.parameters()))
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in flat.items()}


def test_a_resumed_run_is_the_same_to_the_bit_and_another_layout_takes_it_up(
    together: Together, tmp_path: Path
) -> None:
    sharded, split = plan_of({"data": 2, "sharding": "fsdp"}), plan_of({"tensor": 2})
    for number, (first, second) in enumerate(((sharded, sharded), (split, split), (sharded, split), (split, sharded))):
        folder = tmp_path / str(number)
        folder.mkdir()
        for before, after, undisturbed, resumed in together(
            lambda rank, a=first, b=second, f=folder: saved_and_restored(rank, f, a, b), ranks=2
        ):
            assert before.keys() == after.keys()
            if first is second:
                assert resumed[0] == undisturbed[0]
                assert all(torch.equal(before[name], after[name]) for name in before)
                assert all(torch.equal(resumed[1][name], undisturbed[1][name]) for name in resumed[1])
                continue
            assert resumed[0] == pytest.approx(undisturbed[0], rel=2e-3)
            for name, moment in before.items():
                # Other blocks have other scales: half a step at most, 1/16 of float8 and 3.2% of second moments.
                assert float((after[name] - moment).float().norm()) <= 0.0626 * float(moment.float().norm()), name


class Poisoned(torch.autograd.Function):
    """The identity whose gradient has one element that is not finite."""

    value = math.inf

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        poisoned = grads[0].clone()
        poisoned.view(-1)[0] = Poisoned.value
        return poisoned


def snapshot(stepper: Stepper, parts: Parts) -> dict[str, Tensor]:
    flat = {name: local(p).detach().clone() for name, p in parts.parameters()}
    return flat | {name: local(t).clone() for name, t in moments_of(stepper, parts).items()}


def poisoned(rank: int, plan: Plan, bad: int, block: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Take two good steps and one whose gradient is poisoned on one rank; return the error, and the state around it."""
    stepper, parts = stepper_of(plan, place_of(plan.layout, rank))
    for step in range(2):
        stepper.train(step)
    before = snapshot(stepper, parts)
    if rank == bad:
        parts.modules[0].get_submodule(block).register_forward_hook(lambda _, __, out: Poisoned.apply(out))
    try:
        outcome = stepper.train(2)
    except RunError as error:
        return str(error), before, snapshot(stepper, parts)
    return ("skipped" if outcome.skipped else ""), before, snapshot(stepper, parts)


def test_a_gradient_that_is_not_finite_changes_nothing(together: Together) -> None:
    for optimizer in (replace(LOW, in_backward=False), OptimizerSpec(), OptimizerSpec(state="float32")):
        plan = plan_of({"data": 2}, optimizer)
        for error, before, after in together(lambda rank, p=plan: poisoned(rank, p, 1, "blocks.0"), ranks=2):
            assert "step 3" in error
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_inside_backward_nothing_that_is_not_finite_reaches_weights_or_moments(together: Together) -> None:
    plan = plan_of({"data": 2})
    for error, before, after in together(lambda rank: poisoned(rank, plan, 1, "blocks.0"), ranks=2):
        assert "step 3" in error
        assert all(tensor.isfinite().all() for tensor in after.values())
        # What backward came to before the poison has moved, what lies behind it has not.
        assert not torch.equal(before["blocks.1.mlp.up.weight"], after["blocks.1.mlp.up.weight"])
        assert torch.equal(before["blocks.0.attention.query.weight"], after["blocks.0.attention.query.weight"])


HALF = OptimizerSpec(learning_rate=1e-2, rounding="stochastic", state="float32", most_skips=3)


def test_float16_learns_with_its_scale_and_skips_on_all_ranks_together(together: Together) -> None:
    plan = plan_of({"data": 2}, HALF, precision="float16", arithmetic="same")
    (one,) = together(
        lambda rank: trained(plan_of({}, OptimizerSpec(learning_rate=1e-2), precision="float32"), rank), ranks=1
    )

    half = together(lambda rank: trained(plan, rank), ranks=2)
    skipped = together(lambda rank: poisoned(rank, plan, 1, "blocks.0"), ranks=2)

    for losses, norms, _ in half:
        assert losses == pytest.approx(one[0], rel=2e-3)
        assert norms == pytest.approx(one[1], rel=1e-2)  # Unscaled and divided, as everywhere.
    for error, before, after in skipped:
        assert error == "skipped"
        # Step 3 of 8 × 8 positions: the scale begins at 2¹⁶/64 and is halved once.
        assert before.pop("scaling").tolist() == [1024, 2, 0, 0]
        assert after.pop("scaling").tolist() == [512, 0, 1, 1]
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_feedback_is_saved_in_the_scale_that_is_saved_with_it(together: Together, tmp_path: Path) -> None:
    plan = plan_of({"data": 2}, replace(HALF, rounding="nearest"), precision="float16", arithmetic="same")
    said = Communication(compress="onebit", where="all")
    plan = replace(plan, job=replace(plan.job, communication=said))

    def train(rank: int) -> tuple[float, float, list[str]]:
        place = place_of(plan.layout, rank)
        stepper, parts = stepper_of(plan, place)
        assert stepper.scaling is not None
        stepper.train(0)
        before, stepper.scaling.good = stepper.scaling.scale, GROWTH_STEPS - 1
        stepper.train(1)  # The scale doubles behind it.
        manifest = make_manifest(plan, 2, stepper.feed.sampler, "text")
        state.save(
            tensors(parts, stepper.optimizer, place.data) | stepper.sending.state(), state.saves_in(tmp_path), manifest
        )
        again, others = stepper_of(plan, place)
        source = on_disk(tmp_path / name_of(2))
        restore(others, again.optimizer, place, source, source.manifest, manifest)
        again.sending.restore(source)
        for step in (2, 3):
            stepper.train(step)
            again.train(step)
        assert not again.sending.dropped
        resumed = whole(others)
        return before, stepper.scaling.scale, [n for n, w in whole(parts).items() if not torch.equal(w, resumed[n])]

    for before, after, differing in together(train, ranks=2):
        assert (after, differing) == (2 * before, [])


def test_too_many_skipped_steps_in_a_row_end_the_run(together: Together) -> None:
    def stubborn(rank: int) -> tuple[list[bool], str, int]:
        plan = plan_of({}, HALF, precision="float16", arithmetic="same")
        stepper, parts = stepper_of(plan, place_of(Layout(), rank))
        parts.modules[0].get_submodule("blocks.0").register_forward_hook(lambda _, __, out: Poisoned.apply(out))
        skips = [stepper.train(step).skipped for step in range(2)]
        assert isinstance(stepper.optimizer, LowPrecision)
        try:
            stepper.train(2)
        except RunError as error:
            return skips, error.message, stepper.optimizer.updates
        return skips, "", 0

    ((skips, message, updates),) = together(stubborn, ranks=1)

    assert skips == [True, True]
    assert "float16 overflowed 3 times in a row" in message
    assert updates == 0


@pytest.mark.parametrize(
    ("job", "keys"),
    [
        ({"optimizer": {"in_backward": True, "clip": 1.0}}, ("optimizer.in_backward", "optimizer.clip")),
        ({"optimizer": {"rounding": "stochastic"}}, ("optimizer.rounding", "precision")),
        ({"precision": "float16"}, ("precision", "optimizer.state")),
        ({"precision": "float16", "optimizer": {"in_backward": True, "state": "float32"}},
         ("optimizer.in_backward", "precision")),
        ({"communication": {"compress": "int8"}, "optimizer": {"in_backward": True}},
         ("communication.compress", "optimizer.in_backward")),
        ({"parallelism": {"expert": 2, "data": 2}, "optimizer": {"in_backward": True}},
         ("parallelism.expert", "optimizer.in_backward")),
        ({"communication": {"algorithm": "flat"}, "optimizer": {"in_backward": True}},
         ("communication.algorithm", "optimizer.in_backward")),
        ({"communication": {"compress": "int8"}, "parallelism": {"data": 2, "sharding": "fsdp"}},
         ("communication.compress", "parallelism.sharding")),
        ({"communication": {"algorithm": "flat"}, "parallelism": {"data": 2, "sharding": "fsdp"}},
         ("communication.algorithm", "parallelism.sharding")),
        ({"communication": {"compress": "int8", "algorithm": "flat"}},
         ("communication.compress", "communication.algorithm")),
        ({"arithmetic": "float8", "model": replace(SHAPE, experts=4)}, ("arithmetic", "model.experts")),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_both_keys(job: dict[str, Any], keys: tuple[str, str]) -> None:
    kinds = {"optimizer": OptimizerSpec, "communication": Communication, "parallelism": Parallelism}
    with pytest.raises(SpecError) as caught:
        JobSpec(**{key: kinds[key](**value) if key in kinds else value for key, value in job.items()})

    text = caught.value.message + caught.value.hint
    assert all(f"`{key}`" in text for key in keys)


def test_products_in_float8_learn_on_split_and_sharded_layers(together: Together) -> None:
    plain = OptimizerSpec(learning_rate=1e-2)
    low = [
        plan_of(degrees, plain, precision="float32", arithmetic="float8")
        for degrees in ({"tensor": 2}, {"data": 2, "sharding": "fsdp"})
    ]
    (one,) = together(lambda rank: trained(plan_of({}, plain, precision="float32", arithmetic="same"), rank), ranks=1)

    for results in zip(*together(lambda rank: [trained(plan, rank) for plan in low], ranks=2), strict=True):
        for losses, norms, weights in results:
            # Each layer's outputs are off by 4%, each gradient by 6%; of the loss less than that shows.
            assert losses == pytest.approx(one[0], rel=1e-2)
            assert norms[0] == pytest.approx(one[1][0], rel=5e-2)  # Later ones are of weights that have gone apart.
            assert any(not torch.equal(weight, one[2][name]) for name, weight in weights.items())
        assert all(torch.equal(weight, results[1][2][name]) for name, weight in results[0][2].items())
