"""How available is the machine of 512 cards, and what does the model say of Llama 3's 54 days?

Four parts. The machine: outages, interruptions and availability from rates of parts, with and without each redundancy,
the closed form beside drawn lives of the same parts. Goodput: the best interval of each tier, by closed form, drawn,
and played by the controller that real runs have. Policies: spare, shrink, wait. Llama 3: rates fitted to other runs
(three of seven, on A100) foretell how often it was interrupted, beside a null model; with the published rates its 54
days are played with our recovery times and with slower ones. All is seeded, and nothing is timed.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np

import harness
from supernode.control.availability import play, play_recovery
from supernode.hardware.assemble import predefined
from supernode.hardware.failing import YEAR, failing
from supernode.reliability import answer
from supernode.reliability.draws import draw
from supernode.reliability.parts import EVERYTHING, NOTHING, Redundancy
from supernode.reliability.published import LLAMA_COUNT, LLAMA_DAYS, beside_llama, fit, llama
from supernode.reliability.service import AVAILABILITY, BY_HAND, MTBF, reached_with, service
from supernode.reliability.tiers import drawn, goodput

HOUR = 3600.0
SEED = 20_240_731
# What recovery takes at Llama 3's size, in seconds until all ranks have their state. Ours: a second to know it and half
# a minute for 16,384 ranks to meet (an estimate), and the state loaded from memory, a partner or disk. Theirs is not
# published; ten minutes are assumed, as `supernode forecast` does.
PAUSES = {
    "ours": {"memory": 32.0, "partner": 35.0, "disk": 90.0},
    "disk only, 10 minutes": {"memory": 600.0, "partner": 600.0, "disk": 600.0},
    "disk only, 15 minutes": {"memory": 900.0, "partner": 900.0, "disk": 900.0},
}
STEP = 30.0  # played in pieces of about five steps of 6 s
# Seconds that a checkpoint of theirs stops training: 12 bytes a parameter at the 2 TB/s of their store, as reported.
SAVE = 12 * 405e9 / 2e12
LIVES = 4


def machine_512(lives: int) -> dict[str, Any]:
    """Return how the machine stands: as claimed or not, with and without each redundancy, drawn and by closed form."""
    found = answer.availability(predefined("supernode-512"))
    plain = answer.plain(found)
    checked = []
    for redundancy, years in ((NOTHING, 5), (Redundancy(spares=1), 10), (replace(EVERYTHING, spares=2), 40)):
        stands = service(predefined("supernode-512"), redundancy, by_hand=0.0)
        seen = draw(stands.parts.groups, seconds=years * YEAR, lives=lives, rng=np.random.default_rng(SEED))
        checked.append({
            "redundancy": redundancy.words, "closed_outage_every_hours": 1 / stands.outages.frequency / HOUR,
            "drawn_outage_every_hours": 1 / seen.standing.frequency / HOUR,
            "closed_unavailability": stands.outages.unavailability,
            "drawn_unavailability": seen.standing.unavailability,
            "deviations": (seen.standing.frequency - stands.outages.frequency) / seen.errors.frequency,
        })  # fmt: skip
    steps = [
        {"with": name, "outage_every_hours": one.outages.mtbf / HOUR, "availability": one.availability,
         "interruption_every_hours": 1 / one.interruptions / HOUR}
        for name, one in reached_with(predefined("supernode-512"))
    ]  # fmt: skip
    return plain | {"drawn": checked, "what_it_takes": steps, "by_hand": BY_HAND}


def goodput_512(lives: int) -> dict[str, Any]:
    """Return goodput by closed form, drawn and played."""
    recovery = answer.availability(predefined("supernode-512")).recovery
    # Twenty times the failures, so that months hold enough of them to compare.
    often = replace(recovery, tiers=tuple(replace(tier, rate=20 * tier.rate) for tier in recovery.tiers))
    share, counts = drawn(often, seconds=90 * 86_400.0, lives=lives, rng=np.random.default_rng(SEED))
    played = play_recovery(often, days=90, seed=SEED)
    return {
        "usual": goodput(recovery), "failures_20_times": goodput(often), "drawn": float(share.mean()),
        "drawn_error": float(share.std(ddof=1) / math.sqrt(lives)), "played": played.useful,
        "played_interruptions": sum(played.interruptions.values()), "drawn_interruptions": float(counts.mean()),
    }  # fmt: skip


def llama_3() -> dict[str, Any]:
    """Return what is foretold and played of Llama 3's 54 days, beside what is published."""
    found = fit()
    judged = [run for run in found.runs if run.half == "judge"]
    off = statistics.fmean(abs(math.log(run.times)) for run in judged)
    null = statistics.fmean(abs(math.log(run.null / run.interruptions)) for run in judged)
    plays = {}
    for name, pauses in PAUSES.items():
        causes = llama(pauses=pauses)
        rate, ours = sum(cause.rate for cause in causes), name == "ours"
        every = 40 if ours else max(1, round(math.sqrt(2 * SAVE / rate) / STEP))
        causes = causes if ours else tuple(replace(cause, source="disk") for cause in causes)
        seen = [
            play(
                causes,
                days=LLAMA_DAYS,
                step=STEP,
                save_every=every,
                save_seconds=0.5 if ours else SAVE,
                keep_every=1 if ours else 0,
                keep_seconds=0.1 if ours else 0.0,
                seed=SEED + life,
            )
            for life in range(LIVES)
        ]
        plays[name] = {
            "interruptions": [sum(life.interruptions.values()) for life in seen],
            "effective": [life.useful for life in seen],
            "by_cause": {
                cause.name: sum(life.interruptions.get(cause.name, 0) for life in seen) / LIVES for cause in causes
            },
            "restored": [dict(life.restored) for life in seen],
        }
        harness.say(f"Llama 3 played, {name}: {plays[name]['interruptions']}")
    return {
        "published_interruptions": LLAMA_COUNT, "published_effective": "over 0.90", "played": plays,
        "fit_rows": [run.name for run in found.runs if run.half == "fit"],
        "rate_per_card_day": found.rate * 86_400, "spread": found.spread,
        "runs": [
            {"run": run.name, "card": run.card, "half": run.half, "read": run.read, "published": run.interruptions,
             "foretold": run.foretold, "null": run.null}
            for run in found.runs
        ],
        "judged_mean_factor": math.exp(off), "judged_null_mean_factor": math.exp(null),
        "parts_from_other_sources": {
            name: {"foretold": one, "published": met} for name, (one, met) in beside_llama().items()
        },
    }  # fmt: skip


def main() -> None:
    """Print the figures."""
    flags = harness.parser(__doc__).parse_args()
    lives = 400 if flags.full else 100
    whole = machine_512(lives)
    harness.say("machine reckoned and drawn")
    result = {
        "claimed_mtbf_hours": MTBF / HOUR, "claimed_availability": AVAILABILITY,
        "outage_every_hours": whole["outage_every_seconds"] / HOUR, "availability": whole["availability"],
        "interruption_every_hours": whole["interruption_every_seconds"] / HOUR, "machine_512": whole,
        "goodput": goodput_512(lives), "llama_3": llama_3(),
        "rates_per_year": {
            name: {"per_year": kind.rate * YEAR, "repair_hours": kind.repair / HOUR, "read": kind.read,
                   "source": kind.source}
            for name, kind in failing().items()
        },
        "machine": harness.machine("numpy"),
    }  # fmt: skip
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
