from __future__ import annotations

from dataclasses import replace

import pytest

from supernode.advice.answer import utilisation
from supernode.advice.compare import Comparison, compare, headroom, named, verdict
from supernode.advice.local import this_computer
from supernode.advice.pace import pace_from
from supernode.advice.project import forecast
from supernode.advice.question import question_about, question_of, search
from supernode.advice.tell import comparison_table
from supernode.advice.terms import UNKNOWN_BAND, Terms
from supernode.cli.flags import node
from supernode.control.supernode import SuperNode
from supernode.errors import SpecError
from supernode.hardware.assemble import build_machine, predefined
from supernode.hardware.discover import usable_cores
from supernode.planning.memory import USABLE
from supernode.schema.job import JobSpec
from supernode.schema.spread import Parallelism

QUESTION = question_about("llama3-8b", batch=64, sequence=2048)
TERMS = Terms(tokens=1e11)
NARROW = JobSpec(model="tiny", batch=64, precision="bfloat16")


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
    refusal = nowhere.refusal()
    assert refusal.message.startswith("no machine can do it: 1xH100: none of ")
    assert "on 1 card fits into 72 GB" in refusal.message
    assert refusal.hint == "take more cards, cards with more memory, or a smaller batch."


def test_cost_is_compared_at_the_price_that_is_given() -> None:
    terms = Terms(tokens=1e11, price=2.5 / 3600)
    value = compare(QUESTION, named("8xH100,64xH100"), terms, objective="cost")

    for entry in value.entries:
        assert entry.plans is not None
        assert entry.project is not None
        best = entry.plans.best
        assert best.cost == pytest.approx(2.5 / 3600 * best.axes["cards"] * best.time)
        fastest = search(QUESTION, entry.machine, top=1).best  # of so many cards, the fastest is the cheapest
        assert best.time == pytest.approx(fastest.time)
    owned = compare(QUESTION, named("8xH100"), TERMS, objective="cost").entries[0]
    assert owned.plans is not None
    alone = search(QUESTION, owned.machine, top=1, objective="cost").best
    assert owned.plans.best.cost == alone.cost


def test_cost_cannot_be_compared_without_a_price() -> None:
    unpriced = (predefined("8xH100"), build_machine(8, "3D_Torus", card="TPU-v4"))
    with pytest.raises(SpecError, match="TPU-v4 has no price"):
        compare(QUESTION, unpriced, TERMS, objective="cost")


def test_each_machine_s_doubts_are_told_beside_it() -> None:
    value = compare(question_of(NARROW), named("8xH100,8xA100-80"), TERMS)
    columns, rows = comparison_table(value)

    notes = dict(zip(columns, next(row for row in rows if row[0] == "notes"), strict=True))
    for name in ("8xH100", "8xA100-80"):
        assert "the width 128" in notes[name]
    assert all(entry.project is not None and entry.project.band == UNKNOWN_BAND for entry in value.entries)


def test_a_card_without_the_precision_says_what_it_has_and_leaves_the_others_alone() -> None:
    question = question_about("llama3-8b", batch=512, sequence=4096, precision="float8")
    old, new = compare(question, named("64xA100-80,64xH100"), Terms(tokens=1e12)).entries

    assert old.trouble == "A100-80 does not compute in float8"
    assert old.hint == "choose `--precision` float16, bfloat16, float32."
    assert new.plans is not None
    # The H100's dense peak in float8 is twice that of 16 bits (data sheet): 1,978.9 TFLOP/s.
    rate = question.flops / new.plans.best.time / 64
    assert utilisation(question, new.plans, new.plans.best) == pytest.approx(rate / 1978.9e12)


@pytest.mark.parametrize("names", ["512xH100,512xh100", "supernode-32, SUPERNODE-32", "8×H100,8xH100", "local,LOCAL"])
def test_a_machine_is_named_once_whatever_its_case(names: str) -> None:
    with pytest.raises(SpecError, match="is named twice"):
        named(names)


def test_local_is_the_computer_that_the_jobs_degrees_take() -> None:
    job = JobSpec(parallelism=Parallelism(tensor=1, pipeline=3, data=2))

    assert named("Local", job)[0].card_count == 6
    assert this_computer(job).card_count == node(None, "", "", "", "local", job).machine.card_count == 6
    assert (
        node(None, "", "", "", "", job).machine.card_count
        == node(None, "LOCAL", "", "", "", job).machine.card_count
        == 6
    )
    assert named("local")[0].card_count == SuperNode.named("LOCAL").machine.card_count == usable_cores()


def test_no_machines_make_no_comparison() -> None:
    with pytest.raises(SpecError, match="no machines"):
        compared("")
