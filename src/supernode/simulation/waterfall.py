"""Where does a step's time go? From what its arithmetic would take at the peak to all that it waits for, bar by bar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, pairwise

from supernode.errors import SpecError
from supernode.forecast.efficiency import CardModel
from supernode.forecast.times import step_parts
from supernode.hardware.machine import Machine
from supernode.planning.cost import at_work, software_of
from supernode.planning.memory import strategy_of
from supernode.planning.work import shape_of
from supernode.schema.plan import Plan
from supernode.search.best import Plans
from supernode.search.offload import Room
from supernode.search.search import Choice
from supernode.search.space import Space
from supernode.search.why import time_parts
from supernode.simulation.timeline import STYLE, nice_ticks
from supernode.units import show_seconds
from supernode.workload.shape import ModelShape, decoder_shape
from supernode.workload.strategy import NO_RECOMPUTE, Software, Strategies

WAITS = ("tensor", "context", "expert", "bubble", "transfer", "data", "optimizer")
REASONS = {
    "arithmetic": "all products at the card's peak, each once, spread evenly, or as many as the slowest rank has",
    "uneven stages": "the slowest pipeline rank holds more than its part",
    "recomputation": "products that the backward computes again",
    "matrix products": "what they take beyond the peak: size, shape, operands on their way",
    "attention": "likewise of its core, exponentials included",
    "memory": "operations that the memory's bandwidth binds",
    "gaps": "between one kernel and the next, and waiting for the host to count tokens",
    "launches": "waiting for the host to launch kernels",
    "tensor": "waiting for the tensor axis",
    "context": "waiting for keys and values of the context axis",
    "expert": "waiting for tokens on their way to experts and back",
    "bubble": "waiting for the pipeline to fill and drain",
    "transfer": "waiting for activations between stages",
    "data": "gradients and sharded weights that computing does not hide",
    "optimizer": "clipping and the update",
    "fixed": "around each step: loader, gradient norm, scalars, and what a host spends on axes",
    "offload": "waiting for what lies in the host's memory",
}
_WIDTH, _LEFT, _RIGHT, _ROW = 840, 130, 150, 26
# Paul Tol's "bright" scheme, as in the timeline; where a bar begins and its label say the same.
_COLOURS = {"arithmetic": "#228833", "waits": "#ee6677", "card": "#4477aa", "total": "#888888"}
_CARD = ("uneven stages", "recomputation", "matrix products", "attention", "memory", "gaps", "launches", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One part of a step.

    Attributes:
        seconds: of the step.
    """

    name: str
    seconds: float

    @property
    def reason(self) -> str:
        """What the part is, in words."""
        return REASONS[self.name]


