"""Which few parameters per card generation explain the fitting half? Writes `collectives/catalog/collectives.yaml`.

A pattern search over the logarithms of all numbers below, from the same start and seeds each time. The loss is the mean
absolute logarithm of predicted over measured; rows below 64 KB weigh 0.3.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import harness
from nccl_accuracy import FOLDER, SCORED, Row, read_rows
from supernode.collectives.collective_time import collective_seconds
from supernode.collectives.transport import read_transport

CATALOGUE = Path(__file__).parents[1] / "src" / "supernode" / "collectives" / "catalog" / "collectives.yaml"
RESTARTS = 8
PATIENT = ("2.27.5", "2.28.9")
"""Versions of NCCL that stay in the short band on NVLink 5 for as long as it is faster."""
HEAD = """\
# What collectives cost within one generation's node or NVLink domain: see collectives/transport.py. SI units and bytes.
# Written by `python benchmarks/fit_collectives.py` from the fitting half of benchmarks/validation/nccl_*.csv; no number
# is of one row, one size, one count of cards or one model.

"""
SOURCE = "fitted to the fitting half of github.com/ai-dynamo/aiconfigurator @095f58a51 nccl_perf.parquet (Apache-2.0)"
SOURCE_VIDUR = (
    "fitted to the fitting half of github.com/microsoft/vidur @7d47513 (MIT); its medians scatter by tens of percent"
)


def start(scale: float, *, systems: list[str], launch: float, long: float, copy_rate: float) -> dict[str, Any]:
    """Return where the search begins: `long` bytes/s in the long band, other bands in proportion."""
    us = 1e-6
    return {
        "systems": systems,
        "launch": launch * us,
        "ring": {
            "short": [
                {"hop": 1.0 * us, "bandwidth": 0.3 * long},
                {"latency": 10 * us, "hop": 2 * us, "bandwidth": 0.7 * long},
            ],
            "long": {"latency": 4 * us, "hop": 5 * us * scale, "bandwidth": long, "fill": 1e6},
            "copy": copy_rate,
            "switch": 1.5e6,
            "switch_first": 1.5e6,
        },
        "exchange": {
            "short": [{"latency": 2 * us, "hop": 0.2 * us, "bandwidth": 20e9}],
            "long": {"latency": 6 * us, "hop": 0.4 * us, "bandwidth": long, "fill": 1e6},
            "copy": copy_rate,
            "switch": 4e4,
        },
        "versions": {},
        "source": SOURCE,
    }


def generations() -> dict[str, dict[str, Any]]:
    """Return the start of each generation that is fitted to the first table."""
    found = {
        "NVLink-3": start(3, systems=["a100_sxm"], launch=9, long=230e9, copy_rate=700e9),
        "NVLink-4": start(1, systems=["h100_sxm", "h200_sxm"], launch=5, long=355e9, copy_rate=940e9),
        "NVLink-5": start(
            2, systems=["b200_sxm", "b300_sxm", "gb200", "gb300"], launch=8, long=680e9, copy_rate=1358e9
        ),
        "PCIe-4": start(4, systems=["l40s"], launch=6, long=22e9, copy_rate=200e9),
        "PCIe-5": start(1, systems=["rtx_pro_6000_server"], launch=5, long=50e9, copy_rate=200e9),
    }
    for name in ("NVLink-4", "NVLink-5"):
        found[name]["in_switch"] = {"latency": 30e-6, "bandwidth": 400e9, "fill": 1e6, "switch": 2e6}
    found["NVLink-4"]["versions"] = {"2.23": {"launch": 6.4e-6}}
    exchange = copy.deepcopy(found["NVLink-5"]["exchange"])
    exchange["short"][0] |= {"bandwidth": 155e9}
    found["NVLink-5"]["versions"] = {PATIENT[0]: {"patient": True, "exchange": exchange}}
    for name in ("PCIe-4", "PCIe-5"):
        found[name]["widths"] = [
            {"cards": 2, "bandwidth": 1.0, "hop": 1.0},
            {"cards": 4, "bandwidth": 0.4, "hop": 2.0},
            {"cards": 8, "bandwidth": 0.2, "hop": 3.0},
        ]
        for path in ("ring", "exchange"):
            found[name][path]["long"].pop("fill")
    return found


def profiled(fitted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the start of each system of the second table: a fitted generation, its launch and what lies outside."""
    found = {}
    for system, (base, has_widths, has_network) in PROFILED.items():
        entry = copy.deepcopy(fitted[base]) | {"systems": [system], "versions": {}, "source": SOURCE_VIDUR}
        entry["launch"], entry["network_exchange"] = 12e-6, network(25e9)
        if has_network:
            entry["network"] = network(10e9)
        if has_widths:
            entry["widths"] = [{"cards": 2, "bandwidth": 1.0, "hop": 1.0}, {"cards": 4, "bandwidth": 0.2, "hop": 2.0}]
        found[f"{base} {system}"] = entry
    return found


