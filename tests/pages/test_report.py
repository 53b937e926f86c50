"""A report adds up, can be read by machines and people, and lets nothing of the user's through as markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from supernode.hardware.assemble import build_machine
from supernode.pages.chart import MOST_POINTS, Series, line_chart, paired_bars, stacked_bar, thinned
from supernode.pages.report import make_report, recoveries, report_html, report_json
from supernode.planning.planner import make_plan
from supernode.schema.job import JobSpec
from supernode.schema.report import Incident, RunState

PLAN = make_plan(JobSpec(name="demo", steps=100), build_machine(card_count=2, card="H100"))
STATE = RunState(
    plan=PLAN,
    outcome="finished",
    step=100,
    losses={step: 5.0 / (1 + step / 20) for step in range(1, 101)},
    held_out={50: 1.9, 100: 1.2},
    step_seconds={step: 0.5 if step < 100 else 3.0 for step in range(1, 101)},
    parts={"compute": 0.4, "sync": 0.05, "wait": 0.02, "optimizer": 0.02, "data": 0.01},
    repeats=((41, True), (42, True), (43, False)),
    failures=1,
    saves=2,
    spent_tokens=PLAN.tokens_per_step * 100 + 7,
    spent_seconds=54.0,
    repeat_seconds=1.5,
    save_seconds=4.0,
    evaluate_seconds=2.0,
    launch_seconds=10.0,
    notes={"bigram_loss": 2.5, "sample": "def f():\n    return 1"},
    incidents=(Incident(time=0, what="started"), Incident(time=30, what="rank 1 lost", detail="killed")),
    started=1000.0,
    updated=1080.0,
)
EVIL = "<script>alert('1')</script>&\"<img src=http://x.y/z>"


class Page(HTMLParser):
    """Collects what a browser would see; complains of tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(state: RunState) -> Page:
    return Page(report_html(make_report(state), state))


def test_the_wall_time_adds_up() -> None:
    report = make_report(STATE)

    # 80 s in all: 54 in steps, of which 1.5 repeated, 10 starting, 4 saving, 2 evaluating; 10 are left over.
    assert report.wall == {
        "steps": 52.5,
        "repeated steps": 1.5,
        "starting": 10.0,
        "saving": 4.0,
        "evaluating": 2.0,
        "other": 10.0,
    }
    assert sum(report.wall.values()) == STATE.updated - STATE.started


def test_the_median_step_is_not_moved_by_one_slow_step() -> None:
    report = make_report(STATE)

    assert report.measured["total"] == 0.5
    assert report.measured["compute"] == 0.4


def test_speed_counts_the_steps_alone_repeats_included() -> None:
    assert make_report(STATE).tokens_per_second == pytest.approx((PLAN.tokens_per_step * 100 + 7) / 54.0)


def test_predicted_parts_add_up_to_the_predicted_step() -> None:
    predicted = dict(make_report(STATE).predicted)

    assert predicted.pop("total") == pytest.approx(sum(predicted.values()))


def test_repeats_are_counted_with_those_that_gave_the_same_loss() -> None:
    report = make_report(STATE)

    assert (report.repeats, report.repeats_identical, report.failures) == (3, 2, 1)


def test_each_row_of_repeats_is_one_recovery() -> None:
    state = replace(STATE, repeats=((41, True), (42, True), (41, True), (42, True), (60, True)))

    assert recoveries(state) == (41, 41, 60)


def test_a_run_that_has_not_stepped_has_a_report() -> None:
    fresh = RunState(plan=PLAN, started=5.0, updated=6.0)

    report = make_report(fresh)

    assert (report.loss, report.tokens_per_second, report.measured) == (None, None, {})
    assert "No step is done yet." in page(fresh).text


def test_json_is_plain_and_has_null_for_what_is_not_finite() -> None:
    diverged = replace(STATE, losses={1: 5.0, 2: float("nan"), 3: float("inf")})

    plain = report_json(make_report(diverged))

    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["losses"] == {"1": 5.0, "2": None, "3": None}
    assert plain["loss"] is None
    assert plain["incidents"][1] == {"time": 30, "what": "rank 1 lost", "detail": "killed"}


