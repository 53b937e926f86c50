"""What does a machine's availability look like? A page with charts, and the same figures as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from supernode.errors import MachineError
from supernode.files import write_all
from supernode.pages.chart import WIDTH, Series, line_chart
from supernode.pages.page import PAGE, STYLE
from supernode.reliability.answer import Availability, plain
from supernode.reliability.service import AVAILABILITY, MTBF, Service
from supernode.units import show_seconds

_LEFT, _ROW = 260, 24
HOUR = 3600.0


def write_availability(folder: Path, found: Availability) -> tuple[Path, ...]:
    """Write `availability.html`, `availability.svg` and `availability.json`; returns their paths.

    Raises:
        MachineError: the folder cannot be written.
    """
    one = found.service
    ladder = hours_bars([(name, each.outages.mtbf / HOUR) for name, each in found.ladder.items()])
    levers = hours_bars([(name, each.outages.mtbf / HOUR) for name, each in found.levers.items()])
    kept = {round(interval): 100 * share for interval, share in found.intervals if math.isfinite(interval)}
    curve = line_chart(
        [Series(name="goodput", points=kept, style="s1", dots=True)], title="Goodput by interval",
        desc="Part of the time that goes into steps that are kept, by seconds between checkpoints on disk.",
        x_name="seconds between checkpoints on disk", y_name="% of the time",
    )  # fmt: skip
    figures = {
        "a part fails every": show_seconds(1 / one.parts.failures),
        "work is interrupted every": show_seconds(1 / one.interruptions),
        "an outage every": f"{one.outages.mtbf / HOUR:,.0f} h",
        "available": f"{one.availability:.4%}",
        "goodput while it is up": f"{found.goodput:.2%}",
    }
    body = "".join([
        f"<header><h1>Availability of {escape(one.machine)}</h1>"
        f"<p>{one.cards:,} cards; {escape(one.redundancy.words)}. "
        f"Claimed: {MTBF / HOUR:,.0f} h between failures, {AVAILABILITY:.3%} available.</p>",
        "<dl>", *(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures.items()),
        "</dl></header><h2>Hours between outages, by redundancy</h2><figure>", ladder,
        "<figcaption>On a scale of tens; filled where the claim is met. In an outage no restart helps: too few cards, "
        "no power, cooling or control, or people are needed.</figcaption></figure>"
        "<h2>One change at a time</h2><figure>", levers,
        "</figure><h2>Where the interval of checkpoints is best</h2><figure>", curve, "</figure><h2>Figures</h2>"
        "<div class='wide'>", _table(found), "</div>",
    ])  # fmt: skip
    page = PAGE.format(title=f"Availability of {escape(one.machine)}", style=STYLE, body=body)
    alone = ladder.replace("<title>", f"<style>{STYLE}</style><title>", 1)
    texts = {
        "availability.html": page,
        "availability.svg": alone,
        "availability.json": json.dumps(plain(found), indent=1),
    }
    paths = {folder / name: text for name, text in texts.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_all(paths)
    except OSError as error:
        raise MachineError(
            f"cannot write in {folder}: {os.strerror(error.errno or 0)}", hint="choose another `--out`."
        ) from error
    return tuple(paths)


def hours_bars(rows: Sequence[tuple[str, float]]) -> str:
    """Return a bar for each row on a logarithmic scale, a line where the claim stands, those filled that reach it."""
    claimed = MTBF / HOUR
    finite = [hours for _, hours in rows if math.isfinite(hours) and hours > 0]
    low = math.floor(math.log10(min([*finite, claimed])))
    high = math.ceil(math.log10(max([*finite, claimed])))
    wide, bottom = WIDTH - _LEFT - 110, _ROW * (len(rows) + 1)

    def x(hours: float) -> float:
        place = (math.log10(hours) - low) / max(1, high - low) if hours > 0 else 0.0
        return _LEFT + wide * min(1.0, max(0.0, place))

    drawn = []
    for power in range(low, high + 1):
        at = x(10.0**power)
        drawn.append(f'<path class="grid" d="M{at:.1f} {_ROW - 4}V{bottom}"/>')
    for place, (name, hours) in enumerate(rows, start=1):
        y, end = place * _ROW, x(hours) if math.isfinite(hours) else _LEFT + wide
        style = "solid" if hours >= claimed else "hollow"
        text = f"{hours:,.0f} h" if math.isfinite(hours) else "never"
        drawn += [
            f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{style}" x="{_LEFT}" y="{y + 3}" width="{max(1.0, end - _LEFT):.1f}" height="{_ROW - 8}"/>',
            f'<text x="{end + 6:.1f}" y="{y + 15}">{text}</text>',
        ]
    line = x(claimed)
    drawn.append(f'<path class="mark" d="M{line:.1f} {_ROW - 4}V{bottom}"/>')
    drawn.append(f'<text x="{line:.1f}" y="16" text-anchor="middle">claimed {claimed:,.0f} h</text>')
    desc = escape("; ".join(f"{name}: {hours:,.0f} h" for name, hours in rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 4}" role="img">'
        f"<title>Hours between outages</title><desc>{desc}</desc>{''.join(drawn)}</svg>"
    )


def _table(found: Availability) -> str:
    head = ("", "interrupted every", "outage every", "an outage takes", "available")
    rows = [*found.ladder.items(), *found.levers.items()]
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in (name, *cells(each)))}</tr>" for name, each in rows
    )
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{lines}</table>"


def cells(one: Service) -> tuple[str, ...]:
    """Return the figures of a row as words."""
    return (
        f"{1 / one.interruptions / HOUR:,.0f} h", f"{one.outages.mtbf / HOUR:,.0f} h", show_seconds(one.outages.outage),
        f"{one.availability:.4%}",
    )  # fmt: skip