PROFILED = {
    "a100_dgx": ("NVLink-3", False, True),
    "h100_dgx": ("NVLink-4", False, False),
    "a100_pairwise_nvlink": ("NVLink-3", True, False),
    "h100_pairwise_nvlink": ("NVLink-4", True, False),
}
"""System: the generation of its links in a node; whether pairs are joined more loosely; all-reduces across nodes."""
OUTSIDE = ("launch", "widths", "network", "network_exchange")


def network(bandwidth: float) -> dict[str, Any]:
    """Return where the search for a path between nodes begins."""
    return {
        "short": [{"hop": 20e-6, "bandwidth": bandwidth / 4}],
        "long": {"hop": 40e-6, "bandwidth": bandwidth},
        "copy": NO_COPY,
        "switch": 3e5,
    }


NO_COPY = 1e15
"""Where no card copies a share of its own."""


def free(entry: Any, place: tuple[Any, ...] = (), *, only: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of the numbers that are fitted; `only` names the uppermost keys, all unless said."""
    items = entry.items() if isinstance(entry, dict) else enumerate(entry) if isinstance(entry, list) else ()
    for key, value in items:
        if only and key not in only:
            continue
        here = (*place, key)
        if isinstance(value, (dict, list)):
            # The narrowest width is the unit of the wider ones; the patient versions share all but the short band.
            if here[-2:] != ("widths", 0):
                yield from free(value, here)
        elif isinstance(value, float) and key != "cards" and value != NO_COPY and not _is_shared(here):
            yield here


def _is_shared(place: tuple[Any, ...]) -> bool:
    return "versions" in place and "exchange" in place and "short" not in place


def get(entry: Any, place: tuple[Any, ...]) -> Any:
    """Return the value at a place."""
    for key in place:
        entry = entry[key]
    return entry


def put(entry: Any, place: tuple[Any, ...], value: float) -> None:
    """Set the value at a place."""
    get(entry, place[:-1])[place[-1]] = value


class Loss:
    """The mean absolute logarithm of predicted over measured, over rows of one generation."""

    def __init__(self, entry: dict[str, Any], rows: Sequence[Row]) -> None:
        self.groups = []
        sorted_rows: dict[Any, list[Row]] = defaultdict(list)
        for row in rows:
            library = "" if not row.library else PATIENT[0] if row.library in PATIENT else row.library
            sorted_rows[row.kind, library if library in entry["versions"] else "", row.cards != row.node_cards].append(
                row
            )
        for (kind, library, _), chosen in sorted_rows.items():
            columns = [np.array([getattr(row, key) for row in chosen], float) for key in COLUMNS]
            self.groups.append((kind, library, *columns, np.where(columns[0] < SCORED[0], 0.3, 1.0)))
        self.weight = sum(group[-1].sum() for group in self.groups)

    def __call__(self, entry: dict[str, Any]) -> float:
        share(entry)
        by, total = read_transport(entry, where="fit"), 0.0
        for kind, library, nbytes, cards, node_cards, seconds, weight in self.groups:
            guess = collective_seconds(kind, nbytes, cards, system=by, node_cards=node_cards, library=library)
            total += float((weight * np.sqrt(np.log(guess / seconds) ** 2 + 1e-4)).sum())
        return total / self.weight


COLUMNS = ("nbytes", "cards", "node_cards", "seconds")


def share(entry: dict[str, Any]) -> None:
    """Give the patient versions' exchange everything but its short band from the others'."""
    for version in entry["versions"].values():
        if "exchange" in version:
            version["exchange"] = {**copy.deepcopy(entry["exchange"]), "short": version["exchange"]["short"]}


def descend(entry: dict[str, Any], loss: Loss, places: list[Any], seed: int) -> tuple[dict[str, Any], float]:
    """Return the best entry near `entry`: one number up or down at a time, by factors that shrink."""
    order, best, least = np.random.default_rng(seed), copy.deepcopy(entry), loss(entry)
    reach = dict.fromkeys(places, 0.3)
    while max(reach.values()) > 2e-3:
        for index in order.permutation(len(places)):
            place, old = places[index], get(best, places[index])
            for sign in (1, -1):
                put(best, place, old * math.exp(sign * reach[place]))
                found = loss(best)
                if found < least - 1e-6:
                    least, reach[place] = found, min(1.5 * reach[place], 1.0)
                    break
                put(best, place, old)
            else:
                reach[place] *= 0.6
    return best, least


def fit(
    entry: dict[str, Any], rows: Sequence[Row], *, places: list[Any], restarts: int
) -> tuple[dict[str, Any], float]:
    """Return the best of several descents, each from a shaken best one, and its loss."""
    loss = Loss(entry, rows)
    best, least = descend(entry, loss, places, 0)
    for seed in range(1, restarts + 1):
        shaken, noise = copy.deepcopy(best), np.random.default_rng(seed).normal(size=len(places))
        for place, size in zip(places, noise, strict=True):
            put(shaken, place, get(shaken, place) * math.exp(0.25 * size))
        found, value = descend(shaken, loss, places, seed)
        if value < least:
            best, least = found, value
    share(best)
    return best, least


def rounded(entry: Any) -> Any:
    """Return the entry with three significant digits."""
    if isinstance(entry, dict):
        return {key: rounded(value) for key, value in entry.items()}
    if isinstance(entry, list):
        return [rounded(value) for value in entry]
    # Less than 10 ns is no time that these measurements can tell from none; all other numbers are larger than 1e-3.
    return (float(f"{entry:.3g}") if entry >= 1e-8 else 0.0) if isinstance(entry, float) else entry


def fit_all(
    starts: dict[str, dict[str, Any]], rows: Sequence[Row], *, only: tuple[str, ...], restarts: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return every entry fitted to its own systems' rows, and what there is to tell about each."""
    fitted, told = {}, {}
    for name, entry in starts.items():
        mine = [row for row in rows if row.is_fitting and row.system in entry["systems"]]
        places = list(free(entry, only=only))
        best, loss = fit(entry, mine, places=places, restarts=restarts)
        fitted[name] = rounded(best)
        told[name] = {"parameters": len(places), "rows": len(mine), "loss": round(float(loss), 4)}
        harness.say(f"{name}: {told[name]}")
    return fitted, told


def main() -> None:
    """Fit every generation and write the catalogue."""
    flags = harness.parser(__doc__).parse_args()
    restarts = RESTARTS * (3 if flags.full else 1)
    first, second = read_rows(FOLDER / "nccl_aiconfigurator.csv"), read_rows(FOLDER / "nccl_vidur.csv")
    fitted, told = fit_all(generations(), first, only=(), restarts=restarts)
    outside, told_outside = fit_all(profiled(fitted), second, only=OUTSIDE, restarts=restarts)
    patient = fitted["NVLink-5"]["versions"]
    patient |= dict.fromkeys(PATIENT, patient[PATIENT[0]])
    # One message of these crossed nodes in the fitting half; the other loosely paired system has more, and its network.
    few, like = "NVLink-3 a100_pairwise_nvlink", "NVLink-4 h100_pairwise_nvlink"
    lent = {few: outside[few] | {"network_exchange": outside[like]["network_exchange"]}}
    again, told_again = fit_all(lent, second, only=("launch", "widths"), restarts=restarts)
    outside, told_outside = outside | again, told_outside | told_again
    text = yaml.dump(fitted | outside, sort_keys=False, width=110, Dumper=_NoAliases)
    CATALOGUE.write_text(HEAD + text, encoding="utf-8")
    harness.finish({"generations": told | told_outside}, flags)


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    main()