def waterfall(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> tuple[Bar, ...]:
    """Return the parts of one strategy's step, which add up to it, in the order in which they are explained.

    The card's own part is told by making a perfect card real in one respect after the other. Where that makes the
    slowest rank another one, which computes less and waits more (the ranks with most experts, beside the one with the
    head), what came before is no more than what is left: no part is below 0, and the arithmetic is that rank's.

    Raises:
        SpecError: more than one strategy.
    """
    parts = step_parts(model, ways, card, software)
    if parts.total.size != 1:
        raise SpecError(f"a waterfall of {parts.total.size} strategies", hint="explain one at a time.")
    perfect = replace(
        card, exponentials=math.inf, fitted=replace(
            card.fitted, products=1.0, products_low=1.0, products_four=1.0, operands=0.0, scores=1.0, memory=math.inf,
            launch=0.0, tail=0.0, sync=0.0,
        ),
    )  # fmt: skip
    fitted = card.fitted
    products = {name: getattr(fitted, name) for name in ("products", "products_low", "products_four", "operands")}
    once = replace(ways, recompute=ways.recompute * 0 + NO_RECOMPUTE)
    ideal = replace(software, attention=1.0, redone_experts=False)
    even = replace(once, pipeline=ways.pipeline / ways.pipeline, interleave=ways.interleave / ways.interleave)
    steps: list[tuple[str, Strategies, CardModel, Software]] = [("uneven stages", once, perfect, ideal)]
    at = perfect
    steps.append(("recomputation", ways, at, replace(software, attention=1.0)))
    for name, changed in {
        "matrix products": products, "attention": {"scores": fitted.scores}, "memory": {"memory": fitted.memory},
        "gaps": {"tail": fitted.tail, "sync": fitted.sync}, "launches": {"launch": fitted.launch},
    }.items():  # fmt: skip
        at = replace(at, fitted=replace(at.fitted, **changed))
        if name == "attention":
            at = replace(at, exponentials=card.exponentials)
        attention = 1.0 if name == "matrix products" else software.attention
        steps.append((name, ways, at, replace(software, attention=attention)))
    sums = [_busy(model, even, perfect, ideal) / float(ways.pipeline)]
    sums += [_busy(model, way, real, does) for _, way, real, does in steps]
    left = list(accumulate(reversed(sums), min))[::-1]
    names = ("arithmetic", *(name for name, *_ in steps))
    bars = [
        Bar(name=name, seconds=now - before) for name, (before, now) in zip(names, pairwise([0.0, *left]), strict=True)
    ]
    bars += [Bar(name=name, seconds=float(getattr(parts, name))) for name in WAITS]
    return (*bars, Bar(name="fixed", seconds=float(parts.step + parts.host)))


def _busy(model: ModelShape, ways: Strategies, card: CardModel, software: Software) -> float:
    """Return the seconds in which the slowest rank computes and launches.

    One stage in place of several keeps its micro-batches: the data axis is what it was.
    """
    parts = step_parts(model, ways, card, software)
    return float(parts.compute + parts.launch)


def plan_waterfall(plan: Plan, machine: Machine) -> tuple[Bar, ...]:
    """Return the parts of a plan's step; none where the model is the user's own."""
    shape = shape_of(plan)
    if shape is None:
        return ()
    return waterfall(decoder_shape(shape), strategy_of(plan), at_work(plan, machine), software_of(plan, machine))


def choice_waterfall(space: Space, card: CardModel, room: Room, choice: Choice) -> tuple[Bar, ...]:
    """Return the parts of the step of what a search found, offload included."""
    away = time_parts(space, card, room, choice)["offload"]
    bars = waterfall(space.model, choice.ways(space), card, choice.software(space))
    return (*bars, Bar(name="offload", seconds=away))


def plans_waterfall(plans: Plans) -> tuple[Bar, ...]:
    """Return the parts of the step of the best plan of a search."""
    return choice_waterfall(plans.space, plans.card, plans.room, plans.best)


def rows(bars: Sequence[Bar]) -> list[tuple[str, str]]:
    """Return the parts as rows for people: what, how long, its part of the step, and why; parts of nothing left out."""
    whole = sum(bar.seconds for bar in bars)
    shown = [(bar.name, f"{show_seconds(bar.seconds)}, {bar.seconds / whole:.1%}: {bar.reason}") for bar in _seen(bars)]
    return [*shown, ("step", show_seconds(whole))]


def waterfall_svg(bars: Sequence[Bar]) -> str:
    """Return the parts as one SVG picture: a row for each, its bar beginning where the one above ends."""
    seen = _seen(bars)
    whole = sum(bar.seconds for bar in bars) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / whole
    height = (len(seen) + 1) * _ROW + 34
    drawn, now = [], 0.0
    for place, bar in enumerate(seen):
        kind = "arithmetic" if bar.name == "arithmetic" else "card" if bar.name in _CARD else "waits"
        text = f"{show_seconds(bar.seconds)}, {bar.seconds / whole:.1%}"
        drawn += _row(bar.name, text, now, bar.seconds, scale, place, kind, bar.reason)
        now += bar.seconds
    drawn += _row("step", show_seconds(whole), 0.0, whole, scale, len(seen), "total", "all of it")
    bottom = (len(seen) + 1) * _ROW + 4
    for tick in nice_ticks(whole, most=7):
        x = _LEFT + tick * scale
        drawn.append(f'<path d="M{x:.1f} 4V{bottom}" stroke="currentColor" stroke-opacity=".15"/>')
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(show_seconds(tick))}</text>')
    told = "; ".join(f"{bar.name} {show_seconds(bar.seconds)}" for bar in seen)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
            "<title>Where a step's time goes</title>",
            f"<desc>{escape(show_seconds(whole))} in all: {escape(told)}.</desc>",
            STYLE,
            *drawn,
            "</svg>",
        ]
    )


def _seen(bars: Sequence[Bar]) -> list[Bar]:
    """Return the parts that show: more than a ten-thousandth of the step, and the arithmetic."""
    whole = sum(bar.seconds for bar in bars)
    return [bar for bar in bars if bar.name == "arithmetic" or bar.seconds > 1e-4 * whole]


def _row(
    name: str, text: str, start: float, seconds: float, scale: float, place: int, kind: str, reason: str
) -> list[str]:
    x, y, width = _LEFT + start * scale, 4 + place * _ROW, max(seconds * scale, 1.0)
    return [
        f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="18" fill="{_COLOURS[kind]}">'
        f"<title>{escape(name)}: {escape(text)}; {escape(reason)}</title></rect>",
        f'<text x="{x + width + 6:.1f}" y="{y + 15}">{escape(text)}</text>',
    ]
