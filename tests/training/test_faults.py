"""What other trainers got wrong does not happen here: sums, norms, ties and labels that depend on nothing but the data.

Each test names the report of the fault. Others are tested where their parts are; `tests/test_known_faults` lists all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from one_step import MACHINE, alone, feed_of, plan_of, sharpen, whole
from supernode.checkpoint import state
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import Place, place_of
from supernode.parallel.tensor import IGNORED, SplitCrossEntropy, cross_entropy, local
from supernode.planning.planner import make_plan
from supernode.schema.job import JobSpec, OptimizerSpec
from supernode.schema.manifest import Manifest
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Layout, Plan
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Stepper

Together = Callable[..., list[Any]]
SHAPE = DecoderShape(layers=4, width=16, heads=4, kv_heads=4, vocabulary=33, tied=True)
LAYOUTS: dict[str, dict[str, object]] = {
    "p4": {"pipeline": 4},
    "p2d2": {"pipeline": 2, "data": 2},
    "t2p2": {"tensor": 2, "pipeline": 2},
    "t4": {"tensor": 4},
    "d4 fsdp": {"data": 4, "sharding": "fsdp"},
}
STEPS = 12


class Holes:
    """Windows of which the first halves of some, and all of others, do not count."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.inner[index]
        y = y.clone()
        y[: (0, 5, 8, 2)[index % 4]] = IGNORED
        return x, y


def stepper_of(plan: Plan, place: Place) -> Stepper:
    """Return a trainer of a plan on text with holes."""
    parts = assemble(plan, place)
    sharpen(parts)
    loss = SplitCrossEntropy(place.group("tensor"), plan.vocabulary) if plan.layout.tensor > 1 else cross_entropy
    optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
    feed = feed_of(plan, place, short=1)
    return Stepper(plan, place, parts, replace(feed, train=Holes(feed.train)), optimizer, loss)


def trained(plan: Plan, place: Place) -> dict[str, Any]:
    """Return the curve, the norms, whether shared copies part, and the weights at the end."""
    stepper = stepper_of(plan, place)
    curve, norms, ties = [], [], []
    for step in range(STEPS):
        outcome = stepper.train(step)
        curve.append(outcome.loss)
        norms.append(outcome.norm)
        held = dict(stepper.parts.parameters())
        if "embedding.weight" in held:
            ties.append(local(held["embedding.weight"].detach()).double().sum().item())
    weights = {name: whole(p.detach()) for name, p in stepper.parts.parameters()}
    return {"curve": curve, "norms": norms, "ties": ties, "weights": weights}


def learning(plan: Plan, *, clip: float = 0.3) -> Plan:
    """Return the plan with a rate and clipping."""
    rule = OptimizerSpec(name="sgd", learning_rate=0.05, momentum=0.5, clip=clip)
    return replace(plan, job=replace(plan.job, optimizer=rule))


@pytest.fixture
def reference(together: Together) -> dict[str, Any]:
    """What one process makes of it, in whole batches."""
    plan = learning(alone(plan_of(SHAPE, {}, batch=16, micro_batches=4)))
    (one,) = together(lambda rank: trained(plan, place_of(Layout(), rank)), ranks=1)
    result: dict[str, Any] = one
    return result


def test_losses_norms_and_updates_are_one_processs_on_every_layout(
    together: Together, reference: dict[str, Any]
) -> None:
    """Sums are divided once, whatever stages, copies and micro-batches there are, and clipping knows the whole norm.

    Divided again and again by the micro-batches: https://github.com/pytorch/torchtitan/issues/1733; by tokens on some
    layouts only: https://github.com/pytorch/torchtitan/issues/2972; added instead of averaged:
    https://github.com/deepspeedai/DeepSpeed/issues/7773; divided at every stage:
    https://github.com/deepspeedai/DeepSpeed/pull/8154; part of a split loss called whole:
    https://github.com/pytorch/torchtitan/pull/3412; a mean of means where labels are missing:
    https://github.com/huggingface/transformers/issues/34242; one stage's norm:
    https://github.com/pytorch/torchtitan/issues/596; norms counted once a tensor rank:
    https://github.com/NVIDIA-NeMo/RL/pull/3788; copies of a tied weight that part:
    https://github.com/NVIDIA/Megatron-LM/issues/656.
    """

    def train(rank: int) -> dict[str, Any]:
        plans = {name: learning(plan_of(SHAPE, ways, batch=16, micro_batches=4)) for name, ways in LAYOUTS.items()}
        return {name: trained(plan, place_of(plan.layout, rank)) for name, plan in plans.items()}

    ranks = together(train, ranks=4)

    assert min(reference["norms"]) > 0.3, "every step is clipped"
    assert reference["curve"][-1] < 0.9 * reference["curve"][0]
    for name, ways in LAYOUTS.items():
        for rank in ranks:
            assert rank[name]["curve"] == pytest.approx(reference["curve"], rel=2e-5), name
            assert rank[name]["norms"] == pytest.approx(reference["norms"], rel=2e-5), name
            for parameter, weight in rank[name]["weights"].items():
                torch.testing.assert_close(weight, reference["weights"][parameter], rtol=2e-4, atol=2e-5)
        if ways.get("pipeline"):
            # First and last stage: the same bits at every step, tensor rank by tensor rank.
            tensor = int(str(ways.get("tensor", 1)))
            for first, last in zip(ranks[:tensor], ranks[-tensor:], strict=True):
                assert first[name]["ties"] == last[name]["ties"]
                assert len(first[name]["ties"]) == STEPS


