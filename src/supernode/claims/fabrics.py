"""S3: what do fabrics, algorithms and routes bring? Communication share, all-to-all, line rate, trees, 256 cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from supernode.claims.claim import Setting, Shown, Sweep
from supernode.claims.plain import beside
from supernode.collectives.exchange import direct_exchange
from supernode.collectives.grid import multi_ring
from supernode.fabric.adaptive import balance
from supernode.fabric.choice import choose, collective_time
from supernode.fabric.flows import rates, schedule_time
from supernode.fabric.level import Level, levels_of
from supernode.fabric.network import Ints, Network
from supernode.fabric.routes import shortest, spanning_tree
from supernode.fabric.shapes import fat_tree, joined, rail, torus
from supernode.forecast.network import Wires
from supernode.forecast.rates import card_of
from supernode.forecast.times import StepParts, step_parts
from supernode.hardware.assemble import build_machine, predefined
from supernode.workload.presets import public_model
from supernode.workload.shape import Numbers
from supernode.workload.strategy import Software, make_strategies

PLAIN_SHARE = 0.35
"""Of the claim: what communication takes before."""
LINK = 50e9  # bytes/s: a 400 Gbit/s port; the ratios do not depend on it
MIB = 2.0**20


def communication_share(setting: Setting) -> Shown:
    """Return the part of a 32-card step that waits for others, in the job where it was 35% before."""

    def ours(before: float) -> float:
        return _share_after(setting, before)

    return Shown(
        ours=ours(PLAIN_SHARE),
        baseline="the same job and cards, gradients summed after the backward by one ring over the network cards",
        sweep=Sweep(over="share before", points=tuple((part, ours(part)) for part in (0.2, 0.3, 0.35, 0.4, 0.5, 0.6))),
        assumptions=(
            "Llama 3 8B on 32 H100: nodes of 8 on NVLink, a 400 Gbit/s network card for each card between them.",
            "Each step has as many samples as make the plain share; gradients of 4 bytes, whole copies.",
            "After: reduced in the node, summed between nodes, gathered in the node, begun inside the backward.",
        ),
        by="forecast.times.step_parts over fabric.choice",
    )


def _share_after(setting: Setting, before: float) -> float:
    machine = beside(build_machine(32, "Hybrid", card="H100"), network=setting.network)
    card, model = card_of(machine), public_model("llama3-8b")
    fitted = card.fitted
    node, *outer = levels_of(machine)
    levels = (
        replace(node, bandwidth=node.bandwidth * fitted.inside),
        *(replace(level, bandwidth=level.bandwidth * fitted.outside) for level in outer),
    )
    flat = (replace(levels[-1], size=machine.card_count),)

    def step(samples: float, *, plainly: bool) -> StepParts:
        ways = make_strategies(data=32, batch=32 * samples, sequence=8192, micro_batch=1)
        software = Software(overlaps_data=not plainly)

        def scatter(_: Wires, nbytes: Numbers, __: Numbers, ___: Numbers) -> Numbers:
            size = float(nbytes)
            if not size:
                return np.zeros(())
            over = flat if plainly else levels
            name = "flat_ring" if plainly else choose("reduce_scatter", size, over)
            return np.asarray(collective_time("reduce_scatter", size, over, algorithm=name))

        return step_parts(model, ways, card, software, gather=scatter)

    # Waiting does not depend on how many samples a step has, computing is in proportion to them.
    one, two = step(1, plainly=True), step(2, plainly=True)
    each = float(two.total - one.total)
    waits = float(one.data)
    fixed = float(one.total) - each - waits
    samples = (waits * (1 - before) / before - fixed) / each
    after = step(max(samples, 1e-3), plainly=False)
    return float(after.data / after.total)


def hybrid_exchange(setting: Setting) -> Shown:
    """Return how much faster cards exchange everything with everybody when nodes have fast links inside."""

    def gain(cards: int, nbytes: float = 64 * MIB) -> float:
        machine = beside(build_machine(cards, "Hybrid", card="H100"), network=setting.network)
        node, port = machine.tiers[0], machine.tiers[-1]
        # Messages between nodes go by the fast links to the card whose network card meets their target's.
        hybrid = rail(
            machine.nodes, machine.node_cards, inside=node.bandwidth, bandwidth=port.bandwidth,
            spines=machine.node_cards, latency=port.latency / 2,
        )  # fmt: skip
        flat = (Level(kind="switch", size=cards, bandwidth=port.bandwidth, latency=port.latency / 2),)
        alone = collective_time("all_to_all", nbytes, flat, algorithm=choose("all_to_all", nbytes, flat))
        return float(alone) / schedule_time(direct_exchange(cards), hybrid, nbytes) - 1

    sizes = (16, 24, 32, 48, 64, 128)
    return Shown(
        ours=gain(32),
        baseline="the same cards on the network between nodes alone, a 400 Gbit/s port each",
        sweep=Sweep(over="cards", points=tuple((cards, gain(cards)) for cards in sizes)),
        assumptions=(
            "Each card holds 64 MiB for all; nodes of 8 H100 on NVLink, rails between them.",
            "What stays in the node is 7 of n − 1 parts: the more nodes, the less the links inside can take over, "
            "whatever their speed: at best (n − 1) / (n − 8).",
        ),
        by="fabric.flows, message by message",
    )


def line_rate(setting: Setting) -> Shown:
    """Return the part of their line rate that all cards reach at once with adaptive routes, the worst of five draws."""
    side = setting.radix or 8

    def reached(failed: int) -> float:
        network = _damaged(fat_tree((side, 8), (1, side), bandwidth=LINK), failed)
        return min(_permuted(network, seed) for seed in range(5))

    network = fat_tree((side, 8), (1, side), bandwidth=LINK)
    hashed = min(
        float(rates(network, shortest(network, *_permutation(network.cards, seed), seed=seed)).min()) / LINK
        for seed in range(5)
    )
    return Shown(
        ours=reached(0),
        baseline=f"one path for each flow, chosen by a hash: {hashed:.0%} of the line rate",
        sweep=Sweep(over="failed links between switches", points=tuple((n, reached(n)) for n in (0, 1, 2, 4))),
        assumptions=(
            f"{8 * side} cards under 8 leaf switches, as many links up as down; permutations by chance, long messages.",
            "The slowest flow counts. With links down, the cut allows less than the line rate.",
        ),
        by="fabric.adaptive, shared by max-min",
    )


def _permutation(cards: int, seed: int) -> tuple[Ints, Ints]:
    card, other = np.arange(cards), np.random.default_rng(seed).permutation(cards)
    return card[other != card], other[other != card]


def _permuted(network: Network, seed: int) -> float:
    source, target = _permutation(network.cards, seed)
    return float(rates(network, balance(network, source, target).routes).min()) / LINK


def _damaged(network: Network, failed: int) -> Network:
    """Return the network without some links between switches, no two of one switch where that can be."""
    between = (network.tail >= network.cards) & (network.head >= network.cards) & (network.tail < network.head)
    pairs = list(zip(network.tail[between].tolist(), network.head[between].tolist(), strict=True))
    return network.without(links=pairs[:: max(1, len(pairs) // 7)][:failed]) if failed else network


def over_tree(setting: Setting) -> Shown:
    """Return the bandwidth of all links, used adaptively, over one tree's, on the fabric that gains least of three."""
    side = setting.radix or 4
    fabrics = {
        f"torus {side}×{side}×2": torus((side, side, 2), bandwidth=LINK),
        f"fat tree {2 * side}×4, {side} spines": fat_tree((2 * side, 4), (1, side), bandwidth=LINK),
        f"fat tree {2 * side}×4, 2 spines": fat_tree((2 * side, 4), (1, 2), bandwidth=LINK),
    }
    found = {name: _tree_ratio(network) for name, network in fabrics.items()}
    return Shown(
        ours=min(found.values()),
        baseline="all traffic over a spanning tree, as bridged Ethernet would send it",
        sweep=Sweep(over="fabric", points=tuple(found.items())),
        assumptions=("All-to-all traffic; the slowest flow counts, and the fabric that gains least.",),
        by="fabric.adaptive and fabric.routes.spanning_tree",
    )


