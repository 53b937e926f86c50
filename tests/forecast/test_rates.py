"""What the time model takes a machine's card to be."""

from __future__ import annotations

import pytest

from supernode.forecast.efficiency import card_model, card_names
from supernode.forecast.rates import card_of, is_calibrated
from supernode.hardware.assemble import build_machine
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import PRESETS
from supernode.schema.spread import Parallelism
from supernode.workload.strategy import FLOAT32


def test_a_known_card_brings_its_generations_numbers() -> None:
    card = card_of(build_machine(card_count=8, card="H100"))

    assert card.fitted == card_model("H100").fitted


@pytest.mark.parametrize("name", ["A100-80", "H100", "H200", "B200", "GB200"])
def test_the_catalogue_and_the_time_model_agree_on_the_data_sheet(name: str) -> None:
    sheet, ours = build_machine(card_count=8, card=name).card, card_model(name)

    assert ours.peaks[1] == pytest.approx(sheet.flops["bfloat16"])
    assert ours.peaks[FLOAT32] == pytest.approx(sheet.flops["float32"])
    assert ours.memory_bandwidth == pytest.approx(sheet.memory_bandwidth)
    assert ours.wires.inside == pytest.approx(sheet.scale_up_bandwidth)
    assert ours.memory == pytest.approx(sheet.memory, rel=1e-3)


def test_an_unknown_accelerator_gets_what_is_to_be_expected() -> None:
    machine = build_machine(card_count=8, card="MI300X")

    assert not is_calibrated(machine.card)
    assert card_of(machine).fitted.products == machine.card.efficiency


def test_a_cpu_core_is_not_slowed_down_by_a_precision_that_it_does_not_use() -> None:
    card = card_of(build_machine(card_count=2, card="CPU-core"))

    assert card.peaks[FLOAT32] > 50 * card.peaks[1]
    assert card.exponentials == card.peaks[FLOAT32] / 256


def job(**changes: object) -> JobSpec:
    return JobSpec(
        model=PRESETS["llama3-8b"], batch=64, gradient_accumulation=8, precision="bfloat16",
        data=DataSpec(sequence=4096), parallelism=Parallelism(tensor=8, data=1), **changes,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_plan_on_known_ground_has_no_doubts() -> None:
    assert not [n for n in make_plan(job(), build_machine(card_count=8, card="H100")).notes if "fitted" in n]


def test_a_plan_on_another_card_says_that_nothing_stands_behind_its_time() -> None:
    notes = make_plan(job(), build_machine(card_count=8, card="MI300X")).notes

    assert any("no published training run stands behind times on MI300X" in note for note in notes)


def test_a_plan_outside_what_was_fitted_says_so() -> None:
    wide = job()
    notes = make_plan(wide, build_machine(card_count=8, card="GB200")).notes

    assert any("the tensor degree 8 (fitted: 1 to 4)" in note for note in notes)


def test_every_card_reads() -> None:
    assert all(card_model(name).fitted.products > 0 for name in card_names())
