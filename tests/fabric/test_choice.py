"""The quickest algorithm is chosen, unless someone knows better."""

from __future__ import annotations

import pytest

from supernode.errors import SpecError
from supernode.fabric.choice import choose, collective_time, table
from supernode.fabric.level import Level, levels_of
from supernode.hardware.assemble import predefined

SWITCH = [Level(kind="switch", size=8, bandwidth=450e9, latency=1e-6)]
TORUS = levels_of(predefined("supernode-512"))
MILLION = [
    Level(kind="switch", size=8, bandwidth=450e9, latency=1e-6, overhead=0.5e-6),
    Level(kind="switch", size=64, bandwidth=50e9, latency=2e-6, overhead=0.5e-6),
    Level(kind="switch", size=2048, bandwidth=25e9, latency=3e-6, overhead=0.5e-6),
]


def test_few_steps_win_for_small_sizes_and_all_links_for_large_ones() -> None:
    assert choose("all_reduce", 4096, TORUS) == "direct"
    assert choose("all_reduce", 2**30, TORUS) == "multi_ring"


def test_a_switch_that_adds_halves_a_large_all_reduce() -> None:
    ring, added = (collective_time("all_reduce", 1e9, SWITCH, algorithm=name) for name in ("ring", "in_network"))

    # 2 · 7/8 of the vector against 17/16 of it, with sixteen parts in flight.
    assert ring / added == pytest.approx(1.75 / (17 / 16), rel=0.01)
    assert choose("all_reduce", 1e9, SWITCH, switch_adds=True) == "in_network"


def test_levels_beat_a_flat_ring_where_there_are_many_cards() -> None:
    flat, levels = (collective_time("all_reduce", 1e8, MILLION, algorithm=name) for name in ("flat_ring", "halving"))

    assert flat / levels > 1000


def test_a_compressor_takes_off_bytes_and_no_latency() -> None:
    whole, tenth = (collective_time("all_reduce", 1e9, SWITCH, algorithm="ring", left=left) for left in (1.0, 0.1))
    none = collective_time("all_reduce", 0.0, SWITCH, algorithm="ring")

    assert tenth - none == pytest.approx((whole - none) / 10)


def test_a_table_can_be_overridden_from_a_size_on() -> None:
    known = table("all_reduce", SWITCH)

    forced = known.overridden(2**20, "halving").overridden(2**24, "")

    assert known.best(2**22) == known.best(2**25) == "direct"
    assert [forced.best(size) for size in (2**10, 2**22, 2**25)] == ["direct", "halving", "direct"]
    with pytest.raises(SpecError, match="did you mean `halving`"):
        known.overridden(0, "halvin")


def test_a_table_can_be_read_and_drawn() -> None:
    known = table("all_to_all", MILLION, [2**10, 2**30])

    assert known.text().splitlines()[0].split() == ["all_to_all,", "µs", "1", "KiB", "1", "GiB"]
    assert known.text().count("*") == 2
    assert known.svg().count("<polyline") == len(known.algorithms)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_every_collective_has_a_choice_on_three_tiers(kind: str) -> None:
    assert choose(kind, 1e6, MILLION)


def test_an_algorithm_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="beside a torus"):
        collective_time("all_reduce", 1e6, SWITCH, algorithm="multi_ring")
    with pytest.raises(SpecError, match="leaves 0 of the bytes"):
        collective_time("all_reduce", 1e6, SWITCH, algorithm="ring", left=0)