def test_what_is_not_asked_for_is_off(together: Together) -> None:
    """A plain job's first step moves the weights by rate × gradient and nothing else.

    Clipping that nobody asked for: https://github.com/deepspeedai/DeepSpeed/pull/8068.
    """

    def step(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        plan = plan_of(SHAPE, {})
        plan = replace(plan, job=replace(plan.job, optimizer=OptimizerSpec(name="sgd", learning_rate=0.5)))
        stepper = stepper_of(plan, place_of(plan.layout, rank))
        before = [p.detach().clone() for p in stepper.trained]
        norm = stepper.train(0).norm
        assert norm > 1.5, "more than any usual limit"
        return [(old, p.detach(), p.grad) for old, p in zip(before, stepper.trained, strict=True)]  # type: ignore[misc]

    (moves,) = together(step, ranks=1)

    for old, new, gradient in moves:
        torch.testing.assert_close(new, old - 0.5 * gradient)


@pytest.mark.parametrize("stages", [2, 3])
def test_seven_layers_are_all_somewhere_on_two_and_three_stages(stages: int) -> None:
    """No layer is left out or held twice: https://github.com/NVIDIA/Megatron-LM/issues/1304."""
    shape = replace(SHAPE, layers=7, tied=False)
    plan = plan_of(shape, {"pipeline": stages}, micro_batches=4)
    everything = {name for name, _ in assemble(alone(plan), None).parameters()}

    held = []
    for index in range(stages):
        place = Place(layout=plan.layout, rank=index, mesh=None, copies=None)  # type: ignore[arg-type]
        held += [name for name, _ in assemble(plan, place).parameters()]
    assert sorted(held) == sorted(everything)


def test_odd_sizes_are_saved_whole_and_load_on_any_number_of_ranks(together: Together, tmp_path: Path) -> None:
    """A vocabulary of 33 split in four, and ten rows over four ranks: files hold logical shapes and offsets.

    Padding in files: https://github.com/hpcaitech/ColossalAI/issues/6167; shapes guessed from one rank's part:
    https://github.com/pytorch/pytorch/issues/110762.
    """
    rows = torch.arange(20.0).view(10, 2)

    def save(rank: int) -> None:
        plan = plan_of(SHAPE, {"tensor": 4})
        parts = assemble(plan, place_of(plan.layout, rank))
        held = {name: p.detach() for name, p in parts.parameters()}
        mesh = init_device_mesh("cpu", (4,))
        state.save(held | {"rows": distribute_tensor(rows, mesh, [Shard(0)])}, state.saves_in(tmp_path), manifest())

    def load(rank: int) -> Tensor:
        empty = distribute_tensor(torch.zeros(10, 2), init_device_mesh("cpu", (3,)), [Shard(0)])
        state.load({"rows": empty}, tmp_path / "step-00000001")
        return empty.full_tensor()

    together(save, ranks=4)
    (first, *_) = together(load, ranks=3)

    assert torch.equal(first, rows)
    parts = assemble(alone(plan_of(SHAPE, {})), None)
    expected = {name: p.detach().clone() for name, p in parts.parameters()}
    held = {name: torch.zeros_like(p) for name, p in parts.parameters()}
    state.load(held, tmp_path / "step-00000001")
    assert held["embedding.weight"].shape == (33, 16)
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name]), name


def manifest() -> Manifest:
    return Manifest(step=1, samples=8, seed=0, model="m", data="d", layout="l", optimizer="adamw")


def test_shared_parameters_of_a_cut_sequence_sum_their_gradients(together: Together, tmp_path: Path) -> None:
    """A splitter that copies a tied weight and never adds: https://github.com/uw-syfi/piper/issues/13."""
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def model():\n"
        "    layers = [torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh(), "
        "torch.nn.Linear(6, 6)]\n"
        "    layers[4].weight = layers[0].weight\n"
        "    return torch.nn.Sequential(*layers)\n"
    )
    job = JobSpec(
        model=f"{tmp_path / 'own.py'}:model", batch=4, gradient_accumulation=2, seed=3,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0, momentum=0),
    )  # fmt: skip

    def step(rank: int) -> dict[str, Tensor]:
        plan = make_plan(replace(job, parallelism=replace(job.parallelism, pipeline=2, data=1)), MACHINE)
        place = place_of(plan.layout, rank)
        parts = assemble(plan, place)
        x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 6))).float()
        data = [(row, row.flip(0)) for row in x]
        feed = replace(feed_of(replace(plan, vocabulary=9), place, short=0), train=data, pads=False)
        feed.loss, feed.count = squared, len
        stepper = Stepper(plan, place, parts, feed, build_optimizer(job.optimizer, list(_all(parts))), squared)
        stepper.train(0)
        return {name: p.grad * 4 for name, p in parts.parameters() if p.grad is not None}

    ranks = together(step, ranks=2)

    torch.manual_seed(0)
    whole_model = assemble(make_plan(replace(job, parallelism=replace(job.parallelism, data=1)), MACHINE), None)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 6))).float()
    squared(whole_model.modules[0](x), x.flip(1)).backward()
    for held in ranks:
        for name, gradient in held.items():
            expected = dict(whole_model.modules[0].named_parameters())[name].grad
            torch.testing.assert_close(gradient, expected)
    assert "0.weight" in ranks[0]
    assert "0.weight" in ranks[1]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target, reduction="sum")


def _all(parts: Any) -> Any:
    return (p for _, p in parts.parameters())
