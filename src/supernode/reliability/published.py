"""How well do rates of some published runs foretell others, and Llama 3's 54 days in particular?

Rates are fitted to the rows of `interruptions.csv` that are marked `fit`: runs on A100 that count interruptions of all
causes. The others, most of them on later cards, are judged. Nothing belongs to a row.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from supernode.hardware.failing import YEAR, failing
from supernode.reliability.months import Cause
from supernode.simulation.completion import causes as llama_causes
from supernode.simulation.goodput import DAY

FILE = Path(__file__).parent / "interruptions.csv"
LLAMA_CARDS, LLAMA_DAYS, LLAMA_COUNT = 16_384, 54, 419
CARDS_PER_SWITCH = 16
"""Of Llama 3's cluster: a rack of two hosts under one switch (arXiv:2407.21783, section 3.3.1)."""
OF_CARDS = 268 / 419
"""Part of Llama 3's interruptions that its cards and their memory caused; only rows that count these alone use it."""
SOURCES: Mapping[str, str] = {
    "software": "memory", "dependency": "memory", "NCCL watchdog timeout": "memory",
    "network switch or cable": "memory",
}  # fmt: skip
"""From where our recovery goes on: what only ended processes, or broke ways between nodes, leaves memory as it was;
all other causes take the node, whose state its partner holds."""
DISK = 0.01
"""Part of interruptions that take a node and its partner at once, so that only the disk is left: an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run, what it met, and what is foretold of it.

    Attributes:
        counts: `all` interruptions, or those by `cards` alone.
        half: `fit` or `judge`.
        foretold: interruptions by the fitted rate.
        null: by the null model, one rate per card over all fitted runs together.
    """

    name: str
    card: str
    cards: int
    days: float
    interruptions: float
    counts: str
    half: str
    read: str
    source: str
    foretold: float = 0.0
    null: float = 0.0

    @property
    def card_seconds(self) -> float:
        """Cards times the seconds that they were watched."""
        return self.cards * self.days * DAY

    @property
    def times(self) -> float:
        """Foretold over met."""
        return self.foretold / self.interruptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the fitted half says.

    Attributes:
        rate: interruptions per card and second: the middle run's, in the sense of the geometric mean.
        spread: by how many times clusters differ, one standard deviation.
        null: per card and second over all fitted runs together; the largest run outweighs the rest.
        runs: all of them, with what is foretold.
    """

    rate: float
    spread: float
    null: float
    runs: tuple[Run, ...]


@cache
def fit() -> Fit:
    """Return the rates that the fitted runs give, and what they foretell of every run."""
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    runs = [
        Run(
            name=row["run"], card=row["card"], cards=int(row["cards"]), days=float(row["days"]),
            interruptions=float(row["interruptions"]), counts=row["counts"], half=row["half"], read=row["read"],
            source=row["source"],
        )
        for row in rows
    ]  # fmt: skip
    fitted = [run for run in runs if run.half == "fit"]
    logs = [math.log(run.interruptions / run.card_seconds) for run in fitted]
    rate = math.exp(statistics.fmean(logs))
    null = sum(run.interruptions for run in fitted) / sum(run.card_seconds for run in fitted)
    return Fit(
        rate=rate, spread=math.exp(statistics.stdev(logs)), null=null,
        runs=tuple(_foretold(run, rate, null) for run in runs),
    )  # fmt: skip


def _foretold(run: Run, rate: float, null: float) -> Run:
    part = OF_CARDS if run.counts == "cards" else 1.0
    return Run(
        **{name: getattr(run, name) for name in (
            "name", "card", "cards", "days", "interruptions", "counts", "half", "read", "source")},
        foretold=rate * part * run.card_seconds, null=null * run.card_seconds,
    )  # fmt: skip


def beside_llama() -> dict[str, tuple[float, float]]:
    """Return (foretold, met) of those of Llama 3's causes for which another source has a rate of the part."""
    known, years = failing(), LLAMA_DAYS * DAY / YEAR
    cables = LLAMA_CARDS * known["cable"].rate * YEAR * years
    switches = LLAMA_CARDS / CARDS_PER_SWITCH * known["switch"].rate * YEAR * years
    met = {cause: rate * LLAMA_CARDS * LLAMA_DAYS * DAY for cause, rate in llama_causes().items()}
    disks = LLAMA_CARDS / 8 * known["disk"].rate * YEAR * years
    return {
        "network switch or cable": (cables + switches, met["network switch or cable"]),
        "SSD (one a node)": (disks, met["SSD"]),
    }


def llama(*, pauses: Mapping[str, float], rate: float = 0.0) -> tuple[Cause, ...]:
    """Return the causes that interrupt a job of Llama 3's size, each with where it goes on from.

    Args:
        pauses: seconds until work goes on, by source.
        rate: of all causes together, per card and second, with the shares as published; 0 for the published one.
    """
    published = llama_causes()
    scale = rate / sum(published.values()) if rate else 1.0
    found = [
        Cause(name=name, rate=each * scale * LLAMA_CARDS * (1 - DISK), source=SOURCES.get(name, "partner"),
              pause=pauses[SOURCES.get(name, "partner")])
        for name, each in published.items()
    ]  # fmt: skip
    both = sum(published.values()) * scale * LLAMA_CARDS * DISK
    return (*found, Cause(name="node and partner", rate=both, source="disk", pause=pauses["disk"]))