def test_the_page_says_what_happened() -> None:
    text = page(STATE).text

    for words in ("demo", "finished", "2 of 3", "rank 1 lost", "return 1", "bigram", "52.5 s", "65.6%"):
        assert words in text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = report_html(make_report(STATE), STATE)

    outside = [url for url in re.findall(r"https?://[^\s\"'<]+", text) if url != "http://www.w3.org/2000/svg"]
    assert outside == []
    assert not {"script", "link", "img", "iframe"} & set(page(STATE).tags)
    assert "prefers-color-scheme: dark" in text


def test_every_drawing_has_a_title_a_description_and_a_caption() -> None:
    tags = page(STATE).tags

    assert tags.count("svg") == 3
    assert tags.count("desc") == 3
    assert tags.count("figcaption") == 3


def test_nothing_of_the_users_becomes_markup() -> None:
    evil = replace(
        STATE,
        plan=replace(PLAN, machine=EVIL, notes=(EVIL,)),
        message=EVIL,
        hint=EVIL,
        notes={"sample": EVIL, "bigram_loss": EVIL},
        incidents=(Incident(time=1, what=EVIL, detail=EVIL),),
    )

    seen = page(evil)

    assert not {"script", "img"} & set(seen.tags)
    assert all("alert" not in (value or "") for _, value in seen.attributes)
    # Machine twice, note, message, hint, incident twice, sample.
    assert seen.text.count(EVIL) == 8


def test_recoveries_are_marked_in_the_curve() -> None:
    assert report_html(make_report(STATE), STATE).count('class="mark"') == 1
    assert "recovered at step 41" in page(STATE).text


def test_an_own_module_has_a_report_without_prediction() -> None:
    own = replace(STATE, plan=replace(PLAN, step=None, memory=None))

    assert make_report(own).predicted == {}
    assert "not known" in page(own).text


def test_of_many_points_no_spike_is_lost() -> None:
    points = dict.fromkeys(range(100000), 1.0) | {50_001: 99.0, 70_000: -5.0}

    kept = thinned(points)

    assert len(kept) <= MOST_POINTS + 2
    assert (50_001, 99.0) in kept
    assert (70_000, -5.0) in kept
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    "points", [{1: 0.0}, {1: 0.0, 2: 0.0}, {1: float("nan")}, {1: 7.0, 2: 7.0}, {1: -3.0, 2: -4.0}, {}]
)
def test_strange_curves_are_drawn_with_finite_numbers(points: dict[int, float]) -> None:
    drawing = line_chart(
        [Series(name="loss", points=points, style="s1")], title="t", desc="d", x_name="step", y_name="loss"
    )

    assert "nan" not in drawing
    assert "inf" not in drawing


def test_a_gap_stays_a_gap() -> None:
    series = Series(name="loss", points={1: 3.0, 2: 2.0, 3: float("nan"), 4: 2.0, 5: 1.0}, style="s1")

    drawing = line_chart([series], title="t", desc="d", x_name="step", y_name="loss")

    path = re.search(r'class="line s1" d="([^"]+)"', drawing)
    assert path is not None
    assert path[1].count("M") == 2


def test_twice_the_time_is_twice_the_bar() -> None:
    drawing = paired_bars([("step", 1.0, 2.0)], names=("a", "b"), title="t", desc="d", show=str)

    one, two = (float(width) for width in re.findall(r'width="([\d.]+)" height="15"', drawing))
    assert two == pytest.approx(2 * one, abs=0.2)


def test_the_stacked_bar_fills_its_width_and_skips_nothing_parts() -> None:
    drawing = stacked_bar([("a", 1.0), ("b", 0.0), ("c", 3.0)], title="t", desc="d", show=str)

    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="36"', drawing)]
    assert widths == [210.0, 630.0]
