"""What was measured gives back the rates that it was made from, disturbances or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from supernode.calibrating.fit import Measured, curves_of, fit_axis, fit_compute, plain_card
from supernode.errors import MachineError
from supernode.forecast.efficiency import CardModel
from supernode.forecast.network import Curves, gather_time, send_time, sum_time
from supernode.forecast.rates import card_of
from supernode.forecast.times import step_parts
from supernode.hardware.calibration import VERSION, AxisCost, Calibration, Compute, Curve, Sample, this_host
from supernode.hardware.discover import discover
from supernode.hardware.machine import Machine
from supernode.workload.shape import make_shape
from supernode.workload.strategy import FLOAT32, Software, make_strategies

TRUE = {
    "products": 1 / 1.5e11,
    "scores": 1 / 5e10,
    "memory": 1 / 1e10,
    "operands": 1 / 4e9,
    "operation": 8e-6,
    "step": 1e-3,
}
SIZES = [(1, 32, 16, 1), (4, 32, 16, 1), (2, 64, 64, 1), (2, 128, 128, 2), (2, 256, 128, 2), (2, 256, 256, 2),
         (1, 512, 128, 2), (2, 512, 256, 2), (1, 256, 512, 2), (1, 256, 1024, 1)]  # fmt: skip
SAMPLES = [
    Sample(
        kind="product",
        ranks=1,
        what={"rows": 100, "depth": 100, "columns": 100, "precision": name},
        seconds=s,
        others=0,
    )
    for name, s in (("float32", 2e-5), ("bfloat16", 1e-3))
] + [Sample(kind="copy", ranks=1, what={"nbytes": 1e6}, seconds=1e-4, others=0)]


def measured(layers: int, width: int, sequence: int, samples: int, *, factor: float = 1.0) -> Measured:
    model = make_shape(
        width=width, vocabulary=256, attentions=layers, heads=4, key_value_heads=4, head_width=width / 4, mlps=layers,
        mlp_width=3 * width, gated=1,
    )  # fmt: skip
    ways = make_strategies(micro_batch=samples, batch=samples, sequence=sequence, precision=FLOAT32)

    def predict(card: CardModel) -> float:
        return float(step_parts(model, ways, card, Software(fused=False)).total)

    return Measured(seconds=factor * predict(plain_card(**TRUE)), predict=predict)


def test_steps_give_back_the_rates_that_they_were_made_of() -> None:
    found = fit_compute(1, [measured(*sizes) for sizes in SIZES], SAMPLES)

    assert 1 / found.products == pytest.approx(TRUE["products"], rel=1e-6)
    assert 1 / found.scores == pytest.approx(TRUE["scores"], rel=1e-6)
    assert 1 / found.memory == pytest.approx(TRUE["memory"], rel=1e-6)
    assert 1 / found.operands == pytest.approx(TRUE["operands"], rel=1e-6)
    assert found.operation == pytest.approx(TRUE["operation"], rel=1e-6)
    assert found.step == pytest.approx(TRUE["step"], rel=1e-6)
    # 2e6 FLOPs in 20 µs and in 1 ms: a fiftieth; a copy reads and writes.
    assert found.products_half == pytest.approx(found.products / 50)
    assert found.copy == pytest.approx(2e10)


def test_disturbed_steps_change_nothing() -> None:
    steps = [measured(*sizes, factor=1.9 if number in (3, 7) else 1.0) for number, sizes in enumerate(SIZES)]

    found = fit_compute(1, steps, SAMPLES)

    assert 1 / found.products == pytest.approx(TRUE["products"], rel=1e-3)
    assert found.step == pytest.approx(TRUE["step"], rel=1e-3)


def test_steps_that_do_not_grow_with_their_work_are_refused() -> None:
    steps = [replace(measured(*sizes), seconds=0.01) for sizes in SIZES]

    with pytest.raises(MachineError, match="do not grow"):
        fit_compute(1, steps, SAMPLES)


def test_an_axis_costs_what_is_left() -> None:
    counts = [(2.0, 2.0, 0.01), (6.0, 2.0, 0.03), (2.0, 6.0, 0.03), (6.0, 6.0, 0.09), (2.0, 2.0, 0.4)]
    left = [0.01 + 0.003 * layers + 0.002 * many + 0.0005 * layers * many + 0.1 * busy for layers, many, busy in counts]

    cost = fit_axis("tensor", 4, counts, left, [1.0, 1.0, 0.1, 1.0, 1.0])

    assert (cost.step, cost.layer, cost.micro_batch, cost.block) == pytest.approx((0.01, 0.003, 0.002, 0.0005))
    assert cost.waiting == pytest.approx(0.1)


def exchange(kind: str, cards: int, nbytes: float, seconds: float) -> Sample:
    what: dict[str, float | str] = {"collective": kind, "group": cards, "nbytes": nbytes}
    return Sample(kind="exchange", ranks=4, what=what, seconds=seconds, others=0.0)


def test_a_curve_never_falls_with_size() -> None:
    samples = [exchange("send", 2, size, s) for size, s in ((1e6, 3e-4), (4, 9e-5), (1e3, 8e-5), (1e5, 1e-4))]

    (curve,) = curves_of(samples)

    assert curve.nbytes == (4, 1e3, 1e5, 1e6)
    assert curve.seconds == (8e-5, 8e-5, 1e-4, 3e-4)


CURVES = Curves(
    seconds={
        ("all_reduce", 2): (np.array([1e3, 1e5]), np.array([1e-4, 1e-2])),
        ("all_reduce", 4): (np.array([1e3, 1e5]), np.array([3e-4, 3e-2])),
    }
)


@pytest.mark.parametrize(
    ("nbytes", "cards", "seconds"),
    [
        (1e3, 2, 1e-4), (1e5, 4, 3e-2),  # as measured
        (10, 2, 1e-4),  # below the least size
        (1e4, 2, 1e-3),  # halfway on logarithmic axes
        (1e6, 2, 1e-1),  # ten times the largest
        (1e3, 3, 2e-4),  # between two groups
        (1e3, 7, 6e-4),  # beyond the largest: six others for three
        (1e3, 1, 0.0),
    ],
)  # fmt: skip
def test_curves_say_what_was_measured_and_what_lies_between(nbytes: float, cards: int, seconds: float) -> None:
    assert float(CURVES.time("all_reduce", np.float64(nbytes), cards=cards)) == pytest.approx(seconds)


def machine(cards: int, *, cores: int = 2) -> Machine:
    rates = {name: 1 / cost for name, cost in TRUE.items() if name not in ("operation", "step")}
    compute = Compute(processes=1, products_half=1e9, operation=8e-6, step=1e-3, copy=1e10, **rates)
    curves = tuple(
        Curve(kind=kind, ranks=ranks, cards=2, nbytes=(4.0, 1e6), seconds=(1e-4 * ranks, 1e-3 * ranks))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
        for ranks in (2, 4)
    )
    made = Calibration(
        version=VERSION, date="", host=this_host(cores), device="cpu", compute=(compute,), curves=curves,
        axes=(AxisCost(axis="tensor", ranks=2, block=0.5),),
    )  # fmt: skip
    return replace(discover(cards, measure=False), calibration=made, cores=cores)


def test_ranks_that_share_a_core_have_half_of_it_each() -> None:
    alone, shared = card_of(machine(2)), card_of(machine(4))
    model = make_shape(
        width=64, vocabulary=256, attentions=2, heads=4, key_value_heads=4, head_width=16, mlps=2, mlp_width=192
    )
    ways = make_strategies(batch=2, micro_batch=2, sequence=32, precision=FLOAT32)

    both = [float(step_parts(model, ways, card, Software()).total) for card in (alone, shared)]

    assert shared.sharing == 2
    assert both[1] == pytest.approx(2 * both[0])


def test_exchanges_take_the_curve_of_as_many_ranks() -> None:
    nbytes, two, one = np.float64(1e6), np.float64(2), np.float64(1)

    for ranks in (2, 4):
        wires = card_of(machine(8), ranks).tuned_wires
        assert float(sum_time(wires, nbytes, cards=two, stride=one)) == pytest.approx(1e-3 * ranks)
        assert float(gather_time(wires, nbytes, cards=two, stride=one)) == pytest.approx(1e-3 * ranks)
        assert float(send_time(wires, nbytes, stride=one)) == pytest.approx(1e-3 * ranks)


def test_an_axis_costs_its_host_at_every_block_and_micro_batch() -> None:
    model = make_shape(
        width=64, vocabulary=256, attentions=3, heads=4, key_value_heads=4, head_width=16, mlps=3, mlp_width=192
    )
    ways = make_strategies(tensor=2, batch=10, micro_batch=2, sequence=32, precision=FLOAT32)

    found = step_parts(model, ways, card_of(machine(2)), Software())

    assert float(found.host) == pytest.approx(0.5 * 3 * 5)


def test_a_pipeline_whose_ranks_share_one_core_has_no_bubble() -> None:
    # On one core there is nothing to wait for: the work of both stages is the step.
    model = make_shape(
        width=64, vocabulary=8, attentions=4, heads=4, key_value_heads=4, head_width=16, mlps=4, mlp_width=192
    )
    ways = make_strategies(pipeline=2, batch=8, micro_batch=2, sequence=32, precision=FLOAT32)

    piped = step_parts(model, ways, card_of(machine(2, cores=1)), Software())
    whole = step_parts(model, replace(ways, pipeline=np.ones(())), card_of(machine(1, cores=1)), Software())

    assert float(piped.compute + piped.bubble) == pytest.approx(float(whole.compute), rel=0.02)
