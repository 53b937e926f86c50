"""Does training scale to a million cards? One step over three tiers, 90 days with failures, and published scaling."""

from __future__ import annotations

import inspect
import resource
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import finish, machine, parser, say
from supernode.forecast.efficiency import card_model
from supernode.forecast.times import step_parts
from supernode.simulation.goodput import DAY, Faults, Goodput, goodput
from supernode.simulation.leverage import least_bandwidth, most_spread, sensitivities, strong_sensitivities
from supernode.simulation.million import (
    GOOD,
    SIZES,
    Point,
    Tiers,
    Work,
    breakpoint_of,
    curve,
    memory_share,
    step_at,
    strong_curve,
)
from supernode.workload.presets import public_model
from supernode.workload.strategy import INTERLEAVED, Software, make_strategies

SUPERNODES = SIZES[-1]
STRONG_BATCH = 16_384  # samples; one for each copy of the model at a million cards, 134 Mi tokens
DAYS = 90
SEED = 0
RULES = {
    # pause: what a restart of Llama 3's kind takes, an estimate; save: asynchronous, as its weights leave the card.
    "restart all from storage, 10 min": {"pause": 600.0, "save": 5.0},
    "restart all from storage, 1 min": {"pause": 60.0, "save": 1.0},
    "spare takes over from a peer's memory, 10 s": {"pause": 10.0, "every_step": True},
    "supernode leaves for 10 min, the rest goes on after 3 s": {"pause": 3.0, "every_step": True, "absent": 600.0},
}
"""What an interruption costs; all are parameters to put in, none is measured."""

CONDITIONS = (
    "8,192 tokens; fewer samples per card on the larger size; published: degrees, batches, rates; assumed: 8-bit "
    "products, ZeRO 1, interleave, tensor communication overlapped"
)
# Published results of Llama 3.1 405B on two sizes of one machine.
PUBLISHED: tuple[dict[str, Any], ...] = (
    {
        "card": "H100", "cards": (512, 8192), "batches": (1152, 1536), "tensor": 8, "pipeline": 8, "context": 2,
        "sequences_per_second": (20.87, 292.19), "efficiency_pct": 87.5, "source": "MLPerf Training v5.0, NVIDIA",
    },
    {
        "card": "GB200", "cards": (512, 2496), "batches": (896, 1248), "tensor": 4, "pipeline": 8, "context": 2,
        "sequences_per_second": (46.34, 213.88), "efficiency_pct": 94.7,
        "source": "MLPerf Training v5.0, IBM, CoreWeave and NVIDIA",
    },
)  # fmt: skip
INTERLEAVES = (1, 4, 8)


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """Return a published pair of sizes beside ours, for several interleaves."""
    model, card = public_model("llama3-405b"), card_model(row["card"])
    software = Software(overlaps_tensor=True)
    ours = {}
    for interleave in INTERLEAVES:
        rates = []
        for cards, batch in zip(row["cards"], row["batches"], strict=True):
            degrees = {key: row[key] for key in ("tensor", "pipeline", "context")}
            data = cards // (row["tensor"] * row["pipeline"] * row["context"])
            ways = make_strategies(
                **degrees, data=data, batch=batch, interleave=interleave, sequence=8192, sharding=1, precision=2,
                sequence_parallel=1, schedule=INTERLEAVED if interleave > 1 else 1,
            )  # fmt: skip
            rates.append(batch / float(step_parts(model, ways, card, software).total))
        few, many = row["cards"]
        ours[f"interleave {interleave}"] = {
            "efficiency_pct": round(100 * rates[1] / rates[0] * few / many, 1),
            "sequences_per_second": [round(rate, 2) for rate in rates],
        }
    return {**row, "conditions": CONDITIONS, "ours": ours}


def lives(points: list[Point]) -> tuple[dict[str, Any], float]:
    """Return goodput by rule and size, and the CPU seconds of one rule's 90 days at a million cards."""
    found: dict[str, Any] = {}
    slowest = 0.0
    for name, rule in RULES.items():
        rows: list[tuple[Point, Goodput]] = []
        for point in points:
            faults = Faults(step=point.seconds, **rule)  # type: ignore[arg-type]
            start = time.process_time()
            one = goodput(faults, cards=point.cards, seconds=DAYS * DAY, rng=np.random.default_rng(SEED))
            slowest = max(slowest, time.process_time() - start)
            rows.append((point, one))
        as_points = [replace(point, efficiency=one.mean) for point, one in rows]
        largest, last = rows[-1]
        found[name] = {
            "goodput": round(last.mean, 4), "goodput_5_to_95_pct": [round(last.low, 4), round(last.high, 4)],
            "interruptions": round(last.interruptions), "checkpoint_interval_seconds": round(last.interval, 1),
            "goodput_times_efficiency": round(last.mean * largest.efficiency, 4),
            "falls_below_95_pct_at_cards": _whole(breakpoint_of(as_points)),
            "by_cards": {point.cards: round(one.mean, 4) for point, one in rows},
        }  # fmt: skip
    return found, slowest


def _whole(cards: float | None) -> int | None:
    return None if cards is None else round(cards)


