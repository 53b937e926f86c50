"""Rates of parts into MTBF, availability and goodput: closed forms against hand calculations, laws, and drawn lives."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from supernode.control.availability import availability, play, play_recovery
from supernode.errors import CapacityError, SpecError
from supernode.hardware.assemble import build_machine, predefined
from supernode.hardware.failing import YEAR, failing, read_failing
from supernode.reliability.chains import Group, occupancy, series, standing
from supernode.reliability.draws import draw
from supernode.reliability.months import Cause
from supernode.reliability.parts import EVERYTHING, NOTHING, Redundancy, cables_of, parts_of
from supernode.reliability.policies import POLICIES, Fleet, drawn_share, outcome
from supernode.reliability.published import LLAMA_CARDS, beside_llama, fit, llama
from supernode.reliability.service import ladder, scaled, service
from supernode.reliability.tiers import Recovery, Tier, best, drawn, goodput
from supernode.simulation.completion import Rhythm, expected_seconds

MACHINE = predefined("supernode-512")
DAY = 86_400.0


def test_a_pair_lasts_as_the_textbook_says_and_one_as_it_is() -> None:
    rate, repair = 0.01, 2.0
    one = standing(Group(name="one", units=1, needed=1, rate=rate, repair=repair))
    pair = standing(Group(name="pair", units=2, needed=1, rate=rate, repair=repair))
    shared = standing(Group(name="pair", units=2, needed=1, rate=rate, repair=repair, common=1.0))

    assert (one.mtbf, one.outage) == (pytest.approx(1 / rate), pytest.approx(repair))
    # Mean up time of two repairable units, each with its own repairer: (2λ + μ) / 2λ².
    assert pair.mtbf == pytest.approx((2 * rate + 1 / repair) / (2 * rate**2))
    assert pair.outage == pytest.approx(repair / 2)
    assert shared.mtbf == pytest.approx(one.mtbf)  # All of its failures common, a reserve is worth nothing.


def test_the_number_down_is_that_of_the_solved_chain() -> None:
    units, rate, repair = 6, 0.3, 0.5
    flow = np.zeros((units + 1, units + 1))
    for down in range(units):
        flow[down, down + 1] = (units - down) * rate
        flow[down + 1, down] = (down + 1) / repair
    flow -= np.diag(flow.sum(axis=1))
    solved = np.linalg.lstsq(np.vstack([flow.T, np.ones(units + 1)]), np.eye(1, units + 2, units + 1)[0], rcond=None)[0]

    assert occupancy(units, rate, repair) == pytest.approx(solved)


def test_drawn_lives_agree_with_the_closed_form() -> None:
    groups = (
        Group(name="pair", units=2, needed=1, rate=0.02, repair=2.0, common=0.3),
        Group(name="some", units=8, needed=6, rate=0.02, repair=1.0, count=2),
        Group(name="one", units=1, needed=1, rate=0.005, repair=0.5),
    )
    whole = series(standing(group) for group in groups)
    seen = draw(groups, seconds=5000.0, lives=40, rng=np.random.default_rng(7))

    assert abs(seen.standing.frequency - whole.frequency) < 3 * seen.errors.frequency
    assert abs(seen.standing.unavailability - whole.unavailability) < 3 * seen.errors.unavailability
    assert seen.errors.frequency < 0.05 * whole.frequency  # Else the lines above could not fail.


def test_no_redundancy_adds_up_all_failures_and_each_redundancy_helps() -> None:
    rungs = dict(ladder(MACHINE))
    none, known = rungs["none"], failing()
    card = 512 * (known["card"].rate + known["memory"].rate + known["network_card"].rate)
    host = 64 * (known["host"].rate + known["disk"].rate + 4 * known["supply"].rate + 16 * known["cable"].rate)

    assert cables_of(MACHINE) == 1024  # Two of three dims of 8 × 8 × 8 leave nodes of a row of eight.
    assert none.interruptions == pytest.approx(card + host + 512 * known["software"].rate)
    for name, rung in rungs.items():
        if name.startswith("only"):
            assert rung.availability > none.availability, name
            assert rung.outages.mtbf > none.outages.mtbf, name
        elif name.startswith("all but"):
            assert rung.availability < rungs["all"].availability, name


def test_the_claim_needs_recoveries_that_need_nobody_and_quick_repairs() -> None:
    usual = service(MACHINE, EVERYTHING)
    alone = service(MACHINE, EVERYTHING, by_hand=0.0)
    quick = service(MACHINE, EVERYTHING, by_hand=0.0, pause=2.0, rates=scaled(failing(), repair=1 / 6))

    assert (usual.is_as_claimed, alone.is_as_claimed, quick.is_as_claimed) == (
        (False, False),
        (True, False),
        (True, True),
    )
    longest = service(MACHINE, EVERYTHING, by_hand=0.0, pause=alone.longest_pause)
    assert longest.availability == pytest.approx(0.99995)
    # What people must mend comes once for so many interruptions.
    assert usual.groups["people"].frequency == pytest.approx(usual.interruptions * 3 / 419, rel=1e-3)


def test_other_machines_have_switches_and_this_computer_no_rates() -> None:
    switched = parts_of(predefined("supernode-64"), NOTHING)
    spared = parts_of(predefined("supernode-64"), Redundancy(paths=True))
    local = replace(build_machine(card_count=8, card="H100"), node=None)

    assert [group.reserve for group in switched.groups if group.name == "switch"] == [0]
    assert [group.reserve for group in spared.groups if group.name == "switch"] == [1]
    with pytest.raises(SpecError, match="no failure rates"):
        parts_of(local, NOTHING)
    with pytest.raises(SpecError, match="unknown key `per_yaer`"):
        read_failing("card: {per_yaer: 1, repair: 1h, read: fetched, source: x}", file="f.yaml")


def test_one_tier_is_daly_s_and_no_other_interval_is_better() -> None:
    disk = Tier(name="disk", save=20.0, restore=30.0, rate=1 / 20_000)
    recovery = Recovery(tiers=(disk,), step=1.0, detect=1.0, restart=29.0)
    interval = best(recovery).tiers[0].interval
    daly = 1e6 / expected_seconds(1e6, Rhythm(mtbf=20_000, save=20.0, restart=60.0, interval=interval))

    assert interval == pytest.approx(math.sqrt(2 * 20 * 20_000), abs=0.5)
    assert goodput(recovery) == pytest.approx(daly, rel=2e-3)  # Daly's counts failures within a segment again.
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = replace(recovery, tiers=(replace(disk, interval=interval * factor),))
        assert goodput(other) < goodput(recovery)
    with pytest.raises(CapacityError):
        goodput(replace(recovery, tiers=(replace(disk, rate=1.0),)))


def test_the_intervals_of_tiers_are_the_best_of_a_grid() -> None:
    tiers = (
        Tier(name="memory", save=0.5, restore=0.0, rate=1 / DAY),
        Tier(name="partner", save=0.0, restore=0.0, rate=4 / DAY),
        Tier(name="disk", save=3.0, restore=0.0, rate=0.5 / DAY),
    )
    recovery = Recovery(tiers=tiers, step=1.0, detect=0.0, restart=1.0)
    found = best(recovery)
    grid = [
        goodput(replace(recovery, tiers=tuple(replace(t, interval=i) for t, i in zip(tiers, spans, strict=True))))
        for spans in itertools.product((60.0, 120.0, 131.0, 150.0, 240.0, 1000.0, 2000.0), repeat=3)
        if list(spans) == sorted(spans)
    ]

    assert found.tiers[0].interval == found.tiers[1].interval  # What the partner holds came by way of memory.
    assert goodput(recovery) >= max(grid)


def test_goodput_drawn_and_played_by_the_controller_agree_with_the_closed_form() -> None:
    tiers = (
        Tier(name="memory", save=0.2, restore=5.0, rate=10 / DAY),
        Tier(name="partner", save=0.0, restore=15.0, rate=30 / DAY),
        Tier(name="disk", save=6.0, restore=60.0, rate=2 / DAY),
    )
    recovery = best(Recovery(tiers=tiers, step=40.0, detect=1.0, restart=29.0))
    share, counts = drawn(recovery, seconds=20 * DAY, lives=100, rng=np.random.default_rng(3))
    played = play_recovery(recovery, days=10, seed=4)
    met = sum(played.interruptions.values())

    assert share.mean() == pytest.approx(goodput(recovery), abs=0.0015)
    assert counts.mean() == pytest.approx(42 * 20, rel=0.02)
    assert played.useful == pytest.approx(goodput(recovery), abs=0.008)
    assert abs(met - 420) < 4 * math.sqrt(420)
    assert set(played.restored) == {"start", "memory", "partner", "disk"}
    assert sum(played.restored.values()) >= 0.9 * met  # But for those within a pause.


def test_a_disk_alone_loses_more_than_memory_and_the_same_seed_plays_the_same() -> None:
    def of(source: str) -> float:
        causes = (Cause(name="card", rate=40 / DAY, source=source, pause=30.0),)
        return play(causes, days=3, step=50.0, save_every=40, keep_every=2, seed=1).useful

    assert of("memory") == of("partner") == of("memory")
    # A failure costs 1,000 s of steps on average with the disk, and a step otherwise.
    assert of("memory") - of("disk") == pytest.approx(40 * 950 / DAY, rel=0.3)
    with pytest.raises(SpecError, match="`source` of card"):
        Cause(name="card", rate=1.0, source="tape", pause=1.0)


def test_policies_leave_what_drawn_nodes_leave() -> None:
    fleet = Fleet(nodes=16, spares=2, rate=1 / (20 * DAY), repair=DAY, pause=0.0, grain=4)
    rng = np.random.default_rng(11)
    work = {}
    for policy in POLICIES:
        seen = drawn_share(fleet, policy, seconds=2000 * DAY, lives=8, rng=rng)
        work[policy] = outcome(fleet, policy).work
        assert work[policy] == pytest.approx(seen.mean(), abs=4 * seen.std(ddof=1) / math.sqrt(8)), policy

    assert work["wait"] < work["spare"] < work["spare, then shrink"]
    assert work["wait"] < work["shrink"] < work["spare, then shrink"]
    assert work["wait"] == pytest.approx((1 - (1 / 21)) ** 16)
    with pytest.raises(SpecError, match="no policy"):
        outcome(fleet, "hope")


def test_published_runs_are_split_and_llama_s_causes_add_up_to_what_is_published() -> None:
    found = fit()
    fitted = [run for run in found.runs if run.half == "fit"]
    causes = llama(pauses={"memory": 1.0, "partner": 2.0, "disk": 3.0})
    llama_run = next(run for run in found.runs if run.name == "Llama 3 405B")

    assert len(fitted) <= len(found.runs) / 2
    assert llama_run.half == "judge"
    assert sum(cause.rate for cause in causes) * 54 * DAY == pytest.approx(419)
    assert found.rate == pytest.approx(
        math.prod(run.interruptions / (run.cards * run.days * DAY) for run in fitted) ** (1 / len(fitted))
    )
    assert llama_run.foretold == pytest.approx(found.rate * LLAMA_CARDS * 54 * DAY)
    assert 419 / found.spread < llama_run.foretold < 419 * found.spread
    assert beside_llama()["SSD (one a node)"] == (pytest.approx(2048 * 0.0098 * 54 * DAY / YEAR), pytest.approx(3))


def test_bad_words_are_refused() -> None:
    for asked, words in (
        ({"without": ("walls",)}, "no redundancy"), ({"spares": -1}, "spares"), ({"pause": -1.0}, "pause"),
        ({"by_hand": 2.0}, "by_hand"), ({"days": 1e9}, "days"), ({"parameters": 0.0}, "parameters"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=words):
            availability(MACHINE, **asked)  # type: ignore[arg-type]
