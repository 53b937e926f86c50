"""How near to the best possible does adaptive routing come, what is it worth over a tree, and what do failures cost?

Small fabrics are compared with the exact multi-commodity optimum (HiGHS); failures are tried one by one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import harness
from supernode.errors import CapacityError
from supernode.fabric.adaptive import adaptive, balance
from supernode.fabric.bounds import optimum, tightest_cut
from supernode.fabric.flows import rates
from supernode.fabric.level import Level
from supernode.fabric.network import Ints, Network
from supernode.fabric.routes import Router, Routes, shortest, spanning_tree, spread
from supernode.fabric.shapes import dragonfly, fat_tree, joined, layered, rail, torus

LINK = 50e9  # bytes/s; ratios do not depend on it
TOLERANCE = 0.98  # of the optimum, or of what the cut lets through
Pairs = tuple[Ints, Ints]


def mesh(*sizes: int) -> Network:
    """Return an n-dimensional full mesh."""
    return joined([Level(kind="full_mesh", size=size, bandwidth=LINK) for size in sizes])


SMALL: Mapping[str, Callable[[], Network]] = {
    "ring of 8": lambda: torus((8,), bandwidth=LINK),
    "torus 4×4": lambda: torus((4, 4), bandwidth=LINK),
    "torus 3×4": lambda: torus((3, 4), bandwidth=LINK),
    "torus 3×3×3": lambda: torus((3, 3, 3), bandwidth=LINK),
    "full mesh of 8": lambda: mesh(8),
    "full mesh 4×4": lambda: mesh(4, 4),
    "fat tree 4×4, 4 spines": lambda: fat_tree((4, 4), (1, 4), bandwidth=LINK),
    "fat tree 4×4, 2 spines": lambda: fat_tree((4, 4), (1, 2), bandwidth=LINK),
    "fat tree 2×2×4, three layers": lambda: fat_tree((2, 2, 4), (1, 2, 2), bandwidth=LINK),
    "rails 4×4, 2 spines": lambda: rail(4, 4, inside=4 * LINK, bandwidth=LINK, spines=2),
    "dragonfly 5×2×2": lambda: dragonfly(5, 2, 2, bandwidth=LINK),
    "dragonfly 3×2×2, 2 links": lambda: dragonfly(3, 2, 2, bandwidth=LINK, links=2),
}

FAILING: Mapping[str, Callable[[], Network]] = {
    "ring of 8": SMALL["ring of 8"],
    "torus 3×3": lambda: torus((3, 3), bandwidth=LINK),
    "torus 4×4": SMALL["torus 4×4"],
    "torus 2×2×3": lambda: torus((2, 2, 3), bandwidth=LINK),
    "full mesh of 6": lambda: mesh(6),
    "fat tree 2×4, 2 spines, cards on two leaves": lambda: fat_tree((2, 4), (2, 1), bandwidth=LINK),
    "fat tree 4×2, 2 spines": lambda: fat_tree((4, 2), (1, 2), bandwidth=LINK),
    "rails 4×2": lambda: rail(4, 2, inside=4 * LINK, bandwidth=LINK),
}


def everyone(cards: int) -> Pairs:
    """Return all pairs of cards."""
    source, target = np.divmod(np.arange(cards * cards), cards)
    return source[source != target], target[source != target]


def patterns(cards: int, *, random: int) -> Iterator[tuple[str, Pairs]]:
    """Yield all-to-all, permutations by chance, and two that trouble fixed routes: half way round, and mirrored."""
    yield "all-to-all", everyone(cards)
    card = np.arange(cards)
    yield "shift by half", (card, (card + cards // 2) % cards)
    mirror = cards - 1 - card
    yield "mirror", (card[mirror != card], mirror[mirror != card])
    for seed in range(random):
        other = np.random.default_rng(seed).permutation(cards)
        yield f"permutation {seed}", (card[other != card], other[other != card])


def least_rate(network: Network, routes: Routes) -> float:
    """Return bytes/s of the slowest flow while all are under way, by max-min fair share."""
    return float(rates(network, routes).min())


def is_delivered(network: Network, routes: Routes) -> bool:
    """Return whether every flow leaves its source whole, enters its target whole, and is kept by nobody between."""
    gain = np.zeros((network.vertices, routes.source.size))
    entries = routes.part.tocoo()
    np.add.at(gain, (network.head[entries.row], entries.col), entries.data)
    np.subtract.at(gain, (network.tail[entries.row], entries.col), entries.data)
    flow = np.arange(routes.source.size)
    gain[routes.target, flow] -= 1
    gain[routes.source, flow] += 1
    return bool(np.abs(gain).max() < 1e-6 and (network.bandwidth[entries.row] > 0).all())


def against_optimum(*, random: int) -> list[dict[str, Any]]:
    """Return adaptive routing, even spreading and single paths beside the optimum, for each fabric and pattern."""
    rows = []
    for name, build in SMALL.items():
        network = build()
        for pattern, (source, target) in patterns(network.cards, random=random):
            start = time.process_time()
            found = balance(network, source, target)
            spent = time.process_time() - start
            best = optimum(network, source, target)
            rows.append(
                {
                    "fabric": name,
                    "traffic": pattern,
                    "over_optimum": round(least_rate(network, found.routes) / best, 5),
                    "proven_without_solver": round(found.throughput / found.bound, 5),
                    "spread_over_optimum": round(least_rate(network, spread(network, source, target)) / best, 4),
                    "single_over_optimum": round(
                        least_rate(network, shortest(network, source, target, seed=0)) / best, 4
                    ),
                    "cpu_seconds": round(spent, 3),
                }
            )
    return rows


TREES: Mapping[str, Callable[[], Network]] = {
    "32 cards, fat tree 8×4, 4 spines": lambda: fat_tree((8, 4), (1, 4), bandwidth=LINK),
    "32 cards, torus 4×4×2": lambda: torus((4, 4, 2), bandwidth=LINK),
    "32 cards, dragonfly 4×4×2": lambda: dragonfly(4, 4, 2, bandwidth=LINK, links=2),
    "256 cards, fat tree 16×16, 4 spines": lambda: fat_tree((16, 16), (1, 4), bandwidth=LINK),
    "256 cards, torus 8×8×4": lambda: torus((8, 8, 4), bandwidth=LINK),
    "256 cards, four layers of switches": lambda: layered(256, 4, 32, bandwidth=LINK),
}

FIXED_TRAFFIC = ("256 cards, four layers of switches",)  # 65,280 flows with some 40 ways each would take minutes


def against_tree() -> list[dict[str, Any]]:
    """Return what adaptive routing over all links is worth over the best single tree of the same links."""
    rows = []
    for name, build in TREES.items():
        network = build()
        tree = spanning_tree(network)
        for pattern, (source, target) in patterns(network.cards, random=1):
            if pattern != "shift by half" and name in FIXED_TRAFFIC:
                continue
            ours = least_rate(network, adaptive(network, source, target))
            theirs = least_rate(tree, shortest(tree, source, target))
            rows.append(
                {
                    "case": f"{name}, {pattern}",
                    "ratio": round(ours / theirs, 3),
                    "adaptive_GBps_per_flow": round(ours / 1e9, 4),
                    "tree_GBps_per_flow": round(theirs / 1e9, 4),
                }
            )
    return rows


def after_failures() -> list[dict[str, Any]]:
    """Return, for each fabric, what the worst single failure of a link or of a spare switch costs."""
    rows = []
    for name, build in FAILING.items():
        whole = build()
        source, target = everyone(whole.cards)
        before = least_rate(whole, adaptive(whole, source, target))
        pairs = [(int(a), int(b)) for a, b in zip(whole.tail, whole.head, strict=True) if a < b]
        damaged = [(f"link {whole.name(a)} – {whole.name(b)}", whole.without(links=[(a, b)])) for a, b in pairs]
        damaged += [
            (whole.name(vertex), whole.without(vertices=[vertex])) for vertex in range(whole.cards, whole.vertices)
        ]
        for lost, network in damaged:
            rows.append({"fabric": name, "lost": lost, **_failure(network, source, target, before=before)})
    return rows


def _failure(network: Network, source: Ints, target: Ints, *, before: float) -> dict[str, Any]:
    try:
        routes = adaptive(network, source, target)
    except CapacityError as error:
        return {"is_cut_off": True, "error": error.message}
    after = least_rate(network, routes)
    bound = tightest_cut(network, source, target).ratio
    return {
        "is_cut_off": False,
        "is_delivered": is_delivered(network, routes),
        "lost_share": round(1 - after / before, 4),
        "cut_lets_through_share": round(min(1.0, bound / before), 4),
        "over_cut": round(after / bound, 5),
        "over_optimum": round(after / optimum(network, source, target), 5),
    }


def line_rate() -> dict[str, float]:
    """Return which part of its port each card of a full fat tree of 64 gets in permutations, by way of routing."""
    network = fat_tree((8, 8), (1, 8), bandwidth=LINK)
    shares: dict[str, list[float]] = {"adaptive": [], "one path by hash": []}
    routers: Mapping[str, Router] = {
        "adaptive": adaptive,
        "one path by hash": lambda network, source, target: shortest(network, source, target, seed=0),
    }
    for pattern, (source, target) in patterns(network.cards, random=4):
        if pattern == "all-to-all":
            continue
        for name, route in routers.items():
            found = rates(network, route(network, source, target))
            shares[name].append(float(found.mean()) / LINK)
    return {name: round(min(values), 4) for name, values in shares.items()}


def main() -> None:
    """Measure and print."""
    parser: argparse.ArgumentParser = harness.parser(__doc__)
    flags = parser.parse_args()
    optimal = against_optimum(random=8 if flags.full else 3)
    harness.say("against the optimum: done")
    trees = against_tree()
    harness.say("against trees: done")
    failures = after_failures()
    alive = [row for row in failures if not row["is_cut_off"]]
    cut_off = [row for row in failures if row["is_cut_off"]]
    worst = min(optimal, key=lambda row: row["over_optimum"])
    for row in optimal:
        harness.say(
            f"{row['fabric']:<30}{row['traffic']:<16} adaptive {row['over_optimum']:.4f} of the optimum, even spread "
            f"{row['spread_over_optimum']:.3f}, single path {row['single_over_optimum']:.3f}"
        )
    for row in trees:
        harness.say(f"{row['case']:<60} {row['ratio']:.2f} × the tree")
    result = {
        "worst_over_optimum": worst["over_optimum"],
        "worst_case": f"{worst['fabric']}, {worst['traffic']}",
        "cases": len(optimal),
        "over_tree": {row["case"]: row["ratio"] for row in trees},
        "line_rate_share": line_rate(),
        "failures": len(failures),
        "all_delivered": all(row["is_delivered"] for row in alive),
        "cut_off": sorted({f"{row['fabric']}: {row['lost']}" for row in cut_off}),
        "worst_over_optimum_after_failure": min(row["over_optimum"] for row in alive),
        "worst_over_cut_after_failure": min(row["over_cut"] for row in alive),
        "failures_that_cost_more_than_the_cut": sum(row["over_cut"] < TOLERANCE for row in alive),
        "against_optimum": optimal,
        "after_failures": {
            name: max((row for row in alive if row["fabric"] == name), key=lambda row: row["lost_share"])
            for name in FAILING
        },
        "machine": harness.machine("numpy", "scipy"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
