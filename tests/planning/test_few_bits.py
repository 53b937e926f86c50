"""The plan counts what few bits take: hand counts by precision, moments, updates and what the arithmetic is in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supernode.errors import CapacityError
from supernode.hardware.assemble import build_machine
from supernode.planning.planner import explain, make_plan
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape

MACHINE = build_machine(card_count=4, card="H100")
SHAPE = DecoderShape(layers=2, width=256, heads=4, hidden=1024, vocabulary=512)
JOB = JobSpec(model=SHAPE, batch=8, data=DataSpec(sequence=64), precision="bfloat16")
LEAN = OptimizerSpec(rounding="stochastic", state="float8", in_backward=True)


def per_parameter(job: JobSpec) -> tuple[float, float, float]:
    plan = make_plan(job, MACHINE, cards=(0,))
    assert plan.memory is not None
    return tuple(  # type: ignore[return-value]
        part / plan.parameters for part in (plan.memory.weights, plan.memory.gradients, plan.memory.optimizer)
    )


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (replace(JOB, precision="float32"), (4, 4, 8)),
        (JOB, (2, 2, 4)),
        (replace(JOB, optimizer=OptimizerSpec(state="float32", rounding="stochastic")), (2, 2, 8)),
        (replace(JOB, precision="float16", optimizer=OptimizerSpec(state="float8")), (2, 2, 2 + 2 / 256)),
        (replace(JOB, optimizer=LEAN), (2, 0, 2 + 2 / 256)),
        (replace(JOB, optimizer=LEAN, arithmetic="float32"), (2, 0, 2 + 2 / 256)),
        (replace(JOB, optimizer=LEAN, gradient_accumulation=2), (2, 2, 2 + 2 / 256)),
        (replace(JOB, optimizer=replace(LEAN, name="sgd")), (2, 0, 1 + 1 / 256)),
        (replace(JOB, precision="float32", arithmetic="float8"), (4, 4, 8)),
    ],
)
def test_bytes_of_state_follow_from_the_job(job: JobSpec, expected: tuple[float, float, float]) -> None:
    # The forecast counts the norms' vectors roughly: 5 × 256 of 2.2 million.
    assert per_parameter(job) == pytest.approx(expected, rel=1e-3)


def test_the_plan_names_what_is_in_force() -> None:
    words = dict(explain(make_plan(replace(JOB, optimizer=LEAN), MACHINE)))["optimizer"]

    assert words.endswith("moments in float8, weights rounded by chance, updated in backward")


def test_activations_are_of_the_arithmetics_size() -> None:
    same, wide = (make_plan(replace(JOB, arithmetic=kind), MACHINE).memory for kind in ("same", "float32"))

    assert same is not None
    assert wide is not None
    assert wide.activations == 2 * same.activations
    assert wide.weights == same.weights


def test_products_in_float8_are_refused_where_the_card_has_none() -> None:
    job = replace(JOB, arithmetic="float8")
    assert make_plan(job, MACHINE).memory is not None

    with pytest.raises(CapacityError, match="A100-80 has no products in float8"):
        make_plan(job, build_machine(card_count=4, card="A100-80"))
