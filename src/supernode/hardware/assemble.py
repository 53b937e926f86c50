"""Which machine do a few words describe? Builds one from a card, a count, an interconnect and a cooling."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from supernode.errors import SpecError
from supernode.hardware import load
from supernode.hardware.machine import Machine, Tier
from supernode.hardware.parts import Card, Link, Switch
from supernode.hardware.power import power
from supernode.registry import did_you_mean, lookup
from supernode.schema.spread import MOST_CARDS

MOST_MESH_CARDS = 1024  # a full mesh of n cards has n (n - 1) / 2 links
NODES_IN_A_RACK = 8

Wiring = tuple[str, tuple[int, ...], tuple[Tier, ...]]


def _torus_tiers(card: Card, shape: tuple[int, ...]) -> tuple[Tier, ...]:
    """Return what contiguous groups have: lines one link, rows two, some rows three, planes four, and so on."""
    link = card.scale_up_bandwidth / (2 * max(1, sum(size > 1 for size in shape)))
    tiers, inner, links = [], 1, 0
    for size in reversed(shape):
        for part in range(2, size + 1):
            if size % part == 0:
                bandwidth = (links + (2 if part == size else 1)) * link
                tiers.append(Tier(name="block", cards=inner * part, bandwidth=bandwidth, latency=card.scale_up_latency))
        inner *= size
        links += 2 if size > 1 else 0
    alone = Tier(name="card", cards=1, bandwidth=card.scale_up_bandwidth, latency=card.scale_up_latency)
    return tuple(tiers) or (alone,)


def torus_shape(cards: int, dims: int) -> tuple[int, ...]:
    """Return the sizes of the most cube-like torus, smallest first.

    >>> torus_shape(512, 3), torus_shape(384, 3), torus_shape(7, 3)
    ((8, 8, 8), (6, 8, 8), (1, 1, 7))
    """
    if dims == 1:
        return (cards,)
    best: tuple[int, ...] = ()
    for size in range(round(cards ** (1 / dims)) + 1, 0, -1):
        if cards % size == 0:
            shape = tuple(sorted((size, *torus_shape(cards // size, dims - 1))))
            if not best or sum(shape) < sum(best):
                best = shape
    return best


def _torus(dims: int) -> Callable[..., Wiring]:
    def wire(card: Card, cards: int, *, shape: tuple[int, ...], **_: Any) -> Wiring:
        shape = shape or torus_shape(cards, dims)
        return "ring" if dims == 1 else "torus", shape, _torus_tiers(card, shape)

    return wire


def _full_mesh(card: Card, cards: int, **_: Any) -> Wiring:
    if cards > MOST_MESH_CARDS:
        raise SpecError(
            f"a full mesh of {cards:,} cards has {cards * (cards - 1) // 2:,} links",
            hint=f"choose at most {MOST_MESH_CARDS} cards, or `interconnect: Fat_Tree`.",
        )
    tier = Tier(name="mesh", cards=cards, bandwidth=card.scale_up_bandwidth, latency=card.scale_up_latency)
    return "full_mesh", (), (tier,)


def _switched(card: Card, cards: int, *, node_cards: int, oversubscription: float, **_: Any) -> Wiring:
    node = Tier(name="node", cards=node_cards, bandwidth=card.scale_up_bandwidth, latency=card.scale_up_latency)
    # A second layer of switches and its cables: one more hop up and one down.
    latency = 1.5 * card.scale_up_latency
    whole = Tier(name="machine", cards=cards, bandwidth=card.scale_up_bandwidth / oversubscription, latency=latency)
    return "switched", (), (whole,) if node_cards == cards else (node, whole)


def _hybrid(
    card: Card, cards: int, *, node_cards: int, oversubscription: float, in_node: str, between_nodes: str, **_: Any
) -> Wiring:
    if in_node:
        inner = load.link(in_node)
        node = Tier(name="node", cards=node_cards, bandwidth=inner.bandwidth, latency=inner.latency)
    else:
        node = Tier(name="node", cards=node_cards, bandwidth=card.scale_up_bandwidth, latency=card.scale_up_latency)
    outer, optical = load.link(between_nodes), load.link("Optical-400")
    rack = Tier(name="rack", cards=node_cards * NODES_IN_A_RACK, bandwidth=outer.bandwidth, latency=outer.latency)
    narrow = min(outer.bandwidth, optical.bandwidth) / oversubscription
    whole = Tier(name="machine", cards=cards, bandwidth=narrow, latency=optical.latency)
    if cards <= rack.cards:
        whole = replace(rack, cards=cards)
    return "hybrid", (), (*(tier for tier in (node, rack) if tier.cards < cards), whole if cards > node_cards else node)


INTERCONNECTS: Mapping[str, Callable[..., Wiring]] = {
    "Ring": _torus(1),
    "2D_Torus": _torus(2),
    "2D_Ring": _torus(2),
    "3D_Ring": _torus(3),
    "3D_Torus": _torus(3),
    "Full_Mesh": _full_mesh,
    "Switched": _switched,
    "Fat_Tree": _switched,
    "Hybrid": _hybrid,
}

NODES = {"NVIDIA": "HGX-8", "AMD": "HGX-8", "Huawei": "CloudMatrix-8", "Google": "TPU-4"}
SCALE_UP_SWITCHES = {"NVIDIA": "NVLink-5", "Huawei": "UB-L2"}


def build_machine(
    card_count: int = 512,
    interconnect: str = "3D_Ring",
    cooling: str = "liquid",
    card: str | Card = "B200",
    *,
    name: str = "",
    node: str = "",
    shape: tuple[int, ...] = (),
    in_node: str = "",
    between_nodes: str = "InfiniBand-NDR",
    oversubscription: float = 1.0,
    switches: tuple[tuple[str, int], ...] | None = None,
    cooling_units: int = 0,
    supply: str = "PSU-3300",
    dpus: int = 0,
) -> Machine:
    """Return a machine assembled from the catalogue.

    Args:
        card_count: cards, 1 to 1,048,576.
        interconnect: a name in `INTERCONNECTS`; upper and lower case are the same.
        cooling: liquid, immersion or air.
        card: a name in the catalogue, or the card itself.
        name: empty names it after its cards.
        node: node of the catalogue; empty takes the vendor's usual one.
        shape: sizes of the torus; empty takes the most cube-like.
        in_node: link of the catalogue inside a hybrid's node (`PCIe-5`); empty takes the card's own links.
        between_nodes: link of the catalogue between a hybrid's nodes, one for each card.
        oversubscription: cards' bandwidth over the outermost tier's, 1 or more.
        switches: kinds and counts; None counts the switches that a full fabric takes.
        cooling_units: 0 takes as many as the heat at full load needs.
        dpus: data processing units.

    Raises:
        SpecError: an unknown name, or a number outside its limits.
    """
    if isinstance(card_count, bool) or not isinstance(card_count, int) or not 1 <= card_count <= MOST_CARDS:
        raise SpecError(f"`card_count` is {card_count!r}", hint=f"choose 1 to {MOST_CARDS:,} cards.")
    if not math.isfinite(oversubscription) or oversubscription < 1:
        raise SpecError(f"`oversubscription` is {oversubscription}", hint="choose 1 (full bandwidth) or more.")
    chosen = card if isinstance(card, Card) else load.card(card)
    host = load.node(node or NODES.get(chosen.vendor, "XPU-8"))
    node_cards = min(host.cards, card_count)
    topology, sizes, tiers = lookup(interconnect, INTERCONNECTS, kind="interconnect")(
        chosen, card_count, node_cards=node_cards, shape=shape, oversubscription=oversubscription,
        in_node=in_node, between_nodes=between_nodes,
    )  # fmt: skip
    named = tuple((load.switch(kind), count) for kind, count in switches or ())
    hosts = -(-card_count // node_cards)
    bare = Machine(
        name=name or f"{card_count} × {chosen.name}",
        card=chosen,
        card_count=card_count,
        node_cards=node_cards,
        topology=topology,
        shape=sizes,
        tiers=tiers,
        cooling=load.cooling(cooling),
        supply=load.supply(supply),
        switches=named if switches is not None else _switches(chosen, card_count, topology),
        cables=_cables(card_count, between_nodes, tiers) if topology == "hybrid" else (),
        node=host,
        hosts=hosts,
        dpus=dpus,
        host_memory=host.memory * hosts,
    )
    return _fed_and_cooled(bare, cooling_units=cooling_units)


def _fed_and_cooled(machine: Machine, *, cooling_units: int) -> Machine:
    """Return the machine with supplies for its peak, twice over, and cooling for its heat."""
    peak = power(machine)
    return replace(
        machine,
        supplies=2 * math.ceil(peak.it / machine.supply.rated),
        cooling_units=cooling_units or math.ceil(peak.heat / machine.cooling.capacity),
    )


def _switches(card: Card, cards: int, topology: str) -> tuple[tuple[Switch, int], ...]:
    """Return the switches of a folded Clos network that gives every card its full bandwidth."""
    if topology == "switched":
        kind = load.switch(SCALE_UP_SWITCHES.get(card.vendor, "Switch-32x400"))
        ports = math.ceil(cards * card.scale_up_bandwidth / kind.port_bandwidth)
    elif topology == "hybrid":
        kind, ports = load.switch("Quantum-2"), cards
    else:
        return ()
    levels, reach = 1, kind.ports
    while reach < cards:
        levels, reach = levels + 1, reach * kind.ports // 2
    return ((kind, (levels - 1) * math.ceil(ports / (kind.ports // 2)) + math.ceil(ports / kind.ports)),)


def _cables(cards: int, between_nodes: str, tiers: tuple[Tier, ...]) -> tuple[tuple[Link, int], ...]:
    """Return one cable a card out of its node and, beyond a rack, one more between the layers of switches."""
    if len(tiers) == 1:
        return ()
    first = (load.link(between_nodes), cards)
    return (first, (load.link("Optical-400"), cards)) if len(tiers) > 2 else (first,)


_COUNTED = re.compile(r"([0-9]{1,9})[x×]([^/]+)(?:/(\S+))?")
MACHINES: Mapping[str, Mapping[str, Any]] = {
    "supernode-32": {"card_count": 32, "interconnect": "Hybrid", "card": "H100"},
    "supernode-64": {"card_count": 64, "interconnect": "Switched", "card": "GB200"},
    # Four layers of switches, each with a 400 Gbit/s port for every one of 256 cards: eight of 32 ports.
    "supernode-256": {
        "card_count": 256, "interconnect": "3D_Torus", "card": "XPU-64", "switches": (("Switch-32x400", 32),),
        "cooling_units": 1,
    },
    "supernode-384": {
        "card_count": 384, "interconnect": "Switched", "card": "Ascend-910C",
        "switches": (("UB-L1", 336), ("UB-L2", 112)),
    },
    "supernode-512": {"card_count": 512, "interconnect": "3D_Torus", "card": "B200"},
    "supernode-1024": {"card_count": 1024, "interconnect": "3D_Torus", "card": "B200", "node": "Pod-64", "dpus": 4},
}  # fmt: skip


def predefined(name: str) -> Machine:
    """Return one of the machines that `MACHINES` describes, or of so many cards.

    Args:
        name: a name, or `512xH100`: cards in nodes with InfiniBand between them; `512xB200/3D_Torus` joins them
            otherwise.

    Raises:
        SpecError: nobody knows the name, or it is none.

    >>> predefined("16xH100").nodes, predefined("64xB200/3D_Torus").shape
    (2, (4, 4, 4))
    """
    if not isinstance(name, str):
        raise SpecError(f"a machine's name is {name!r}", hint="name one, such as `supernode-512` or `512xH100`.")
    if counted := _COUNTED.fullmatch(name):
        cards, card, interconnect = counted.groups()
        return build_machine(int(cards), interconnect or "Hybrid", card=card, name=name)
    key = next((known for known in MACHINES if known.lower() == name.lower()), "")
    if not key:
        hint = f"{did_you_mean(name, MACHINES)} Or so many cards: `512xH100`."
        raise SpecError(f"unknown machine `{name}`", hint=hint)
    return build_machine(name=key, **MACHINES[key])
