"""How is a simulated step shown? As a drawing of its ranks over time, and as a trace for Perfetto."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from supernode.simulation.events.span import Span
from supernode.units import show_seconds

_COLOURS = {
    "forward": "#4477aa", "backward": "#228833", "weights": "#117733", "tensor": "#ee6677", "context": "#ee8866",
    "expert": "#cc6677", "send": "#bbbbbb", "data": "#ccbb44", "optimizer": "#aa3377", "overhead": "#66ccee",
}  # fmt: skip
"""Paul Tol's "bright" and "muted" schemes, told apart with any colour vision; letters and places say the same."""
_WIDTH, _ROW, _LEFT, _TOP = 960, 28, 60, 8
_THIN = {"tensor": 0, "context": 0, "expert": 0, "send": 1, "data": 2}
"""Kinds that are drawn as thin bars, and in which line of them."""
# Pixels of a digit or letter of a label; a box without room for all of it has none.
_LETTER = 7
STYLE = "<style>svg{color:#1a1a1a}@media(prefers-color-scheme:dark){svg{color:#e6e6e6}}</style>"
"""Words that are read on a light and on a dark ground alike."""


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

    Below each row are thin bars: what the passes above wait for, what the rank sends, and its exchanges.
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
            STYLE,
            *rows,
            *(_box(span, scale) for span in drawn),
            *_axis(total, scale, y=_TOP + ranks * _ROW),
            _legend({span.kind for span in drawn}, y=height - 8),
            "</svg>",
        ]
    )


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Return the step in Chrome's trace format: tracks of each rank for its passes, its exchanges, and each receiver.

    What waits for an axis lies within its pass. Times are microseconds, of whole nanoseconds, as Perfetto keeps them:
    else a part could end after what it lies in.
    """
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, int, str], int] = {}
    for span in sorted(spans, key=lambda span: (span.rank, span.start, -span.end)):
        start, end = round(span.start * 1e9), round(span.end * 1e9)
        track = tracks.setdefault(_track(span), len(tracks))
        events.append(
            {
                "name": _label(span), "cat": span.kind, "ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3,
                "pid": 0, "tid": track, "args": {"stage": span.stage, "micro_batch": span.micro_batch},
            }
        )  # fmt: skip
    names = []
    for place, ((_, _, name), track) in enumerate(sorted(tracks.items())):
        for key, value in (("name", name), ("sort_index", place)):
            about = {"name": f"thread_{key}", "ph": "M", "pid": 0, "tid": track, "args": {key: value}}
            names.append(about)
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def _track(span: Span) -> tuple[int, int, str]:
    """Return the rank, the place below it, and the name of the track of a span."""
    if span.kind == "send":
        return span.rank, 2 + span.to, f"rank {span.rank} sends to {span.to}"
    if span.kind == "data":
        return span.rank, 1, f"rank {span.rank} exchanges"
    return span.rank, 0, f"rank {span.rank}"


def _label(span: Span) -> str:
    if span.micro_batch < 0:
        return span.kind
    return f"{span.kind} {span.micro_batch}, stage {span.stage}"


def _box(span: Span, scale: float) -> str:
    x, width = _LEFT + span.start * scale, max((span.end - span.start) * scale, 0.2)
    y, height = _TOP + span.rank * _ROW, 20
    if span.kind in _THIN:
        y, height = y + 20 + 2 * _THIN[span.kind], 2
    letter, text, edge = span.kind[0].upper() + (str(span.micro_batch) if span.micro_batch >= 0 else ""), "", ""
    if span.kind not in _THIN:
        edge = ' stroke="#fff" stroke-width=".5"'
        if width >= _LETTER * len(letter):
            text = f'<text x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="#fff">{letter}</text>'
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{_COLOURS[span.kind]}"{edge}>'
    tip = f"{_label(span)}: {show_seconds(span.start)} to {show_seconds(span.end)}"
    return f"{box}<title>{tip}</title></rect>{text}"


def _axis(total: float, scale: float, *, y: int) -> list[str]:
    return [
        f'<path d="M{_LEFT + tick * scale:.1f} {y}v5" stroke="currentColor"/>'
        f'<text x="{_LEFT + tick * scale:.1f}" y="{y + 17}" text-anchor="middle">{show_seconds(tick)}</text>'
        for tick in nice_ticks(total, most=8)
    ]


def _legend(kinds: Collection[str], *, y: int) -> str:
    shown = [kind for kind in _COLOURS if kind in kinds]
    return "".join(
        f'<rect x="{_LEFT + 88 * i}" y="{y - 10}" width="11" height="11" fill="{_COLOURS[kind]}"/>'
        f'<text x="{_LEFT + 88 * i + 15}" y="{y}">{kind}</text>'
        for i, kind in enumerate(shown)
    )