def _tree_ratio(network: Network) -> float:
    source, target = np.divmod(np.arange(network.cards**2), network.cards)
    source, target = source[source != target], target[source != target]
    tree = spanning_tree(network)
    best = float(rates(network, balance(network, source, target).routes).min())
    return best / float(rates(tree, shortest(tree, source, target)).min())


def wide_supernode(setting: Setting) -> Shown:
    """Return the all-reduce bandwidth of the 256-card supernode over that of 256 cards with a network port each."""
    machine = beside(predefined("supernode-256"), network=setting.network)
    levels = levels_of(machine)
    port = build_machine(256, "Hybrid", card="H100").tiers[-1]
    flat = (Level(kind="switch", size=256, bandwidth=port.bandwidth, latency=port.latency / 2),)

    network = joined(levels)
    # All dims at once; of different lengths, so message by message instead of in closed form.
    rings = multi_ring("all_reduce", tuple(level.size for level in levels))

    def quickest(nbytes: float, on: Sequence[Level]) -> float:
        return float(collective_time("all_reduce", nbytes, on, algorithm=choose("all_reduce", nbytes, on)))

    def gain(nbytes: float) -> float:
        here = min(quickest(nbytes, levels), schedule_time(rings, network, nbytes))
        return quickest(nbytes, flat) / here

    sizes = (MIB, 16 * MIB, 128 * MIB, 1024 * MIB)
    return Shown(
        ours=gain(1024 * MIB),
        baseline="256 cards with a 400 Gbit/s port each on a switched network, by its quickest algorithm",
        sweep=Sweep(over="MiB", points=tuple((size / MIB, gain(size)) for size in sizes)),
        assumptions=(
            f"The supernode is a torus of {'×'.join(map(str, machine.shape))} with "
            f"{machine.link_bandwidth / 1e9:.0f} GB/s a link, each way; all-reduce of 1 GiB.",
        ),
        by="fabric.choice, and fabric.flows message by message",
    )
