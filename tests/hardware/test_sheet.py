"""A machine's sheet is the sum of its parts, and says which claims do not hold."""

from __future__ import annotations

import pytest

from supernode.errors import SpecError
from supernode.hardware.assemble import MACHINES, build_machine, predefined
from supernode.hardware.power import power
from supernode.hardware.sheet import bisection_bandwidth, injection_bandwidth, machine_sheet


def test_256_cards_of_64_gb_are_16_tb() -> None:
    sheet = machine_sheet(predefined("supernode-256"))

    assert sheet.memory == 256 * 64 * 10**9
    assert sheet.memory // 10**12 == 16


def test_1024_cards_and_16_hosts_are_200_tb_of_unified_memory() -> None:
    sheet = machine_sheet(predefined("supernode-1024"))

    assert sheet.unified_memory == 1024 * 180 * 10**9 + 16 * 10**12
    assert sheet.unified_memory // 10**12 == 200


def test_384_ascend_cards_are_about_300_pflops() -> None:
    sheet = machine_sheet(predefined("supernode-384"))

    # 300 PFLOP/s is what the press reports for the machine; 384 × 752 TFLOP/s are 289.
    assert sheet.flops["bfloat16"] == pytest.approx(300e15, rel=0.04)
    assert sum(count for _, count in sheet.machine.switches) == 336 + 112


def test_120_kw_of_cooling_do_not_hold_256_cards_and_the_sheet_says_so() -> None:
    sheet = machine_sheet(predefined("supernode-256"))

    # Cards 256 × 400 W, hosts 32 × 1 kW, switches 32 × 900 W; supplies lose 4 %.
    assert sheet.peak.it == 256 * 400 + 32 * 1000 + 32 * 900
    assert sheet.peak.heat == pytest.approx(163_200 / 0.96)
    assert sheet.cooling_capacity == 120_000
    assert "it takes 2 units of 120 kW" in sheet.notes[0]


def test_enough_cooling_is_not_noted() -> None:
    assert machine_sheet(build_machine(64)).notes == ()


def test_liquid_beats_air_on_pue() -> None:
    liquid, air = (machine_sheet(build_machine(64, cooling=kind)) for kind in ("liquid", "air"))

    assert liquid.peak.pue == pytest.approx(1.06)
    assert air.peak.pue == pytest.approx(1.4)


def test_power_is_linear_between_rest_and_full_load() -> None:
    machine = build_machine(16)

    rest, half, full = (power(machine, load=load).total for load in (0, 0.5, 1))

    assert half == pytest.approx((rest + full) / 2)


def test_a_load_above_one_is_refused() -> None:
    with pytest.raises(SpecError, match="`load` is 2"):
        power(build_machine(1), load=2)


def test_an_8_cubed_torus_is_cut_across_128_links() -> None:
    machine = build_machine(512)

    assert bisection_bandwidth(machine) == pytest.approx(2 * 64 * 150e9)
    assert injection_bandwidth(machine) == pytest.approx(512 * 900e9)


def test_a_ring_is_cut_at_two_links() -> None:
    machine = build_machine(32, "Ring", card="H100")

    assert bisection_bandwidth(machine) == pytest.approx(2 * 225e9)


def test_a_full_mesh_of_four_is_cut_across_four_links() -> None:
    machine = build_machine(4, "Full_Mesh", card="H100")

    assert bisection_bandwidth(machine) == pytest.approx(4 * 150e9)


def test_two_cards_keep_all_their_bandwidth_across_the_cut() -> None:
    for name in ("Ring", "3D_Torus", "Full_Mesh", "Fat_Tree"):
        assert bisection_bandwidth(build_machine(2, name)) == pytest.approx(900e9)


def test_one_card_has_no_fabric() -> None:
    machine = build_machine(1)

    assert injection_bandwidth(machine) == bisection_bandwidth(machine) == 0


def test_cost_is_the_sum_of_the_bill_and_counts_estimates() -> None:
    machine = build_machine(8)
    sheet = machine_sheet(machine)

    parts = 8 * 37_000 + 90_000 + machine.supplies * 900 + machine.cooling_units * 60_000
    assert sheet.cost == parts
    assert (sheet.prices, sheet.estimated_prices) == (4, 4)


def test_cards_that_nobody_sells_are_named() -> None:
    assert "TPU-v4" in machine_sheet(build_machine(64, card="TPU-v4")).unpriced


@pytest.mark.parametrize("name", MACHINES)
def test_half_of_the_supplies_carry_the_peak(name: str) -> None:
    machine = predefined(name)

    assert machine.supplies * machine.supply.rated / 2 >= power(machine).it


@pytest.mark.parametrize("name", MACHINES)
def test_rows_are_for_people(name: str) -> None:
    rows = dict(machine_sheet(predefined(name)).rows())

    assert rows["machine"] == name
    assert all(rows.values())
