"""Calibration: what is measured and by whom, which of several tries counts, and that all of it fits together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from supernode.backends.fork_client import ForkServer
from supernode.backends.measuring import Bench
from supernode.calibrating.evaluate import evaluate
from supernode.calibrating.fit import plain_card
from supernode.calibrating.programme import AXIS_COUNTS, AXIS_STEPS, SIZES, Order, plan_of, programme
from supernode.control.calibrate import write
from supernode.errors import MachineError, SpecError
from supernode.forecast.times import step_parts
from supernode.hardware.calibration import Sample, read_calibration
from supernode.hardware.discover import discover, usable_cores
from supernode.planning.cost import software_of
from supernode.planning.memory import strategy_of
from supernode.planning.planner import make_plan
from supernode.schema.codec import to_json
from supernode.schema.job import JobSpec
from supernode.schema.spread import Parallelism
from supernode.workload.shape import decoder_shape

TRUE = {"products": 1e-11, "scores": 2e-11, "memory": 1e-10, "operands": 2e-10, "operation": 8e-6, "step": 1e-3}
AXIS_SECONDS = 0.01
"""What each axis costs for a block and micro-batch on the invented computer."""


def invented(order: Order) -> list[Sample]:
    """Return what an order would give on a computer of known rates, whose messages take no time worth the name."""
    kind, ranks, what = order
    if kind == "exchange":
        return [
            Sample(kind=kind, ranks=ranks, what={**what, "nbytes": size}, seconds=1e-9, others=0.0) for size in SIZES
        ]
    seconds = 1e-4
    if kind == "steps":
        plan = plan_of(what)
        shape = plan.job.shape
        assert shape is not None
        software = software_of(plan, discover(1, measure=False))
        seconds = float(step_parts(decoder_shape(shape), strategy_of(plan), plain_card(**TRUE), software).total)
        share = 2 if what["axis"] == "pipeline" else 1
        if what["axis"]:
            seconds *= max(1.0, ranks / usable_cores())  # more ranks than cores take turns
        seconds += bool(what["axis"]) * AXIS_SECONDS * float(what["layers"]) / share * float(what["micro_batches"])
    return [Sample(kind=kind, ranks=ranks, what=what, seconds=seconds, others=0.0)]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [sample for order in programme(2) for sample in invented(order)]


def test_the_programme_measures_alone_and_on_all_cores_at_once() -> None:
    alone = {ranks for kind, ranks, what in programme(2) if kind == "steps" and not what["axis"]}

    assert alone == {1, usable_cores()}


@pytest.mark.parametrize(("cards", "ranks"), [(2, {2}), (8, {2, 4, 8}), (6, {2, 4, 6}), (3, {2, 3})])
def test_exchanges_are_measured_up_to_as_many_ranks_as_asked_for(cards: int, ranks: set[int]) -> None:
    exchanges = [(ranks, what) for kind, ranks, what in programme(cards) if kind == "exchange"]

    assert {ranks for ranks, _ in exchanges} == ranks
    assert all(count % int(what["group"]) == 0 for count, what in exchanges if what["collective"] != "send")
    assert {count for count, what in exchanges if what["collective"] == "send"} == ranks


@pytest.mark.parametrize("cards", [0, 1, 65])
def test_counts_out_of_reach_are_refused(cards: int) -> None:
    with pytest.raises(SpecError, match=f"`cards` is {cards}"):
        programme(cards)


def test_samples_give_back_the_computer_that_they_came_from(samples: list[Sample], tmp_path: Path) -> None:
    found = evaluate(samples)

    for each in found.compute:
        assert each.products == pytest.approx(1e11, rel=1e-3)
        assert each.memory == pytest.approx(1e10, rel=1e-3)
        assert each.operation == pytest.approx(8e-6, rel=1e-3)
    assert {cost.axis for cost in found.axes if cost.ranks == 2} == set(AXIS_STEPS)
    for cost in found.axes:
        assert cost.block == pytest.approx(AXIS_SECONDS, rel=0.1), cost
    write(found, tmp_path / "new" / "calibration.yaml")
    assert read_calibration(tmp_path / "new" / "calibration.yaml") == found


def test_a_plan_on_the_calibrated_computer_takes_what_its_ranks_took(samples: list[Sample], tmp_path: Path) -> None:
    write(evaluate(samples), tmp_path / "calibration.yaml")
    machine = discover(2, calibration=tmp_path / "calibration.yaml")

    for sample in samples:
        if sample.kind == "steps" and sample.what["axis"] and sample.ranks == 2:
            plan = make_plan(plan_of(sample.what).job, machine)
            assert plan.step is not None
            assert plan.step.total == pytest.approx(sample.seconds, rel=0.05)
            assert any("calibration of" in note for note in plan.notes)


def test_pipelines_are_planned_after_a_calibration_with_an_odd_number(tmp_path: Path) -> None:
    write(evaluate([sample for order in programme(3) for sample in invented(order)]), tmp_path / "calibration.yaml")

    for ranks in (2, 3, 4, 5):
        machine = discover(ranks, calibration=tmp_path / "calibration.yaml")
        plan = make_plan(
            JobSpec(batch=8, gradient_accumulation=8, parallelism=Parallelism(pipeline=2, data=1)), machine
        )

        assert plan.step is not None
        assert plan.step.pipeline > 0


def test_axes_are_told_apart_by_layers_and_micro_batches() -> None:
    # Four unknowns need four steps or more in which neither count stands still.
    assert len(AXIS_COUNTS) >= 4
    assert min(len({layers for layers, _ in AXIS_COUNTS}), len({many for _, many in AXIS_COUNTS})) > 1


def test_a_folder_that_cannot_be_made_is_named(samples: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(MachineError, match="cannot be written") as refused:
        write(evaluate(samples), tmp_path / "file" / "calibration.yaml")

    assert "--out" in refused.value.hint


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    started = ForkServer()
    yield started
    started.close()


@pytest.mark.slow
def test_ranks_tell_the_seconds_of_every_turn(server: ForkServer) -> None:
    alone = next(what for kind, _, what in programme(2) if kind == "steps" and not what["axis"])
    spread = [what for kind, _, what in programme(2) if kind == "steps" and what["axis"]]
    with Bench(server, 2) as bench:
        told = [
            bench.order("product", rows=8, depth=8, columns=8, repeats=3, precision="float32", device="cpu"),
            bench.order("copy", nbytes=1024, repeats=3, device="cpu"),
            bench.order("steps", plan=to_json(plan_of(alone)), steps=3),
            *(bench.order("steps", plan=to_json(plan_of(what)), steps=3) for what in spread[:: len(AXIS_COUNTS)]),
        ]
        spent = bench.cpu_seconds()

    for by_rank in told:
        assert [len(turns) for turns in by_rank] == [3, 3]
        assert all(seconds > 0 for turns in by_rank for seconds in turns)
    assert spent > sum(sum(told[2][rank]) for rank in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "send"])
def test_exchanges_are_timed_by_size(server: ForkServer, collective: str) -> None:
    with Bench(server, 4) as bench:
        told = bench.order("exchange", collective=collective, group=2, sizes=[4, 4096], repeats=2, device="cpu")

    assert [[len(turns) for turns in sizes] for sizes in told] == [[2, 2]] * 4


@pytest.mark.slow
def test_an_odd_rank_computes_while_pairs_send(server: ForkServer) -> None:
    with Bench(server, 3) as bench:
        told = bench.order("exchange", collective="send", group=2, sizes=[4, 4096], repeats=2, device="cpu")

    assert [[len(turns) for turns in sizes] for sizes in told] == [[2, 2], [2, 2], [0, 0]]


@pytest.mark.slow
def test_a_rank_that_cannot_measure_says_why(server: ForkServer) -> None:
    with Bench(server, 1) as bench, pytest.raises(MachineError, match="could not measure its copy"):
        bench.order("copy", nbytes=-1, repeats=1, device="cpu")
