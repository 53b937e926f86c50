"""Schedules carried out between processes: the same results as in one, and the bytes that the description says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from supernode.collectives import exchange, grid, tree
from supernode.collectives.interpret import execute
from supernode.collectives.message import Schedule
from supernode.errors import SpecError
from supernode.ways.execute import Executor, steps_of
from supernode.ways.hosts import subgroup

RANKS = 8
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    **{
        f"{method} {kind}": lambda method=method, kind=kind: grid.flat(kind, RANKS, method)
        for method in ("ring", "direct", "halving")
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    },
    "two tiers": lambda: grid.hierarchical("all_reduce", (2, 4)),
    "two tiers scatter": lambda: grid.hierarchical("reduce_scatter", (2, 4), ("direct", "ring")),
    "two tiers gather": lambda: grid.hierarchical("all_gather", (4, 2), ("direct", "halving")),
    "three tiers": lambda: grid.hierarchical("all_reduce", (2, 2, 2), ("direct", "ring", "halving")),
    "torus": lambda: grid.multi_ring("all_reduce", (2, 4)),
    "torus scatter": lambda: grid.multi_ring("reduce_scatter", (2, 2, 2)),
    "unequal": lambda: grid.unequal((3, 1, 4)),
    "double tree": lambda: tree.double_tree(RANKS, parts=3),
    "binomial": lambda: tree.binomial(RANKS, root=3),
    "chain": lambda: tree.chain(RANKS, root=2, parts=5),
    "direct exchange": lambda: exchange.direct_exchange(RANKS),
    "levels exchange": lambda: exchange.level_exchange((2, 4)),
    "ring exchange": lambda: exchange.ring_exchange(RANKS),
}
ODD = (5, 3)
"""Numbers of ranks that are no powers of two, on some of the ranks."""


def values(rank: int, elements: int) -> np.ndarray:
    """Return small whole numbers, whose sums are exact in every type."""
    return np.random.default_rng(rank).integers(-4, 5, elements).astype(np.float64)


def expected(schedule: Schedule, elements: int) -> list[np.ndarray]:
    return execute(schedule, [values(rank, elements) for rank in range(schedule.ranks)])


def test_every_algorithm_does_between_processes_what_its_description_does_in_one(together):
    def rank(number: int) -> dict[str, np.ndarray]:
        done = {}
        for name, make in SCHEDULES.items():
            schedule = make()
            executor = Executor(schedule, dist.group.WORLD)
            elements = schedule.pieces * 3 if schedule.kind != "all_gather" else schedule.pieces // RANKS * 3
            done[name] = executor.run(torch.from_numpy(values(number, elements))).numpy()
            executor.close()
        return done

    results = together(rank, ranks=RANKS)

    for name, make in SCHEDULES.items():
        schedule = make()
        elements = schedule.pieces * 3 if schedule.kind != "all_gather" else schedule.pieces // RANKS * 3
        for found, right in zip(results, expected(schedule, elements), strict=True):
            np.testing.assert_array_equal(found[name], right, err_msg=name)


def test_any_length_any_type_any_number_of_chunks_gives_the_plain_sum(together):
    lengths = (1, 7, 1000)
    types = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

    def rank(number: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        done = []
        for ranks in ODD:
            group = subgroup(dist.group.WORLD, tuple(range(ranks)), f"odd-{ranks}") if number < ranks else None
            if group is None:
                continue
            for schedule in (
                *(grid.flat("all_reduce", ranks, method) for method in ("ring", "direct", "halving")),
                grid.unequal((ranks - 2, 2)), grid.multi_ring("all_reduce", (ranks,)),
            ):  # fmt: skip
                executor = Executor(schedule, group, chunk=256)
                for length in lengths:
                    for dtype in types:
                        mine = torch.from_numpy(values(number, length)).to(dtype)
                        plain = mine.float().clone()
                        dist.all_reduce(plain, group=group)
                        done.append((f"{schedule.algorithm} {length} {dtype}", executor.run(mine).float(), plain))
                executor.close()
            gather = Executor(grid.flat("all_gather", ranks), group)
            piece = int(np.flatnonzero(gather.schedule.owner == number)[0])
            low, high = 17 * piece // ranks, 17 * (piece + 1) // ranks
            whole = gather.run(torch.arange(17.0)[low:high].clone(), elements=17)
            done.append((f"gather {ranks}", whole, torch.arange(17.0)))
            gather.close()
        return done

    results = together(rank, ranks=5)

    assert len(results[0]) > len(results[4]) > 60
    for done in results:
        for name, found, right in done:
            assert torch.equal(found, right), name


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_sends_the_bytes_that_the_description_says(name):
    schedule = SCHEDULES[name]()

    pieces = [
        sum(len(message.pieces) for lane in steps_of(schedule, rank) for step in lane for message in step.sends)
        for rank in range(schedule.ranks)
    ]

    np.testing.assert_allclose(np.array(pieces) * schedule.share, schedule.sent(), rtol=1e-12)


def test_what_one_rank_sends_the_other_awaits_in_the_same_order():
    for make in SCHEDULES.values():
        schedule = make()
        steps = [steps_of(schedule, rank) for rank in range(schedule.ranks)]
        for lane in range(len(schedule.lanes)):
            for a in range(schedule.ranks):
                for b in range(schedule.ranks):
                    sent = [m.pieces for step in steps[a][lane] for m in step.sends if m.other == b]
                    awaited = [m.pieces for step in steps[b][lane] for m in step.receives if m.other == a]
                    assert sent == awaited


def test_a_switch_that_adds_and_another_number_of_ranks_are_refused(together):
    def rank(number: int) -> list[str]:
        said = []
        for schedule in (tree.in_network(2), grid.flat("all_reduce", 3)):
            with pytest.raises(SpecError) as caught:
                Executor(schedule, dist.group.WORLD)
            said.append(str(caught.value))
        return said

    for said in together(rank, ranks=2):
        assert "1 switches" in said[0]
        assert "3 ranks" in said[1]
