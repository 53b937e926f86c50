"""How does a report draw? Three kinds of chart as inline SVG: lines over steps, paired bars, one stacked bar.

Colours are the page's CSS variables, so that one drawing serves light and dark; whatever a colour says, a dash pattern,
an outline or a label says too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from supernode.simulation.timeline import nice_ticks

WIDTH = 840
_LEFT, _RIGHT, _TOP = 64, 96, 16
_PLOT = WIDTH - _LEFT - _RIGHT
_PLOT_HEIGHT = 240
# More points than pixels show nothing more; two are drawn of each bucket.
MOST_POINTS = 600
Show = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a chart.

    Attributes:
        points: y by x; y that is not finite leaves a gap.
        style: CSS class of the line, which sets colour and dashes.
        dots: draw each point, for few of them.
    """

    name: str
    points: Mapping[int, float]
    style: str
    dots: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    desc: str,
    x_name: str,
    y_name: str,
    level: tuple[str, float] | None = None,
    marks: Sequence[int] = (),
) -> str:
    """Return lines over a common x, the last point of each labelled.

    Args:
        level: name and height of a horizontal line to compare with.
        marks: places on x with a vertical line and a triangle.
    """
    finite = [y for one in series for y in one.points.values() if math.isfinite(y)]
    heights = finite + ([level[1]] if level else [])
    steps = [x for one in series for x in one.points]
    low, high = _limits(heights)
    right = max(steps, default=1)
    x = _scale(0, right, _LEFT, _LEFT + _PLOT)
    y = _scale(low, high, _TOP + _PLOT_HEIGHT, _TOP)
    parts = [*_grid(low, high, y), *_steps_axis(right, x), *_axis_names(x_name, y_name), *_marks(marks, x)]
    labels: list[tuple[float, str]] = []
    if level:
        parts.append(f'<path class="level" d="M{_LEFT} {y(level[1]):.1f}h{_PLOT}"/>')
        labels.append((y(level[1]), level[0]))
    for one in series:
        parts += _line(one, x, y)
        ends = [value for value in one.points.values() if math.isfinite(value)]
        if ends:
            labels.append((y(ends[-1]), one.name))
    return _svg(parts + _side_labels(labels), height=_TOP + _PLOT_HEIGHT + 44, title=title, desc=desc)


def paired_bars(
    rows: Sequence[tuple[str, float | None, float | None]], *, names: tuple[str, str], title: str, desc: str, show: Show
) -> str:
    """Return two bars for each row: the first outlined, the second filled; None is said in words."""
    top = max((value for _, *pair in rows for value in pair if value is not None), default=0.0) or 1.0
    left, row = 190, 46
    x = _scale(0, top, 0, WIDTH - left - _RIGHT)
    parts, height = [], len(rows) * row
    for tick in nice_ticks(top, most=5):
        at = left + x(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} 0V{height}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height + 16}" text-anchor="middle">{escape(show(tick))}</text>')
    for index, (name, *pair) in enumerate(rows):
        y = index * row
        parts.append(f'<text x="{left - 10}" y="{y + 26}" text-anchor="end">{escape(name)}</text>')
        for style, value, down in zip(("hollow", "solid"), pair, (4, 22), strict=True):
            length = x(value) if value is not None else 0.0
            if value is not None:
                parts.append(
                    f'<rect class="{style}" x="{left}" y="{y + down}" width="{max(length, 1):.1f}" height="15"/>'
                )
            text = show(value) if value is not None else "not known"
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + down + 12}">{escape(text)}</text>')
    for style, name, at in zip(("hollow", "solid"), names, (left, left + 130), strict=True):
        parts.append(f'<rect class="{style}" x="{at}" y="{height + 28}" width="14" height="12"/>')
        parts.append(f'<text x="{at + 20}" y="{height + 39}">{escape(name)}</text>')
    return _svg(parts, height=height + 46, title=title, desc=desc)


