"""The catalogue is read strictly, and its numbers are the published ones."""

from __future__ import annotations

import pytest

from supernode.errors import SpecError
from supernode.hardware import load
from supernode.hardware.parts import Card, Cooling

AIR = "air: {overhead: 0.4, capacity: 40kW, source: a survey}"


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth", "bfloat16", "scale_up"),
    [
        ("A100-80", 80e9, 2.039e12, 312e12, 600e9 / 2),
        ("H100", 80e9, 3.35e12, 1979e12 / 2, 900e9 / 2),  # the datasheet's FLOP/s are sparse
        ("H200", 141e9, 4.8e12, 1979e12 / 2, 900e9 / 2),
        ("B200", 1440e9 / 8, 64e12 / 8, 36e15 / 8 / 2, 1.8e12 / 2),  # HGX B200, eight GPUs, 36 PFLOP/s sparse
        ("GB200", 13.4e12 / 72, 576e12 / 72, 360e15 / 72 / 2, 130e12 / 72 / 2),  # NVL72
        ("TPU-v4", 32 * 2**30, 1.2e12, 275e12, 6 * 50e9),
        ("TPU-v5p", 95 * 2**30, 2.765e12, 459e12, 1200e9 / 2),
        ("Ascend-910C", 128e9, 3.2e12, 752e12, 14 * 224e9 / 8),
        ("MI300X", 192e9, 5.3e12, 1307.4e12, 7 * 128e9 / 2),
    ],
)
def test_cards_have_their_published_dense_numbers(
    name: str, memory: float, bandwidth: float, bfloat16: float, scale_up: float
) -> None:
    card = load.card(name)

    # Datasheets give three digits.
    assert card.memory == pytest.approx(memory, rel=5e-3)
    assert card.memory_bandwidth == pytest.approx(bandwidth, rel=5e-3)
    assert card.flops["bfloat16"] == pytest.approx(bfloat16, rel=5e-3)
    assert card.scale_up_bandwidth == pytest.approx(scale_up, rel=5e-3)


def test_every_part_names_its_source() -> None:
    sources = [card.source for card in load.cards().values()]
    sources += [load.node("HGX-8").source, load.link("InfiniBand-NDR").source, load.switch("Quantum-2").source]
    sources += [load.supply("PSU-3300").source, load.cooling("liquid").source]

    assert all(sources)


def test_a_name_is_found_in_any_case() -> None:
    assert load.card("b200") is load.card("B200")


def test_an_unknown_card_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean `H100`"):
        load.card("H10")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("air: {overhead: 0.4, capacity: 40kW, source: a, colour: red}", "unknown key `colour`"),
        ("air: {overhead: 0.4, source: a}", "no `capacity`"),
        ("air: {overhead: 0.4, capacity: 40kW}", "no `source`"),
        ("air: {overhead: warm, capacity: 40kW, source: a}", "`air.overhead` is 'warm'"),
        ("air: {overhead: 0.4, capacity: -1, source: a}", "`capacity` of cooling air is -1"),
        ("air: {overhead: .nan, capacity: 1, source: a}", "`overhead` of cooling air is nan"),
        ("air: {overhead: 0.4, capacity: true, source: a}", "`air.capacity` is True"),
        ("air: {overhead: 0.4, capacity: 1, source: a, estimates: {prise: b}}", "did you mean `price`"),
        ("air: 3", "no mapping"),
        ("- air", "holds no mapping"),
        ("air: {", "is not YAML"),
    ],
)
def test_a_wrong_entry_is_named(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load.read_parts(text, Cooling, file="mine.yaml")


def test_quantities_come_with_units() -> None:
    assert load.read_parts(AIR, Cooling, file="mine.yaml")["air"].capacity == 40_000


def test_a_card_at_rest_draws_no_more_than_at_work() -> None:
    with pytest.raises(SpecError, match="idle_power"):
        Card(
            name="odd", vendor="x", kind="gpu", memory=1, memory_bandwidth=1, flops={"float32": 1}, links=1,
            scale_up_bandwidth=1, scale_up_latency=0, power=1, idle_power=2,
        )  # fmt: skip
