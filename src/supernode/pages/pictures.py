"""What do a search, a comparison and a project look like? Pages with charts, and the same figures as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from supernode.advice import answer, tell
from supernode.advice.compare import Comparison, verdict
from supernode.advice.project import Project
from supernode.advice.question import Question
from supernode.errors import MachineError
from supernode.files import write_all
from supernode.pages.chart import WIDTH, stacked_bar
from supernode.pages.page import PAGE, STYLE
from supernode.search.best import Plans, figures, words
from supernode.search.search import Choice
from supernode.simulation.timeline import nice_ticks
from supernode.units import show_bytes, show_seconds

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 320, 90, 24, 14, 48


def write_search(folder: Path, question: Question, plans: Plans) -> tuple[Path, ...]:
    """Write `search.html`, `front.svg` and `search.json`; returns their paths.

    Raises:
        MachineError: the folder cannot be written.
    """
    front = front_svg(plans.found.front)
    reason = plans.reasons[0]
    parts = [(name, seconds) for name, seconds in reason.parts.items() if seconds > 0]
    bar = stacked_bar(parts, title="Plan 1", desc="Where the time of a step goes.", show=show_seconds)
    body = "".join([
        f"<header><h1>Plans for {escape(question.name)}</h1></header>",
        "<h2>Front</h2><figure>", front, f"<figcaption>No plan beats these in {answer.measures(plans)} at once; the "
        "fastest is filled, and larger dots take more energy.</figcaption></figure>",
        "<h2>Where the time of plan 1 goes</h2><figure>", bar, "</figure>", _legend(parts),
        "<h2>Plans</h2>", _table(list(answer.rows(question, plans))),
    ])  # fmt: skip
    page = PAGE.format(title=f"Plans for {escape(question.name)}", style=STYLE, body=body)
    said = json.dumps(answer.as_plain(question, plans), indent=1)
    return _write(folder, {"search.html": page, "front.svg": _alone(front), "search.json": said})


def write_comparison(folder: Path, comparison: Comparison) -> tuple[Path, ...]:
    """Write `compare.html`, `compare.svg` and `compare.json`; returns their paths."""
    able = [comparison.entries[place] for place in comparison.ranking]
    rows = [(entry.machine.name, entry.project.seconds) for entry in able if entry.project is not None]
    bars = spread_bars([(name, each.low / 86_400, each.middle / 86_400, each.high / 86_400) for name, each in rows])
    columns, lines = tell.comparison_table(comparison)
    body = "".join([
        f"<header><h1>Machines for {escape(comparison.question.name)}</h1>",
        f"<p>{escape(verdict(comparison))}</p></header>",
        "<h2>Days</h2><figure>", bars, "<figcaption>Middle, and what four of five projects would lie within."
        "</figcaption></figure><h2>Side by side</h2><div class='wide'>", _grid(columns, lines), "</div>",
    ])  # fmt: skip
    page = PAGE.format(title=f"Machines for {escape(comparison.question.name)}", style=STYLE, body=body)
    said = json.dumps(tell.comparison_plain(comparison), indent=1)
    return _write(folder, {"compare.html": page, "compare.svg": _alone(bars), "compare.json": said})


def write_project(folder: Path, project: Project) -> tuple[Path, ...]:
    """Write `project.html` and `project.json`; returns their paths."""
    times = project.seconds
    bars = spread_bars([(project.machine.name, times.low / 86_400, times.middle / 86_400, times.high / 86_400)])
    title = f"Forecast of {escape(project.question.name)}"
    body = "".join([
        f"<header><h1>{title}</h1></header><h2>Days</h2><figure>", bars, "</figure><h2>Figures</h2>",
        _table(tell.project_rows(project)),
    ])  # fmt: skip
    page = PAGE.format(title=title, style=STYLE, body=body)
    return _write(folder, {"project.html": page, "project.json": json.dumps(tell.project_plain(project), indent=1)})


def front_svg(front: Sequence[Choice]) -> str:
    """Return the plans of a front as dots: time across, memory up, the size by energy; each says what it is."""
    times, sizes = [choice.time for choice in front], [choice.memory for choice in front]
    x = _log_scale(min(times), max(times), _LEFT, WIDTH - _RIGHT)
    y = _log_scale(min(sizes), max(sizes), _HEIGHT - _BOTTOM, _TOP)
    least = min(choice.energy for choice in front)
    parts = [*_log_ticks(min(times), max(times), x, is_x=True), *_log_ticks(min(sizes), max(sizes), y, is_x=False)]
    for choice in front:
        radius = min(12.0, 3.5 * math.sqrt(choice.energy / least))
        tip = escape(f"{words(choice)}: {figures(choice)}")
        style = "solid" if choice.time == min(times) else "hollow"
        parts.append(
            f'<circle class="{style}" cx="{x(choice.time):.1f}" cy="{y(choice.memory):.1f}" r="{radius:.1f}">'
            f"<title>{tip}</title></circle>"
        )
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">time of a step</text>')
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">memory of a card</text>')
    return _svg(parts, _HEIGHT, title="Front", desc="Time of a step against memory of a card; larger dots take more "
                                                    "energy.")  # fmt: skip


def spread_bars(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Return a bar of the middle for each (name, low, middle, high), with a line from low to high."""
    top = max((high for *_, high in rows), default=1.0) or 1.0
    left, row, height = 210, 40, 40 * len(rows)
    scale = (WIDTH - left - 90) / top
    parts = []
    for tick in nice_ticks(top, most=6):
        parts.append(f'<path class="grid" d="M{left + tick * scale:.1f} 0V{height}"/>')
        parts.append(f'<text x="{left + tick * scale:.1f}" y="{height + 16}" text-anchor="middle">{tick:,g}</text>')
    for place, (name, low, middle, high) in enumerate(rows):
        y = place * row + 10
        parts += [
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="solid" x="{left}" y="{y}" width="{max(1.0, middle * scale):.1f}" height="20"/>',
            f'<path class="line s2" d="M{left + low * scale:.1f} {y + 10}H{left + high * scale:.1f}"/>',
            f'<text x="{left + high * scale + 8:.1f}" y="{y + 15}">{middle:,.3g} d</text>',
        ]
    return _svg(parts, height + 26, title="Days", desc="Middle of each, and where four of five lie.")