def stacked_bar(parts: Sequence[tuple[str, float]], *, title: str, desc: str, show: Show) -> str:
    """Return one bar cut into parts, numbered from 1 in the order given; parts of nothing are left out."""
    whole = sum(value for _, value in parts) or 1.0
    drawn, x = [], 0.0
    for index, (name, value) in enumerate(parts):
        width = WIDTH * value / whole
        if value > 0:
            tip = escape(f"{index + 1}: {name}, {show(value)}, {value / whole:.0%}")
            box = f'<rect class="part p{index + 1}" x="{x:.1f}" y="2" width="{width:.1f}" height="36">'
            drawn.append(f"{box}<title>{tip}</title></rect>")
            if width > 14:
                drawn.append(f'<text class="on" x="{x + width / 2:.1f}" y="25" text-anchor="middle">{index + 1}</text>')
        x += width
    return _svg(drawn, height=40, title=title, desc=desc)


def thinned(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the points in order of x; of many, the lowest and the highest of each bucket, so that no spike is lost."""
    ordered = sorted(points.items())
    if len(ordered) <= MOST_POINTS:
        return ordered
    size = -(-2 * len(ordered) // MOST_POINTS)
    kept: set[tuple[int, float]] = {ordered[0], ordered[-1]}
    for first in range(0, len(ordered), size):
        bucket = ordered[first : first + size]
        finite = [point for point in bucket if math.isfinite(point[1])]
        if finite:
            kept |= {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        kept |= {point for point in bucket if not math.isfinite(point[1])}
    return sorted(kept)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return where an axis begins and ends: at 0 unless that would flatten everything."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if 0 <= low <= high / 2:
        return 0.0, high * 1.05 or 1.0
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _grid(low: float, high: float, y: Callable[[float], float]) -> list[str]:
    return [
        f'<path class="grid" d="M{_LEFT} {y(tick):.1f}h{_PLOT}"/>'
        f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in nice_ticks(high, bottom=low)
    ]


def _steps_axis(right: int, x: Callable[[float], float]) -> list[str]:
    bottom = _TOP + _PLOT_HEIGHT
    return [
        f'<path class="grid" d="M{x(tick):.1f} {bottom}v5"/>'
        f'<text x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,.0f}</text>'
        for tick in nice_ticks(right, most=8)
        if tick == round(tick)
    ]


def _axis_names(x_name: str, y_name: str) -> list[str]:
    middle = _TOP + _PLOT_HEIGHT / 2
    return [
        f'<text x="{_LEFT + _PLOT / 2}" y="{_TOP + _PLOT_HEIGHT + 36}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>',
    ]


def _marks(marks: Sequence[int], x: Callable[[float], float]) -> list[str]:
    return [
        f'<path class="mark" d="M{x(mark):.1f} {_TOP}V{_TOP + _PLOT_HEIGHT}"/>'
        f'<path class="flag" d="M{x(mark):.1f} {_TOP + 8}l-5 -9h10z"><title>recovered at step {mark}</title></path>'
        for mark in marks
    ]


def _line(one: Series, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    path, pen = [], "M"
    dots = []
    for step, value in thinned(one.points):
        if not math.isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{x(step):.1f} {y(value):.1f}")
        pen = "L"
        if one.dots:
            dots.append(f'<circle class="{one.style}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5"/>')
    return [f'<path class="line {one.style}" d="{"".join(path)}"/>', *dots] if path else []


def _side_labels(labels: Sequence[tuple[float, str]]) -> list[str]:
    """Return the names of lines beside their ends, moved down where they would cover each other."""
    drawn, free = [], 0.0
    for y, name in sorted(labels):
        free = max(y + 4, free)
        drawn.append(f'<text x="{_LEFT + _PLOT + 6}" y="{free:.1f}">{escape(name)}</text>')
        free += 14
    return drawn


def _svg(parts: Sequence[str], *, height: int, title: str, desc: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return f"{head}<title>{escape(title)}</title><desc>{escape(desc)}</desc>{''.join(parts)}</svg>"
