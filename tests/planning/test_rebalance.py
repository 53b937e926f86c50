"""What measured times tell: who is slow, and which shares leave the busiest rank the least."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from supernode.hardware.assemble import build_machine
from supernode.planning.cost import step_time
from supernode.planning.cut import cut_stages
from supernode.planning.memory import USABLE, memory_use
from supernode.planning.rebalance import judge
from supernode.schema.job import JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Layout, Plan
from supernode.schema.spread import Balance

SHAPE = DecoderShape(layers=8, width=64, heads=4, vocabulary=256)


def plan_of(*, move: bool = True, micro_batches: int = 4, model: Any = SHAPE, **degrees: Any) -> Plan:
    layout = Layout(**degrees)
    return Plan(
        job=JobSpec(model=model, batch=64, balance=Balance(move=move, slow=1.5)), layout=layout, machine="m",
        cards=tuple(range(layout.ranks)), micro_batch=1, micro_batches=micro_batches, vocabulary=256,
        stages=cut_stages([1.0] * 8, pipeline=layout.pipeline),
    )  # fmt: skip


def times(plan: Plan, slowness: dict[int, float], *, head: float) -> list[float]:
    """Return what ranks would take that need a second for one micro-batch in one layer."""
    made = []
    for rank in range(plan.ranks):
        pipeline, data, _, _ = plan.layout.place(rank)
        work = sum(s.last - s.first + s.heads * head for s in plan.stages if s.rank == pipeline)
        made.append(work * plan.share(data) * slowness.get(rank, 1.0))
    return made


# FLOPs of the head over a block's: 64 × 256 matrix elements against 4 × 64² + 3 × 64 × 192 and 64 × 128 of scores.
HEAD = 64 * 256 / (4 * 64**2 + 3 * 64 * 192 + 64 * 128)


@pytest.mark.parametrize(
    "degrees", [{"data": 4}, {"pipeline": 4}, {"pipeline": 2, "data": 2}, {"tensor": 2, "data": 2}]
)
def test_a_slow_rank_is_named_and_even_ones_are_not(degrees: dict[str, int]) -> None:
    plan = plan_of(move=False, **degrees)

    assert judge(plan, times(plan, {}, head=HEAD)).slow == {}
    found = judge(plan, times(plan, {2: 2.0}, head=HEAD))
    assert found.slow == {2: pytest.approx(2.0)}
    assert found.plan is None


def test_nothing_moves_where_all_are_alike() -> None:
    # With 6 + 2 layers of 8 the first cut is not even, and that is no rank's fault: work is counted, not supposed.
    plan = plan_of(pipeline=2, data=2)

    assert judge(plan, times(plan, {}, head=HEAD)).plan is None


@pytest.mark.parametrize(("slow", "shares"), [(3.0, (6, 2)), (1.5, (5, 3)), (20.0, (7, 1))])
def test_copies_share_micro_batches_by_their_pace(slow: float, shares: tuple[int, int]) -> None:
    plan = plan_of(data=2)
    least = min(range(1, 8), key=lambda one: max(one, (8 - one) * slow))

    found = judge(plan, times(plan, {1: slow}, head=HEAD)).plan
    assert found is not None
    assert found.shares == shares == (least, 8 - least)


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_is_the_best_of_all_for_stages_of_unlike_pace(seed: int) -> None:
    slowness = [[1.0, 3.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 5.0], [1.3, 1.0, 4.0]][seed]

    cut = cut_stages([1.0] * 8, pipeline=3, head=0.7, slowness=slowness)
    sizes = [stage.last - stage.first for stage in cut]

    def slowest(ways: tuple[int, ...]) -> float:
        return max((n + (0.7 if s == 2 else 0)) * f for s, (n, f) in enumerate(zip(ways, slowness, strict=True)))

    best = min(slowest(ways) for ways in product(range(1, 9), repeat=3) if sum(ways) == 8)
    assert slowest(tuple(sizes)) == pytest.approx(best)


def test_a_slow_copy_of_one_stage_moves_samples_rather_than_layers() -> None:
    # Rank 0 alone is slow: taking layers off stage 0 would load the other copy's stage 1, taking samples off is exact.
    plan = plan_of(pipeline=2, data=2, micro_batches=8)

    found = judge(plan, times(plan, {0: 2.0}, head=HEAD)).plan
    assert found is not None
    assert found.shares[0] < 8 < found.shares[1]
    busy = times(plan, {0: 2.0}, head=HEAD)
    assert max(times(found, {0: 2.0}, head=HEAD)) < 0.9 * max(busy)
    # What follows from the new times is no further move.
    assert judge(found, times(found, {0: 2.0}, head=HEAD)).plan is None


def test_what_meets_inside_every_pass_shares_evenly() -> None:
    for degrees in ({"data": 2, "sharding": "fsdp"}, {"data": 2, "expert": 2}):
        plan = plan_of(**degrees)

        assert judge(plan, times(plan, {1: 3.0}, head=HEAD)).plan is None


def test_layers_of_a_users_own_module_stay_and_its_ranks_are_compared_stage_by_stage() -> None:
    plan = replace(plan_of(model="own.py:model", pipeline=2, data=2), vocabulary=0)

    found = judge(plan, [1.0, 1.0, 5.0, 5.0])
    assert found.slow == {}
    found = judge(plan, [1.0, 1.0, 5.0, 12.0])
    assert found.slow == {3: pytest.approx(2.4)}
    assert found.plan is not None
    assert found.plan.stages == plan.stages
    assert found.plan.shares == (6, 2)


def test_no_work_moves_to_a_card_that_could_not_hold_it_and_what_moves_is_predicted_anew() -> None:
    plan = plan_of(pipeline=2, micro_batches=2)
    found = judge(plan, times(plan, {1: 3.0}, head=HEAD)).plan
    assert found is not None
    fullest = memory_use(found)
    assert fullest is not None

    roomy, tight = (build_machine(2, card="H100"), build_machine(2, card="H100"))
    tight = replace(tight, card=replace(tight.card, memory=int(fullest.total / USABLE) - 1024))
    predicted = judge(plan, times(plan, {1: 3.0}, head=HEAD), machine=roomy).plan
    assert predicted is not None
    assert predicted.stages == found.stages != plan.stages
    assert predicted.memory == fullest != memory_use(plan)
    assert predicted.step == step_time(found, roomy)
    refused = judge(plan, times(plan, {1: 3.0}, head=HEAD), machine=tight)
    assert refused.slow
    assert refused.plan is None


def test_what_a_copy_with_more_micro_batches_takes_is_what_is_predicted() -> None:
    machine = build_machine(2, card="H100")
    plan = plan_of(data=2)

    found = judge(plan, times(plan, {1: 3.0}, head=HEAD), machine=machine).plan
    assert found is not None
    assert found.shares == (6, 2)
    assert found.step == step_time(replace(plan, micro_batches=6), machine)
