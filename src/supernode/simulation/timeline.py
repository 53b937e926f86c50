"""How is a simulated step shown? As a drawing of its ranks over time, and as a trace for Perfetto."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from supernode.simulation.step import Span
from supernode.units import show_seconds

_COLOURS = {
    "forward": "#4477aa", "backward": "#228833", "send": "#bbbbbb",
    "data": "#ccbb44", "optimizer": "#aa3377", "overhead": "#66ccee",
}  # fmt: skip
"""Paul Tol's "bright" scheme, told apart with any colour vision; the letter in each box says the same."""
_WIDTH, _ROW, _LEFT, _TOP = 960, 28, 60, 8
# Below this width in pixels a box has no room for its label.
_LABEL_WIDTH = 14


def nice_ticks(top: float, *, bottom: float = 0.0, most: int = 6) -> list[float]:
    """Return round numbers from `bottom` to `top`, at most `most` of them; `bottom` alone where nothing is between.

    >>> nice_ticks(0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    span = top - bottom
    if not span > 0 or not math.isfinite(span):
        return [bottom]
    raw = span / max(1, most - 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * unit for factor in (1, 2, 5) if factor * unit >= raw * (1 - 1e-9)), 10 * unit)
    digits = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(bottom / step - 1e-9), math.floor(top / step + 1e-9)
    return [round(index * step, digits) for index in range(first, last + 1)]


def timeline_svg(spans: Iterable[Span]) -> str:
    """Return the step as one SVG picture: a row per pipeline rank, a box per pass, F and B with the micro-batch.

    Transfers are thin bars below the row of their sender.
    """
    drawn = list(spans)
    ranks = 1 + max((span.rank for span in drawn), default=0)
    total = max((span.end for span in drawn), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 10) / total
    height = _TOP + ranks * _ROW + 48
    rows = [
        f'<text x="{_LEFT - 8}" y="{_TOP + rank * _ROW + 15}" text-anchor="end">rank {rank}</text>'
        for rank in range(ranks)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
            "<title>One training step over time</title>",
            f"<desc>{len(drawn)} passes and transfers on {ranks} pipeline ranks; {show_seconds(total)} in all.</desc>",
            *rows,
            *(_box(span, scale) for span in drawn),
            *_axis(total, scale, y=_TOP + ranks * _ROW),
            _legend({span.kind for span in drawn}, y=height - 8),
            "</svg>",
        ]
    )


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Return the step in Chrome's trace format: one track per rank and one for what it sends; times in microseconds."""
    events: list[dict[str, Any]] = []
    tracks: dict[int, str] = {}
    for span in spans:
        track = 2 * span.rank + (span.kind == "send")
        tracks[track] = f"rank {span.rank}" + (" sends" if span.kind == "send" else "")
        events.append(
            {
                "name": _label(span),
                "cat": span.kind,
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "pid": 0,
                "tid": track,
                "args": {"stage": span.stage, "micro_batch": span.micro_batch},
            }
        )
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
        for track, name in sorted(tracks.items())
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def _label(span: Span) -> str:
    if span.micro_batch < 0:
        return span.kind
    return f"{span.kind} {span.micro_batch}, stage {span.stage}"


def _box(span: Span, scale: float) -> str:
    x, width = _LEFT + span.start * scale, max((span.end - span.start) * scale, 0.2)
    y, height = _TOP + span.rank * _ROW, 20
    if span.kind == "send":
        y, height = y + 21, 3
    text = ""
    if span.kind != "send" and width >= _LABEL_WIDTH:
        letter = span.kind[0].upper() + (str(span.micro_batch) if span.micro_batch >= 0 else "")
        text = f'<text x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="#fff">{letter}</text>'
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{_COLOURS[span.kind]}" stroke="#fff"'
    tip = f"{_label(span)}: {show_seconds(span.start)} to {show_seconds(span.end)}"
    return f'{box} stroke-width=".5"><title>{tip}</title></rect>{text}'


def _axis(total: float, scale: float, *, y: int) -> list[str]:
    return [
        f'<path d="M{_LEFT + tick * scale:.1f} {y}v5" stroke="currentColor"/>'
        f'<text x="{_LEFT + tick * scale:.1f}" y="{y + 17}" text-anchor="middle">{show_seconds(tick)}</text>'
        for tick in nice_ticks(total, most=8)
    ]


def _legend(kinds: Collection[str], *, y: int) -> str:
    shown = [kind for kind in _COLOURS if kind in kinds]
    return "".join(
        f'<rect x="{_LEFT + 110 * i}" y="{y - 10}" width="11" height="11" fill="{_COLOURS[kind]}"/>'
        f'<text x="{_LEFT + 110 * i + 16}" y="{y}">{kind}</text>'
        for i, kind in enumerate(shown)
    )
