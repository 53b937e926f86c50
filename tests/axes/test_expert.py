"""Experts on several ranks compute and learn what experts on one do.

Faults seen elsewhere: a router whose gradient is a part of the sum
(https://github.com/huggingface/transformers/issues/48687), experts whose gradient grows with the ranks that share them
(https://github.com/pytorch/pytorch/issues/160285).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from one_step import MACHINE, one_step, plan_of, sharpen
from supernode.axes.expert import exchange, visit_over
from supernode.axes.tensor import local
from supernode.errors import SpecError
from supernode.models.experts import Mixture, run_experts
from supernode.parallel.assemble import Parts, assemble
from supernode.parallel.mesh import place_of
from supernode.passes.sync import copies
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Parallelism

Together = Callable[..., list[Any]]
SHAPE = DecoderShape(layers=2, width=16, heads=2, experts=4, experts_per_token=2, expert_hidden=10, vocabulary=13)
SENT = [[2, 0, 1], [0, 0, 4], [3, 1, 0]]
"""Rows from each rank to each."""


def test_rows_come_by_rank_and_their_gradients_go_back(together: Together) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor | None]:
        assert dist.group.WORLD is not None
        # Row r.i of the rank is the number 10 r + i.
        rows = (10.0 * rank + torch.arange(sum(SENT[rank]))).unsqueeze(1).requires_grad_()
        got = exchange(rows, SENT[rank], [sent[rank] for sent in SENT], dist.group.WORLD)
        (got * (1 + rank)).sum().backward()
        return got.detach(), rows.grad

    results = together(run, ranks=3)

    assert [got.flatten().tolist() for got, _ in results] == [[0, 1, 20, 21, 22], [23], [2, 10, 11, 12, 13]]
    # A row's gradient is what its receiver multiplied it with.
    assert [grad.flatten().tolist() for _, grad in results if grad is not None] == [
        [1, 1, 3],
        [3, 3, 3, 3],
        [1, 1, 1, 2],
    ]


def mixture_of(shape: DecoderShape) -> Mixture:
    torch.manual_seed(0)
    mixture = Mixture(shape)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    return mixture


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("taste", ["mixed", "all alike"])
def test_spread_experts_learn_as_one_process_does(together: Together, ranks: int, taste: str) -> None:
    torch.manual_seed(1)
    x_RBTD, grad_RBTD = torch.randn(ranks, 2, 3, 16), torch.randn(ranks, 2, 3, 16)
    if taste == "all alike":  # Every token visits the same two experts, so most ranks' experts get nothing.
        x_RBTD = x_RBTD[:1, :1, :1].expand_as(x_RBTD).clone()

    def run(rank: int) -> dict[str, Tensor | None]:
        mixture, held = mixture_of(SHAPE), SHAPE.experts // ranks
        mine = [
            part.detach()[rank * held : (rank + 1) * held].clone().requires_grad_()
            for part in (mixture.experts.gate, mixture.experts.up, mixture.experts.down)
        ]
        assert dist.group.WORLD is not None
        visit = visit_over(dist.group.WORLD, lambda x, counts: run_experts(x, counts, *mine))
        vars(mixture.experts)["visit"] = visit
        x = x_RBTD[rank].clone().requires_grad_()
        made = mixture(x)
        made.backward(grad_RBTD[rank])
        grads = dict(zip(("gate", "up", "down"), (part.grad for part in mine), strict=True))
        return grads | {"made": made.detach(), "x": x.grad, "router": mixture.router.weight.grad}

    parts = together(run, ranks=ranks)
    whole, x = mixture_of(SHAPE), x_RBTD.clone().requires_grad_()
    made = whole(x.flatten(0, 1))
    made.backward(grad_RBTD.flatten(0, 1))

    close = {"rtol": 1e-5, "atol": 1e-5}
    for rank, part in enumerate(parts):
        assert torch.allclose(part["made"], made.unflatten(0, (ranks, -1))[rank], **close)
        assert torch.allclose(part["x"], x.grad[rank], **close)  # type: ignore[index]
    # The router sees a rank's own tokens: its gradient is their part. An expert sees all ranks' tokens, once.
    assert torch.allclose(sum(part["router"] for part in parts), whole.router.weight.grad, **close)  # type: ignore[arg-type]
    for name in ("gate", "up", "down"):
        found = torch.cat([part[name] for part in parts])
        assert torch.allclose(found, whole.experts.get_parameter(name).grad, **close), name  # type: ignore[arg-type]


LAYOUTS: dict[str, dict[str, object]] = {
    "spread": {"data": 4, "expert": 2},
    "alone": {"data": 4, "expert": 4},
    "cut": {"data": 2, "expert": 2, "tensor": 2},
    "sharded": {"data": 4, "expert": 2, "sharding": "fsdp"},
    "sharded alone": {"data": 4, "expert": 4, "sharding": "fsdp"},
    "staged": {"data": 2, "expert": 2, "pipeline": 2},
    "dense": {"data": 4},
}


def test_checkpoints_hold_whole_experts_and_load_into_any_layout(together: Together, tmp_path: Path) -> None:
    plans = {name: plan_of(SHAPE, degrees) for name, degrees in LAYOUTS.items()}

    def run(rank: int) -> dict[str, int]:
        found = {}
        for name, plan in plans.items():
            parts = assemble(plan, place_of(plan.layout, rank))
            sharpen(parts)
            save(held(parts), checkpoint_id=tmp_path / name.replace(" ", "-"))
            found[name] = sum(
                (p.to_local() if isinstance(p, DTensor) else p).numel()
                for key, p in parts.parameters()
                if ".experts." in key
            )
        names = list(plans)
        for number, (name, plan) in enumerate(plans.items()):
            place = place_of(plan.layout, rank)
            expected, parts = assemble(plan, place), assemble(plan, place)
            sharpen(expected)
            for other in (names[number - 1], names[number - 3]):
                for tensor in held(parts).values():
                    tensor.zero_()
                load(held(parts), checkpoint_id=tmp_path / other.replace(" ", "-"), no_dist=False)
                for (key, one), (_, two) in zip(parts.parameters(), expected.parameters(), strict=True):
                    one, two = (p.to_local() if isinstance(p, DTensor) else p for p in (one, two))
                    assert torch.equal(one, two), f"{key} from {other} into {name}"
        return found

    results = together(run, ranks=4)

    every = SHAPE.layers * SHAPE.experts * 3 * 16 * 10
    shares = {"spread": 2, "alone": 4, "cut": 4, "sharded": 4, "sharded alone": 4, "staged": 4, "dense": 1}
    for part in results:
        assert part == {name: every // shares[name] for name in LAYOUTS}


def held(parts: Parts) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in parts.parameters()}


def test_each_expert_is_counted_by_the_ranks_that_hold_it_and_weighs_what_the_plan_says(together: Together) -> None:
    plan = plan_of(SHAPE, {"data": 4, "expert": 2})

    def run(rank: int) -> tuple[dict[str, int], int]:
        place = place_of(plan.layout, rank)
        parts = assemble(plan, place)
        counted = copies(parts, place)
        nbytes = sum(local(parameter).nbytes for _, parameter in parts.parameters())
        return {name: counted[parameter] for name, parameter in parts.parameters()}, nbytes

    for counted, nbytes in together(run, ranks=4):
        assert {count for name, count in counted.items() if ".experts." in name} == {2}
        assert {count for name, count in counted.items() if ".experts." not in name} == {4}
        assert plan.memory is not None
        # The plan leaves out the final norm's 16 numbers.
        assert nbytes == plan.memory.weights + 16 * 4


def test_the_order_of_tokens_over_ranks_and_micro_batches_changes_rounding_alone(together: Together) -> None:
    plans = [
        plan_of(SHAPE, {"data": data, "expert": expert}, batch=16, micro_batches=micro_batches)
        for data, expert, micro_batches in ((4, 1, 1), (4, 4, 1), (4, 2, 2), (4, 4, 4))
    ]

    def run(rank: int) -> list[tuple[float, float]]:
        outcomes = [one_step(plan, place_of(plan.layout, rank), short=3)[0] for plan in plans]
        return [(outcome.loss, outcome.norm) for outcome in outcomes]

    first, *others = together(run, ranks=4)[0]
    for other in others:
        assert other == pytest.approx(first, rel=1e-6)


def test_what_cannot_be_spread_is_refused_with_its_key() -> None:
    dense = DecoderShape(layers=2, width=16, heads=2, vocabulary=13)
    with pytest.raises(SpecError, match=r"parallelism\.expert` is 2, and the model has no experts") as none:
        plan_of(dense, {"data": 2, "expert": 2})
    with pytest.raises(SpecError, match=r"parallelism\.expert` is 3, and the model has 4 experts") as three:
        plan_of(SHAPE, {"data": 3, "expert": 3}, batch=6)
    job = JobSpec(model="net.py:build", data=DataSpec(dataset="d.py:f"), parallelism=Parallelism(data=2, expert=2))
    with pytest.raises(SpecError, match=r"parallelism\.expert` is 2, and net\.py:build is your own module") as own:
        make_plan(job, MACHINE)
    with pytest.raises(SpecError, match=r"parallelism\.expert[\s\S]*optimizer\.in_backward") as soon:
        JobSpec(
            model=SHAPE, batch=8, parallelism=Parallelism(data=2, expert=2),
            optimizer=OptimizerSpec(in_backward=True, clip=0),
        )  # fmt: skip

    assert [error.value.hint.split(",")[0] for error in (none, three, own, soon)] == [
        "set `parallelism.expert` to 1",
        "set `parallelism.expert` to 2",
        "set `parallelism.expert` to 1",
        "set `optimizer.in_backward` to false",
    ]