def _log_scale(low: float, high: float, start: float, end: float) -> Any:
    span = math.log(max(high / low, 1.0001))
    return lambda value: start + math.log(value / low) / span * (end - start)


def _log_ticks(low: float, high: float, scale: Any, *, is_x: bool) -> list[str]:
    """Return grid lines at both ends and, evenly in the logarithm, at three places between."""
    drawn = []
    for place in range(5):
        value = low * (high / low) ** (place / 4)
        at = scale(value)
        said = escape(show_seconds(value) if is_x else show_bytes(value))
        if is_x:
            anchor = "end" if place == 4 else "middle"
            drawn.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
            drawn.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="{anchor}">{said}</text>')
        else:
            drawn.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>')
            drawn.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{said}</text>')
        if high <= low:
            break
    return drawn


def _svg(parts: Sequence[str], height: int, *, title: str, desc: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return f"{head}<title>{escape(title)}</title><desc>{escape(desc)}</desc>{''.join(parts)}</svg>"


def _alone(svg: str) -> str:
    """Return a drawing with its own style sheet, so that it stands without the page."""
    return svg.replace("<desc>", f"<style>{STYLE}</style><desc>", 1)


def _legend(parts: Sequence[tuple[str, float]]) -> str:
    whole = sum(seconds for _, seconds in parts)
    items = "".join(
        f"<li>{escape(name)}: {show_seconds(seconds)}, {seconds / whole:.1%}</li>" for name, seconds in parts
    )
    return f"<ol>{items}</ol>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = [
        f"<tr><th style='white-space: nowrap'>{escape(name)}</th><td>{escape(value).replace(chr(10), '<br>')}</td></tr>"
        for name, value in rows
    ]
    return f"<table>{''.join(lines)}</table>"


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = "".join(
        f"<tr><th style='white-space: nowrap'>{escape(row[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{lines}</table>"


def _write(folder: Path, files: Mapping[str, str]) -> tuple[Path, ...]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_all({folder / name: text for name, text in files.items()})
    except OSError as error:
        raise MachineError(
            f"cannot write in {folder}: {os.strerror(error.errno or 0)}", hint="choose another `--out`."
        ) from error
    return tuple(folder / name for name in files)
