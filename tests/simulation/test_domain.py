"""Where the closed form applies, it agrees with the events; and it says where it does not."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from supernode.forecast.efficiency import card_model
from supernode.simulation.domain import outside
from supernode.simulation.drawn import draw
from supernode.workload.presets import public_model
from supernode.workload.strategy import INTERLEAVED, Software, make_strategies

CARD = card_model("H100")
MODEL = public_model("llama3-70b")
INSIDE = {"tensor": 8, "pipeline": 4, "data": 2, "batch": 64, "sequence": 8192, "sequence_parallel": 1}


def reasons(software: Software | None = None, **degrees: object) -> tuple[str, ...]:
    ways = make_strategies(**(INSIDE | degrees))  # type: ignore[arg-type]
    return outside(MODEL, ways, CARD, software or Software())


@pytest.mark.slow
def test_closed_form_and_events_agree_within_two_per_cent_on_random_strategies() -> None:
    inside = [one for one in islice(draw(2026), 60) if not one.reasons]

    assert len(inside) >= 25
    assert {int(one.ways.schedule) for one in inside} == {0, 1, 2, 3}
    for one in inside:
        assert one.closed == pytest.approx(one.events, rel=0.02), (one.name, one.ways)


def test_an_even_pipeline_is_within() -> None:
    assert reasons() == ()


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        ({"batch": 8}, "micro-batches do not fill"),
        ({"pipeline": 8, "interleave": 4, "schedule": INTERLEAVED, "batch": 128}, "different numbers of layers"),
        ({"sharding": 3}, "gathered for every pass"),
    ],
)
def test_what_the_closed_form_leaves_out_is_named(degrees: dict[str, object], reason: str) -> None:
    assert any(reason in said for said in reasons(**degrees))


def test_slow_wires_are_named() -> None:
    slow = replace(CARD, wires=replace(CARD.wires, outside=CARD.wires.outside / 100))

    found = outside(MODEL, make_strategies(**INSIDE), slow, Software())  # type: ignore[arg-type]

    assert "a message takes longer than a tenth of a forward" in found
