"""Does the search find what trying every strategy alone finds, and say why?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supernode.errors import CapacityError, SpecError
from supernode.forecast.efficiency import card_model
from supernode.hardware.assemble import build_machine
from supernode.schema.job import JobSpec
from supernode.search.best import best_plans
from supernode.search.exhaustive import exhaustive
from supernode.search.front import Front, pareto
from supernode.search.offload import Room
from supernode.search.runnable import runnable_space
from supernode.search.search import DEGREES, OBJECTIVES, Bill, Found, search
from supernode.search.space import Space
from supernode.search.why import CAPACITY, RESOURCES, against, why
from supernode.workload.presets import public_model
from supernode.workload.shape import ModelShape, gpt_shape, make_shape
from supernode.workload.strategy import Software

CARD = card_model("A100-80")
BILL = Bill(idle=100.0, full=600.0, price=1e-4, tariff=2e-8)
GPT = gpt_shape(layers=6, width=4096, heads=32, vocabulary=51200, positions=1024)
MIXTURE = make_shape(
    width=2048, vocabulary=32000, attentions=4, heads=16, key_value_heads=4, head_width=128, mixtures=4, experts=8,
    routed=2, expert_width=4096, gated=1,
)  # fmt: skip
LLAMA = make_shape(
    width=2048, vocabulary=32000, attentions=4, heads=16, key_value_heads=4, head_width=128, mlps=4, mlp_width=8192,
    gated=1,
)  # fmt: skip
# So little that some strategies do not fit, and some fit only with the host's help.
TIGHT = Room(memory=7e9, host_memory=4e9)
ROOMY = Room(memory=80e9)


def spaces() -> dict[str, Space]:
    """Return spaces of a few hundred strategies, of different kinds."""
    plain = Software(flash=False, dropout=True)
    every = {"batch": 4, "sequence": 512, "most_context": 1, "spare": 0, "shardings": (1, 3), "offloads": (0, 4)}
    return {
        "dense": Space(model=GPT, cards=(4,), schedules=(1, 2), software=plain, **every | {"offloads": (0, 6)}),  # type: ignore[arg-type]
        "two counts": Space(model=GPT, cards=(2, 4), **every | {"offloads": (0,)}),  # type: ignore[arg-type]
        "mixture": Space(model=MIXTURE, cards=(4,), schedules=(1,), **every | {"offloads": (0,)}),  # type: ignore[arg-type]
        "overlaps": Space(
            model=GPT,
            cards=(4,),
            overlaps=(False, True),
            schedules=(1, 2),
            **every | {"offloads": (0,)},  # type: ignore[arg-type]
        ),
        # Four pieces divide it, the eight of tensor 2 × context 2 do not where tensor ranks share them.
        "runnable": runnable_space(Space(model=LLAMA, cards=(4,), batch=8, sequence=4100)),
    }


@pytest.mark.parametrize("name", spaces())
def test_the_best_is_the_best_of_all_tried_alone(name: str) -> None:
    space = spaces()[name]
    tried = exhaustive(space, CARD, TIGHT, BILL)

    for objective in OBJECTIVES:
        found = search(space, CARD, TIGHT, BILL, objective=objective)
        assert found.fitting == len(tried)
        assert found.strategies > found.fitting
        best = min(getattr(choice, objective) for choice in tried)
        assert getattr(found.best[0], objective) == pytest.approx(best, rel=1e-12)
        same = [choice for choice in tried if choice.axes == found.best[0].axes]
        assert len(same) == 1
        assert same[0].memory == pytest.approx(found.best[0].memory, rel=1e-12)


def test_each_of_the_best_few_is_the_best_of_its_degrees() -> None:
    space = spaces()["overlaps"]
    found = search(space, CARD, ROOMY, BILL, top=3)
    tried = exhaustive(space, CARD, ROOMY, BILL)

    by_degrees: dict[tuple[float, ...], float] = {}
    for choice in tried:
        degrees = tuple(choice.axes[name] for name in DEGREES)
        by_degrees[degrees] = min(choice.time, by_degrees.get(degrees, np.inf))
    wanted = sorted(by_degrees.values())[:3]
    assert [choice.time for choice in found.best] == pytest.approx(wanted, rel=1e-12)
    assert len({tuple(choice.axes[name] for name in DEGREES) for choice in found.best}) == 3


def test_the_front_is_that_of_all_tried_alone() -> None:
    space = spaces()["two counts"]
    found = search(space, CARD, TIGHT, BILL)
    tried = exhaustive(space, CARD, TIGHT, BILL)

    points = np.array([[c.time, c.memory, c.energy, c.cost] for c in tried])
    wanted = points[pareto(np.round(points, 12))]
    ours = np.array([[c.time, c.memory, c.energy, c.cost] for c in found.front])
    assert np.unique(ours, axis=0) == pytest.approx(np.unique(wanted, axis=0), rel=1e-9)


def test_a_choice_of_the_front_costs_what_it_costs_alone() -> None:
    space = spaces()["dense"]
    found = search(space, CARD, TIGHT, BILL)
    reasons = [why(space, CARD, TIGHT, BILL, choice) for choice in found.front[:5]]

    for choice, reason in zip(found.front, reasons, strict=False):
        assert sum(reason.parts.values()) == pytest.approx(choice.time, rel=1e-12)


def test_the_same_search_gives_the_same_answer() -> None:
    space = spaces()["dense"]
    first, second = (search(space, CARD, TIGHT, BILL) for _ in range(2))

    assert first == second


def test_more_memory_never_makes_the_best_slower() -> None:
    space = spaces()["dense"]
    times = [search(space, CARD, Room(memory=size), BILL, front=False).best[0].time for size in (8e9, 14e9, 30e9, 80e9)]

    assert times == sorted(times, reverse=True)


def test_nothing_fits_into_nothing() -> None:
    with pytest.raises(CapacityError, match="none of"):
        search(spaces()["dense"], CARD, Room(memory=1e6), BILL)


def test_an_unknown_objective_is_named() -> None:
    with pytest.raises(SpecError, match="beauty"):
        search(spaces()["dense"], CARD, TIGHT, BILL, objective="beauty")


def test_a_choice_that_computes_gains_most_from_faster_computing() -> None:
    space = Space(model=GPT, cards=(1,), batch=8, sequence=1024)
    room = Room(memory=80e9)
    found: Found = search(space, CARD, room, BILL)
    reason = why(space, CARD, room, BILL, found.best[0])

    assert reason.binds == "compute"
    assert set(reason.saved) == {*RESOURCES, CAPACITY}
    assert all(-1e-12 <= saved < 1 / 11 + 1e-9 for name, saved in reason.saved.items() if name != CAPACITY)
    assert reason.saved["network between nodes"] == pytest.approx(0, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=40), st.integers(1, 9))
def test_a_front_keeps_what_nothing_beats_in_whatever_portions_it_comes(
    some: list[tuple[int, int, int]], portion: int
) -> None:
    points = np.asarray(some, dtype=float)
    front = Front.empty(columns=3, marks=1)
    for start in range(0, len(points), portion):
        part = points[start : start + portion]
        front.offer(part, np.arange(start, start + len(part)).reshape(-1, 1))
    front.settle()

    def is_beaten(point: tuple[int, int, int]) -> bool:
        return any(all(a <= b for a, b in zip(other, point, strict=True)) and other != point for other in some)

    assert {tuple(point) for point in front.points} == {point for point in some if not is_beaten(point)}
    assert len({tuple(point) for point in front.points}) == len(front.points)


def test_a_job_and_a_machine_give_five_plans() -> None:
    machine = build_machine(16, "Hybrid", card="H100")
    plans = best_plans(public_model("llama3-8b"), machine, batch=16, sequence=4096)

    assert len(plans.found.best) == len(plans.reasons) == len(plans.obstacles) == 5
    assert not plans.notes
    by_job = best_plans(JobSpec(model="tiny", batch=16), machine)
    assert by_job.best.time > 0
    assert int(by_job.space.model.vocabulary) == 256  # of the job's tokenizer, bytes
    assert any("float32" in note for note in by_job.notes)


def test_a_card_without_measurements_is_told_of() -> None:
    machine = build_machine(16, "Hybrid", card="Ascend-910C")
    plans = best_plans(public_model("llama3-8b"), machine, batch=16, sequence=4096)

    assert "Ascend-910C" in plans.notes[0]


def test_cards_that_the_batch_does_not_divide_by_stay_idle() -> None:
    # Four heads and four layers, none of which seven cards divide, and a batch of two.
    machine = build_machine(7, "Ring", card="H100")
    plans = best_plans(JobSpec(model="tiny", batch=2), machine)

    assert 1 < plans.best.axes["cards"] < 7
    assert "of 7 cards stay idle" in plans.notes[0]


@pytest.mark.parametrize("cards", [0, 17])
def test_cards_that_a_machine_does_not_have_are_refused(cards: int) -> None:
    with pytest.raises(SpecError, match=f"{cards} cards of a machine of 16"):
        best_plans(JobSpec(model="tiny"), build_machine(16, "Hybrid", card="H100"), cards=cards)


def test_a_shape_without_a_batch_is_refused() -> None:
    shape: ModelShape = public_model("llama3-8b")
    with pytest.raises(SpecError, match="batch"):
        best_plans(shape, build_machine(8, "Hybrid", card="H100"))


def test_what_a_card_holds_adds_up_to_its_memory() -> None:
    space = spaces()["dense"]
    found = search(space, CARD, TIGHT, BILL)

    for choice in found.front[:5]:
        reason = why(space, CARD, TIGHT, BILL, choice)
        assert sum(reason.held.values()) == pytest.approx(choice.memory, rel=1e-12)
        assert (reason.held["on the host"] < 0) == bool(choice.axes["offload"])


def test_more_memory_saves_nothing_where_there_is_plenty() -> None:
    space = spaces()["dense"]
    slow = search(space, CARD, ROOMY, BILL, objective="memory").best[0]

    # The strategy itself may be slow; more room makes the fastest of its degrees no faster.
    assert why(space, CARD, ROOMY, BILL, slow).saved[CAPACITY] == 0


def test_differences_are_told_largest_first() -> None:
    assert against({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.5, "b": 0.0, "c": 3.0}) == [("b", -2), ("a", 0.5), ("c", 0)]


def test_a_plan_outside_of_what_was_fitted_says_so() -> None:
    model = public_model("llama3-8b")
    near = best_plans(model, build_machine(64, "Hybrid", card="H100"), batch=64, sequence=8192)
    far = best_plans(model, build_machine(64, "Hybrid", card="H100"), batch=64, sequence=2**21)

    assert not near.notes
    assert any("the sequence 2,097,152" in note for note in far.notes)


def test_an_odd_number_of_cards_is_answered_at_once() -> None:
    # The largest number up to 99,991 that degrees of the model and the batch multiply to.
    machine = build_machine(99_991, "Hybrid", card="H100")
    plans = best_plans(public_model("llama3-70b"), machine, batch=512, sequence=8192, top=1)

    assert plans.best.axes["cards"] == 98_304
    assert "1687 of 99991 cards stay idle" in plans.notes[0]
