from __future__ import annotations

from dataclasses import replace

import pytest

from supernode.advice.compare import Comparison, compare, headroom, named, verdict
from supernode.advice.pace import pace_from
from supernode.advice.project import forecast
from supernode.advice.question import question_about, search
from supernode.advice.terms import Terms
from supernode.errors import SpecError
from supernode.hardware.assemble import predefined
from supernode.search.best import USABLE

QUESTION = question_about("llama3-8b", batch=64, sequence=2048)
TERMS = Terms(tokens=1e11)


def compared(names: str, **wanted: str) -> Comparison:
    return compare(QUESTION, named(names), TERMS, **wanted)  # type: ignore[arg-type]


def test_each_machine_has_what_it_has_alone() -> None:
    value = compared("64xH100,64xA100-80")

    for entry in value.entries:
        plans = search(QUESTION, entry.machine, top=1)
        alone = forecast(QUESTION, entry.machine, TERMS, pace=pace_from(plans.best))
        assert entry.project is not None
        assert entry.project.seconds == alone.seconds
        assert headroom(entry) == pytest.approx(1 - plans.best.memory / (USABLE * entry.machine.card.memory))


def test_the_objective_decides_who_wins() -> None:
    names = "8xH100,64xH100"
    by_time, by_energy = compared(names), compared(names, objective="energy")

    assert by_time.winner is not None
    assert by_time.winner.machine.card_count == 64
    projects = [entry.project for entry in by_energy.entries]
    least = min(range(2), key=lambda place: projects[place].energy.middle)  # type: ignore[union-attr]
    assert by_energy.ranking[0] == least


def test_order_does_not_matter() -> None:
    one, other = compared("64xH100,64xB200"), compared("64xB200,64xH100")

    assert one.winner is not None
    assert other.winner is not None
    assert one.winner.machine.name == other.winner.machine.name
    assert verdict(one) == verdict(other)


def test_a_faster_twin_wins_and_the_peak_is_named() -> None:
    slow = predefined("64xH100")
    card = replace(slow.card, flops={name: 2 * rate for name, rate in slow.card.flops.items()}, name="Twin")
    fast = replace(slow, card=card, name="twin")
    value = compare(QUESTION, (slow, replace(fast, name="twin")), TERMS)

    assert value.winner is not None
    assert value.winner.machine.name == "twin"
    assert "each with 2.00 times the peak FLOP/s" in verdict(value)


def test_a_machine_too_small_leaves_the_others_alone() -> None:
    value = compare(question_about("llama3-405b", batch=64, sequence=2048), named("1xH100,64xB200"), TERMS)

    assert value.ranking == (1,)
    assert "fits" in value.entries[0].trouble
    assert verdict(value) == "64xB200, the only one on which it fits"
    nowhere = compare(question_about("llama3-405b", batch=64, sequence=2048), named("1xH100"), TERMS)
    assert nowhere.winner is None
    assert verdict(nowhere) == "no machine can do it"


def test_no_machines_make_no_comparison() -> None:
    with pytest.raises(SpecError, match="no machines"):
        compared("")
