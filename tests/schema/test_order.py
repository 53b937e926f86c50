"""Every rank runs every pass once, and no order asks for what cannot yet be there."""

from __future__ import annotations

from itertools import accumulate

import pytest

from supernode.schema.order import Action, forwards_ahead, rank_order

CASES = [
    (schedule, pipeline, interleave, rounds * pipeline)
    for schedule, interleave in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
    for pipeline in (2, 3, 4)
    for rounds in (1, 2, 4)
]


def words(order: list[Action]) -> str:
    return " ".join(f"{a.kind[0]}{a.micro_batch}" for a in order)


def test_one_forward_one_backward_by_hand() -> None:
    orders = [rank_order("1f1b", rank=r, pipeline=2, interleave=1, micro_batches=3) for r in range(2)]

    assert words(orders[0]) == "f0 f1 b0 f2 b1 b2"
    assert words(orders[1]) == "f0 b0 f1 b1 f2 b2"


def test_gpipe_runs_all_forwards_first() -> None:
    order = rank_order("gpipe", rank=0, pipeline=2, interleave=1, micro_batches=3)

    assert words(order) == "f0 f1 f2 b0 b1 b2"


def test_zero_bubble_by_hand() -> None:
    orders = [rank_order("zero_bubble", rank=r, pipeline=2, interleave=1, micro_batches=3) for r in range(2)]

    assert words(orders[0]) == "f0 f1 b0 w0 f2 b1 w1 b2 w2"
    assert words(orders[1]) == "f0 b0 f1 b1 w0 f2 b2 w1 w2"


@pytest.mark.parametrize("micro_batches", [1, 3, 4, 9])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_zero_bubble_runs_all_three_parts_once_and_no_rank_holds_more_than_the_first(
    pipeline: int, micro_batches: int
) -> None:
    for rank in range(pipeline):
        order = rank_order("zero_bubble", rank=rank, pipeline=pipeline, interleave=1, micro_batches=micro_batches)

        places = {(a.kind, a.micro_batch): place for place, a in enumerate(order)}
        assert len(places) == len(order) == 3 * micro_batches
        for n in range(micro_batches):
            assert places["forward", n] < places["backward", n] < places["weights", n]
        held = max(accumulate({"forward": 1, "backward": 0, "weights": -1}[a.kind] for a in order))
        most = forwards_ahead("zero_bubble", rank=rank, pipeline=pipeline, interleave=1, micro_batches=micro_batches)
        assert held <= most == min(micro_batches, pipeline)


@pytest.mark.parametrize(("schedule", "pipeline", "interleave", "micro_batches"), CASES)
def test_every_pass_is_run_once_and_the_count_of_held_activations_agrees(
    schedule: str, pipeline: int, interleave: int, micro_batches: int
) -> None:
    for rank in range(pipeline):
        shape = {"pipeline": pipeline, "interleave": interleave, "micro_batches": micro_batches}
        order = rank_order(schedule, rank=rank, **shape)

        held = max(accumulate(1 if action.kind == "forward" else -1 for action in order))
        stages = {rank + local * pipeline for local in range(interleave)}
        every = {(s, kind, m) for s in stages for kind in ("forward", "backward") for m in range(micro_batches)}
        assert {(a.stage, a.kind, a.micro_batch) for a in order} == every
        assert len(order) == len(every)
        assert held == forwards_ahead(schedule, rank=rank, **shape)
