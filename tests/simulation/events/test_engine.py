"""Exchanges beside passes, by hand; and messages that wait for the wires."""

from __future__ import annotations

import pytest

from supernode.fabric.level import Level
from supernode.fabric.shapes import joined
from supernode.simulation.events.engine import Engine
from supernode.simulation.events.wire import Wire, bundles
from supernode.simulation.events.work import StageWork, StepWork, Sync


def one_stage(**sync: object) -> StepWork:
    """Return one stage that forwards in 1 s and goes back in 2 s."""
    return StepWork(
        stages=(StageWork(layers=1, forward=1.0, backward=2.0),), schedule="1f1b", pipeline=1, micro_batches=1,
        sync=Sync(**({"scatter": (1.0,), "gather": (0.0,), "first": (0.25,)} | sync)),  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_last_gradients_travel_when_nothing_is_left_to_compute() -> None:
    # Pieces of 0.75 and 0.25 s, ready at 2 and 3 s.
    assert Engine(one_stage()).run() == pytest.approx(3.25)


def test_contention_slows_both_that_go_side_by_side() -> None:
    # From 2 s on both go at 1 / 1.5: 0.75 s take 1.125; of the pass 0.25 s are left then; the last piece follows.
    assert Engine(one_stage(contention=0.5)).run() == pytest.approx(3.625)


def test_a_forward_waits_for_its_first_weights_and_then_for_each_piece() -> None:
    # The pieces come at 0.5 and 2 s; the first half second of the forward is through at 1.
    work = one_stage(scatter=(0.0,), gather=(2.0,))

    assert Engine(work).run() == pytest.approx(2 + 0.5 + 2)


def test_an_exchange_that_is_longer_than_the_pass_shows() -> None:
    # Three quarters of 8 s begin at 2, the rest follows.
    assert Engine(one_stage(scatter=(8.0,))).run() == pytest.approx(10.0)


def test_a_sum_of_gradients_waits_while_the_pass_waits_for_an_axis() -> None:
    # Half of the backward is waiting: the exchange goes on half of the time.
    stage = StageWork(layers=1, forward=1.0, backward=1.0, backward_waits=(("tensor", 1.0),))
    work = StepWork(
        stages=(stage,), schedule="1f1b", pipeline=1, micro_batches=1,
        sync=Sync(scatter=(1.0,), gather=(0.0,), first=(0.25,)),
    )  # fmt: skip

    # 0.75 s from 2 s on: half a second is done at 3; 0.25 are left, and then 0.25 more.
    assert Engine(work).run() == pytest.approx(3.5)


def test_sharded_weights_lengthen_every_pass_by_what_is_not_hidden() -> None:
    work = one_stage(scatter=(0.0,), gather=(3.0,), first=(0.0,), each=True)

    # The forward of 1 s waits 2 more for its weights, the backward of 2 s one more.
    assert Engine(work).run() == pytest.approx(3 + 3)


def test_messages_of_two_replicas_that_share_a_link_take_twice_as_long() -> None:
    # Cards 0 and 1 send to 2 and 3 over ring links: two flows meet on the link from 1 to 2, none elsewhere.
    stages = tuple(StageWork(layers=1, forward=1.0, backward=1.0) for _ in range(2))
    work = StepWork(stages=stages, schedule="1f1b", pipeline=2, micro_batches=1, message=10.0, message_back=10.0)
    switch = joined([Level(kind="switch", size=4, bandwidth=10.0)])
    ring = joined([Level(kind="ring", size=5, bandwidth=10.0)])
    ends = bundles(block=2, pipeline=2, group=1, stride=1, node_cards=1, wraps=False)

    assert Engine(work, wire=Wire(switch, ends)).run() == pytest.approx(4 + 2 * 1)
    assert Engine(work, wire=Wire(ring, ends)).run() == pytest.approx(4 + 2 * 2)
