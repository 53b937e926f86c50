"""What would move the size at which a cluster's efficiency breaks? The curve after one change at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from supernode.simulation.million import GOOD, SIZES, Point, Tiers, Work, copies_of, curve, strong_curve


def efficiency_at(tiers: Tiers, work: Work, supernodes: int) -> float:
    """Return the efficiency of so many supernodes relative to one."""
    return curve(tiers, work, (1, supernodes))[-1].efficiency


def least_bandwidth(tiers: Tiers, work: Work, supernodes: int, *, least: float = GOOD) -> float:
    """Return the bytes/s between supernodes below which so many fall under `least`, to 1%; infinite if none helps."""
    low, high = tiers.between / 1024, tiers.between * 1024
    if efficiency_at(replace(tiers, between=high), work, supernodes) < least:
        return float("inf")
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        is_enough = efficiency_at(replace(tiers, between=middle), work, supernodes) >= least
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def most_spread(tiers: Tiers, work: Work, supernodes: int, *, least: float = GOOD) -> float:
    """Return the spread between nodes above which so many supernodes fall under `least`; 0 if any is too much."""
    low, high = 0.0, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        is_good = efficiency_at(replace(tiers, spread=middle), work, supernodes) >= least
        low, high = (middle, high) if is_good else (low, middle)
    return low


def changes(tiers: Tiers, work: Work) -> dict[str, tuple[Tiers, Work]]:
    """Return what one could change, one at a time."""
    software = work.software
    changed = {
        "as assumed": (tiers, work),
        "2 × bandwidth between supernodes": (replace(tiers, between=2 * tiers.between), work),
        "half the bandwidth between supernodes": (replace(tiers, between=tiers.between / 2), work),
        "2 × batch": (tiers, replace(work, micro_batches=2 * work.micro_batches)),
        "1/4 of the batch": (tiers, replace(work, micro_batches=max(1, work.micro_batches // 4))),
        "gradients compressed to 10%": (replace(tiers, left=0.1), work),
        "gradients of 2 bytes": (tiers, replace(work, software=replace(software, gradient_bytes=2))),
        "no overlap with the backward": (tiers, replace(work, software=replace(software, overlaps_data=False))),
        "nodes alike (no spread)": (replace(tiers, spread=0.0), work),
        "3 × spread between nodes": (replace(tiers, spread=3 * tiers.spread), work),
    }
    if not tiers.node_cards % (2 * work.tensor) and work.pipeline % 2 == 0:
        shorter = replace(work, tensor=2 * work.tensor, pipeline=work.pipeline // 2)
        changed["half the stages, twice the tensor"] = (tiers, shorter)
    return changed


def sensitivities(tiers: Tiers, work: Work, sizes: Sequence[int] = SIZES) -> dict[str, list[Point]]:
    """Return the curve after each change, the same work on each card."""
    return {name: curve(*changed, sizes) for name, changed in changes(tiers, work).items()}


def strong_sensitivities(tiers: Tiers, work: Work, batch: int, sizes: Sequence[int] = SIZES) -> dict[str, list[Point]]:
    """Return the curve after each change, the same batch for all sizes on which each copy has a sample of it."""
    found = {}
    for name, (cluster, job) in changes(tiers, work).items():
        samples = batch * job.micro_batches // work.micro_batches
        enough = [count for count in sizes if count * copies_of(cluster, job) <= samples]
        found[name] = strong_curve(cluster, job, samples, enough)
    return found
