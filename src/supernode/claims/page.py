"""How is the table of claims shown? A page with a picture for each, and plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from supernode.claims.claim import Claim, Entry
from supernode.pages.page import PAGE, STYLE

_LEFT, _ROW, _WIDTH = 250, 24, 840
_MARKS = {"holds": "✓", "holds under": "~", "does not hold": "✗"}


def plain(entry: Entry) -> dict[str, Any]:
    """Return a row as JSON values."""
    claim, shown, verdict = entry.claim, entry.shown, entry.verdict
    return {
        "id": claim.id, "claim": claim.says, "claimed": claim.figure, "goal": claim.goal, "unit": claim.unit,
        "ours": shown.ours, "how": shown.how, "by": shown.by, "baseline": shown.baseline,
        "assumptions": list(shown.assumptions),
        "sweep": {"over": shown.sweep.over, "points": [list(point) for point in shown.sweep.points]},
        "verdict": verdict.word, "detail": verdict.detail,
    }  # fmt: skip


def page(entries: Sequence[Entry]) -> str:
    """Return the claims as one HTML page that loads nothing."""
    held = sum(entry.verdict.word == "holds" for entry in entries)
    body = [
        "<header><h1>What is claimed, and what holds</h1>",
        f"<p>{held} of {len(entries)} hold as assumed. Every figure was computed for this page.</p></header>",
        *(_section(entry) for entry in entries),
    ]
    return PAGE.format(title="Claims", style=STYLE, body="\n".join(body))


def _section(entry: Entry) -> str:
    claim, shown, verdict = entry.claim, entry.shown, entry.verdict
    detail = f": {escape(verdict.detail)}" if verdict.detail else ""
    figures = {
        "claimed": f"{claim.goal} {claim.words(claim.figure)}",
        "ours": claim.words(shown.ours),
        "verdict": f"{_MARKS[verdict.word]} {verdict.word}{detail}",
    }
    return "\n".join(
        [
            f"<section><h2>{escape(claim.id)} · {escape(claim.says)}</h2>",
            "<dl>",
            *(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures.items()),
            "</dl>",
            f"<figure>{bars(claim, shown.sweep.over, shown.sweep.points)}</figure>",
            f"<p>Compared with {escape(shown.baseline)}. Shown by {shown.how}: {escape(shown.by)}.</p>",
            "<ul>",
            *(f"<li>{escape(text)}</li>" for text in shown.assumptions),
            "</ul></section>",
        ]
    )


def bars(claim: Claim, over: str, points: Sequence[tuple[float | str, float]]) -> str:
    """Return a bar for each point of a sweep, those filled that meet the claim, and a line where it stands."""
    low = min(0.0, *(figure for _, figure in points))
    high = max(claim.figure, *(figure for _, figure in points)) * 1.02
    scale = (_WIDTH - _LEFT - 90) / (high - low)
    bottom = _ROW * (len(points) + 1)

    def x(figure: float) -> float:
        return _LEFT + (figure - low) * scale

    drawn = [f'<text x="{_LEFT - 10}" y="16" text-anchor="end">{escape(over)}</text>']
    for place, (at, figure) in enumerate(points, start=1):
        y = place * _ROW
        label = at if isinstance(at, str) else f"{at:,.5g}"
        left, wide = min(x(0), x(figure)), abs(x(figure) - x(0))
        style = "solid" if claim.met(figure) else "hollow"
        drawn += [
            f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(_shortened(label))}</text>',
            f'<rect class="{style}" x="{left:.1f}" y="{y + 3}" width="{max(wide, 0.5):.1f}" height="{_ROW - 8}"/>',
            f'<text x="{max(x(figure), x(0)) + 6:.1f}" y="{y + 15}">{escape(claim.words(figure))}</text>',
        ]
    line = x(claim.figure)
    drawn.append(f'<path class="mark" d="M{line:.1f} {_ROW - 4}V{bottom}"/>')
    drawn.append(f'<text x="{line:.1f}" y="16" text-anchor="middle">claimed {escape(claim.words(claim.figure))}</text>')
    title = f"{claim.id}: {claim.says}"
    desc = "; ".join(f"{at}: {claim.words(figure)}" for at, figure in points)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 4}" role="img"><title>{escape(title)}</title>'
        f"<desc>{escape(desc)}</desc>{''.join(drawn)}</svg>"
    )


def _shortened(text: str, most: int = 38) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
