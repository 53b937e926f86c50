"""How far apart are the closed form of a step and its events? Random strategies, where the closed form applies."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import Any

from harness import finish, machine, parser, say
from supernode.simulation.drawn import Drawn, draw

PLANS = 50
CLAIM = 0.02


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--seed", type=int, default=0, help="of the strategies drawn")
    flags.add_argument("--plans", type=int, default=PLANS, help="strategies to compare where the closed form applies")
    asked = flags.parse_args()
    start, inside, out = time.process_time(), [], []
    for one in islice(draw(asked.seed), 50 * asked.plans):
        (out if one.reasons else inside).append(one)
        if len(inside) == asked.plans:
            break
    cpu = time.process_time() - start
    for one in sorted(inside, key=lambda drawn: -abs(drawn.difference))[:10]:
        say(f"{one.difference:+7.2%}  {words(one)}")
    say(f"outside, {len(out)}:")
    for one in sorted(out, key=lambda drawn: -abs(drawn.difference))[:10]:
        say(f"{one.difference:+7.2%}  {words(one)}: {'; '.join(one.reasons)}")
    worst = max(abs(one.difference) for one in inside)
    finish(
        {
            "worst_difference_pct": round(100 * worst, 3),
            "mean_difference_pct": round(100 * sum(abs(one.difference) for one in inside) / len(inside), 3),
            "plans": len(inside),
            "within_2_pct": sum(abs(one.difference) <= CLAIM for one in inside),
            "outside": len(out),
            "outside_within_2_pct": sum(abs(one.difference) <= CLAIM for one in out),
            "outside_worst_difference_pct": round(100 * max((abs(one.difference) for one in out), default=0.0), 3),
            "outside_difference_pct": [round(100 * one.difference, 2) for one in out],
            "outside_reasons": dict(Counter(reason for one in out for reason in one.reasons)),
            "by_schedule": by_schedule(inside),
            "cpu_seconds": round(cpu, 2),
            "seed": asked.seed,
            "machine": machine("numpy", "scipy"),
        },
        asked,
    )


def words(one: Drawn) -> str:
    names = ("pipeline", "interleave", "micro_batches", "tensor", "context", "expert", "data", "sharding", "schedule")
    return f"{one.name}: " + ", ".join(f"{name} {int(getattr(one.ways, name))}" for name in names)


def by_schedule(inside: list[Drawn]) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for one in inside:
        name = ("gpipe", "1f1b", "interleaved", "zero_bubble")[int(one.ways.schedule)]
        found.setdefault(name if one.ways.pipeline > 1 else "no pipeline", []).append(abs(one.difference))
    return {name: {"plans": len(d), "worst_pct": round(100 * max(d), 3)} for name, d in sorted(found.items())}


if __name__ == "__main__":
    main()