def picture(curves: dict[str, list[tuple[int, float]]], *, width: int = 720, height: int = 380) -> str:
    """Return the curves over the cards (logarithmic) as SVG, with a line at 95%."""
    left, right, top, bottom = 50, 215, 20, 40
    sizes = [cards for cards, _ in next(iter(curves.values()))]
    first, last = np.log2(sizes[0]), np.log2(sizes[-1])

    def x(cards: float) -> float:
        return float(left + (np.log2(cards) - first) / (last - first) * (width - left - right))

    def y(part: float) -> float:
        return height - bottom - part * (height - top - bottom)

    style = 'font-family="sans-serif" font-size="11" fill="currentColor"'
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>']
    drawn.append(f'<rect width="{width}" height="{height}" fill="white"/><g color="#222" fill="#222">')
    for part in (0, 0.25, 0.5, 0.75, 1):
        drawn.append(f'<path d="M{left} {y(part):.1f}H{width - right}" stroke="#ddd"/>')
        drawn.append(f'<text x="{left - 6}" y="{y(part) + 4:.1f}" text-anchor="end">{part:.0%}</text>')
    drawn.append(f'<path d="M{left} {y(GOOD):.1f}H{width - right}" stroke="#888" stroke-dasharray="4 3"/>')
    for cards in sizes[::-2]:
        drawn.append(f'<text x="{x(cards):.1f}" y="{height - 22}" text-anchor="middle">{cards:,}</text>')
    drawn.append(f'<text x="{(left + width - right) / 2}" y="{height - 5}" text-anchor="middle">cards</text>')
    dashes = ("", "6 3", "2 3", "8 3 2 3")
    below = 0.0
    highest_first = sorted(curves.items(), key=lambda entry: -entry[1][-1][1])
    for index, (name, points) in enumerate(highest_first):  # so that labels are beside their curves
        colour, dash = f"hsl({index * 360 // len(curves)} 70% 38%)", dashes[index % len(dashes)]
        path = " ".join(f"{x(cards):.1f},{y(part):.1f}" for cards, part in points)
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        below = max(below + 13, y(points[-1][1]) + 4)  # labels keep apart
        drawn.append(f'<text x="{width - right + 6}" y="{below:.1f}" fill="{colour}">{name} {points[-1][1]:.0%}</text>')
    return "\n".join([*drawn, "</g></svg>"])


def assumptions(tiers: Tiers, work: Work) -> dict[str, Any]:
    """Return every number that was put in, and what each means and where it is from."""
    degrees = {key: getattr(work, key) for key in ("tensor", "pipeline", "interleave", "micro_batches", "sequence")}
    return {
        "model": f"llama3-405b, {float(work.model.parameters) / 1e9:.0f} billion parameters, bfloat16, ZeRO 1",
        "tiers": asdict(tiers), "work": degrees,
        "meaning": [inspect.getdoc(Tiers), inspect.getdoc(Work), inspect.getdoc(Faults)],
        "not_covered": [
            "whether a model learns from a batch that grows with the cards",
            "congestion between jobs, and a network between supernodes that is oversubscribed",
            "the H100 generation's efficiencies are fitted to 4 to 6,144 cards; beyond is extrapolation",
        ],
    }  # fmt: skip


def main() -> None:
    """Measure and report."""
    flags_parser = parser(__doc__)
    flags_parser.add_argument("--out", type=Path, help="write the efficiency curves here, as SVG")
    flags = flags_parser.parse_args()
    tiers, work = Tiers(), Work()
    start = time.process_time()
    step_at(tiers, work, SUPERNODES)
    step_seconds = time.process_time() - start  # the first call, files of constants included
    points = curve(tiers, work)
    strong = strong_curve(tiers, work, STRONG_BATCH)
    say("ninety days, by rule and size")
    found, life_seconds = lives(points)
    say("what would move it")
    moved = sensitivities(tiers, work)
    strong_moved = strong_sensitivities(tiers, work, STRONG_BATCH)
    if flags.out:
        shown = {"same work per card": points, "same batch for all": strong}
        lines = {name: [(point.cards, point.efficiency) for point in some] for name, some in shown.items()}
        for label, name in (("goodput, restart 10 min", next(iter(RULES))), ("goodput, spare in 10 s", [*RULES][2])):
            lines[label] = list(found[name]["by_cards"].items())
        flags.out.write_text(picture(lines))
    result = {
        "step_seconds": round(step_seconds, 4),
        "failures_90_days_seconds": round(life_seconds, 4),
        "peak_memory_MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "cards": points[-1].cards, "efficiency_at_a_million": round(points[-1].efficiency, 4),
        "memory_of_a_card_used": round(memory_share(tiers, work), 3),
        "efficiency": [
            {"cards": point.cards, "step_seconds": round(point.seconds, 4), "efficiency": round(point.efficiency, 4),
             "scatter": point.scatter, "scatter_seconds": round(point.scatter_seconds, 4),
             "parts": {name: round(seconds, 4) for name, seconds in point.parts.items() if seconds}}
            for point in points
        ],
        "breakpoint_95_pct": {
            "same work per card, cards": _whole(breakpoint_of(points)),
            f"same batch of {STRONG_BATCH} samples for all, cards": _whole(breakpoint_of(strong)),
            "at a million, bandwidth between supernodes per card below, GB/s":
                round(least_bandwidth(tiers, work, SUPERNODES) / 1e9, 2),
            "at a million, spread between nodes above": round(most_spread(tiers, work, SUPERNODES), 4),
        },
        "strong_efficiency": {point.cards: round(point.efficiency, 4) for point in strong},
        "sensitivity": {
            name: {
                "same work per card, efficiency at a million": round(some[-1].efficiency, 4),
                "same work per card, falls below 95% at cards": _whole(breakpoint_of(some)),
                "same batch for all, falls below 95% at cards": _whole(breakpoint_of(strong_moved[name])),
            }
            for name, some in moved.items()
        },
        "goodput_90_days": found,
        "published": [compared(row) for row in PUBLISHED],
        "assumptions": assumptions(tiers, work),
        "machine": machine("numpy", "supernode"),
    }  # fmt: skip
    finish(result, flags)


if __name__ == "__main__":
    main()
