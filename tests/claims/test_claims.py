"""Every figure is computed: it moves when what it stands on moves, and agrees with what one can work out by hand."""

from __future__ import annotations

import json
import math

import pytest

from supernode.claims import fabrics
from supernode.claims.claim import Claim, Entry, Setting, Shown, Sweep, judge
from supernode.claims.cluster import trillion
from supernode.claims.page import page, plain
from supernode.claims.project import mixture
from supernode.claims.table import CLAIMS, chosen, show
from supernode.errors import SpecError

OTHER = Setting(network=0.4, radix=6, failures=2.0)


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    return {entry.claim.id: entry for entry in show()}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_figure_is_no_constant(name: str, entries: dict[str, Entry]) -> None:
    (other,) = show([name], setting=OTHER)
    usual = entries[name].shown
    # The best permutation on a fabric as wide above as below is the line rate whatever its size: there, failures move.
    moved = [usual.ours, *(figure for _, figure in usual.sweep.points)]
    now = [other.shown.ours, *(figure for _, figure in other.shown.sweep.points)]
    assert any(abs(a - b) > 1e-3 * abs(a) for a, b in zip(moved, now, strict=True))
    assert all(math.isfinite(figure) for figure in (*moved, *now))


def test_each_row_says_what_it_rests_on_and_is_json(entries: dict[str, Entry]) -> None:
    for name, entry in entries.items():
        value = json.loads(json.dumps(plain(entry), allow_nan=False))
        assert value["id"] == name
        assert value["baseline"]
        assert value["assumptions"]
        assert value["how"] in ("run", "replay", "model")
        assert len(value["sweep"]["points"]) >= 3
    text = page(list(entries.values()))
    assert text.count("<svg") == len(entries)
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("goal", "ours", "points", "word", "detail"),
    [
        ("at least", 2.0, ((1, 2.0),), "holds", ""),
        ("at least", 1.0, ((1, 1.0), (2, 2.1), (3, 2.2)), "holds under", "cards: 2, 3"),
        ("at least", 1.0, ((1, 1.2), (2, 1.5)), "does not hold", "nearest 1.5× (cards 2)"),
        ("at most", 3.0, ((1, 3.0), (2, 2.5)), "does not hold", "nearest 2.5× (cards 2)"),
        ("at most", 3.0, (("slow", 1.5), ("fast", 4.0)), "holds under", "cards: slow"),
        ("at most", 1.0, ((1, 9.0),), "holds", ""),
    ],
)
def test_the_verdict_follows_from_figures(
    goal: str, ours: float, points: tuple[tuple[float | str, float], ...], word: str, detail: str
) -> None:
    claim = Claim(id="S0.1", says="", figure=2.0, goal=goal, unit="×")  # type: ignore[arg-type]
    found = judge(claim, Shown(ours=ours, baseline="", sweep=Sweep(over="cards", points=points)))
    assert (found.word, found.detail) == (word, detail)


def test_all_to_all_gains_what_stays_in_the_node() -> None:
    shown = fabrics.hybrid_exchange(Setting())
    for cards, gain in shown.sweep.points:
        bound = (int(cards) - 1) / (int(cards) - 8) - 1  # the network cards carry n − 8 of n − 1 parts
        assert 0.9 * bound < gain < bound + 1e-6


def test_a_spanning_tree_of_a_fat_tree_uses_one_of_its_spines() -> None:
    shown = fabrics.over_tree(Setting())
    assert dict(shown.sweep.points)["fat tree 8×4, 4 spines"] == pytest.approx(4, rel=0.02)
    assert dict(shown.sweep.points)["fat tree 8×4, 2 spines"] == pytest.approx(2, rel=0.02)


def test_four_dims_of_links_beat_one_port_by_what_they_carry() -> None:
    # Six links of 50 GB/s against one port: no more than sixfold, and short messages gain less.
    figures = [figure for _, figure in fabrics.wide_supernode(Setting()).sweep.points]
    assert figures == sorted(figures)
    assert 3.5 < figures[-1] < 6


def test_a_percentage_keeps_its_unit() -> None:
    claim = Claim(id="S0.1", says="", figure=1, goal="at least", unit="%")
    assert [claim.words(figure) for figure in (0.05, 1.75, 12.3)] == ["5%", "175%", "1,230%"]


def test_the_plain_share_is_what_it_should_be() -> None:
    # A job in which communication takes a larger part before has a larger part after.
    figures = [figure for _, figure in fabrics.communication_share(Setting()).sweep.points]
    assert figures == sorted(figures)
    assert 0 < figures[0] < figures[-1] < 0.6


def test_the_models_have_the_sizes_they_are_named_for() -> None:
    assert float(trillion().parameters) == pytest.approx(1.008e12, rel=0.01)  # arXiv:2104.04473, table 1
    assert float(mixture().parameters) == pytest.approx(1.75e12, rel=0.02)


def test_unknown_claims_are_named() -> None:
    assert chosen(["s3", "S9.1", "S3.2"]) == ["S3.1", "S3.2", "S3.3", "S3.4", "S3.5", "S9.1"]
    with pytest.raises(SpecError, match="no claim 'S4'"):
        chosen(["S4"])
