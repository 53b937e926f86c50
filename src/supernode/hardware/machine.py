"""What is a machine? Cards, how they are grouped and joined, and what feeds and cools them, as one value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from supernode.errors import SpecError
from supernode.hardware.calibration import Calibration
from supernode.hardware.parts import Card, Cooling, Link, Node, Supply, Switch
from supernode.schema.spread import MOST_CARDS

TOPOLOGIES = ("ring", "torus", "full_mesh", "switched", "hybrid")
DIRECT = ("ring", "torus", "full_mesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A level of the fabric: groups of so many cards, and what a card has towards the rest of its group.

    Attributes:
        name: of the group: `node`, `rack`, `row`.
        cards: cards of one group, numbered one after the other.
        bandwidth: bytes/s from each card to the others of the group while all send, one direction.
        latency: seconds that a small message takes between neighbours at this level.
    """

    name: str
    cards: int
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A supernode, a cluster or this computer.

    Cards are numbered node by node; on a torus row-major, so that the last coordinate changes first.

    Attributes:
        node_cards: cards of one host.
        topology: ring, torus, full_mesh, switched or hybrid.
        shape: sizes of the torus, one for a ring; empty elsewhere.
        tiers: innermost first; the last one holds every card. On a torus their sizes need not divide each other: in
            a row of six, two cards and three cards are both lines.
        node: what surrounds the cards of a host; None where the cards are the computer's own cores.
        hosts: how many nodes there are.
        cooling_units: units of `cooling`.
        supplies: power supplies, spare ones included.
        switches: kinds of switches with how many there are.
        cables: kinds of links with how many there are, the cards' own scale-up links left out.
        dpus: data processing units.
        cores: CPU cores that stand in for cards; 0 where the cards are accelerators.
        host_memory: bytes over all hosts.
        calibration: what was measured on this computer; None for every other machine, and before it is calibrated.
        notes: where the description comes from, where the reader should know.
    """

    name: str
    card: Card
    card_count: int
    node_cards: int
    topology: str
    shape: tuple[int, ...] = ()
    tiers: tuple[Tier, ...]
    cooling: Cooling
    cooling_units: int = 1
    supply: Supply
    supplies: int = 2
    switches: tuple[tuple[Switch, int], ...] = ()
    cables: tuple[tuple[Link, int], ...] = ()
    node: Node | None = None
    hosts: int = 1
    dpus: int = 0
    host_memory: int = 0
    cores: int = 0
    calibration: Calibration | None = field(default=None, repr=False, hash=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.card_count <= MOST_CARDS:
            raise SpecError(f"`card_count` is {self.card_count}", hint=f"choose 1 to {MOST_CARDS:,} cards.")
        if not 1 <= self.node_cards <= self.card_count:
            raise SpecError(f"`node_cards` is {self.node_cards} of {self.card_count}", hint="choose 1 to `card_count`.")
        if self.topology not in TOPOLOGIES:
            raise SpecError(f"`topology` is {self.topology!r}", hint=f"choose one of {', '.join(TOPOLOGIES)}.")
        has_shape = self.topology in ("ring", "torus")
        if has_shape and (not self.shape or math.prod(self.shape) != self.card_count or min(self.shape) < 1):
            raise SpecError(
                f"`shape` is {self.shape} and `card_count` {self.card_count}", hint="the sizes multiply to the cards."
            )
        if not has_shape and self.shape:
            raise SpecError(f"`shape` is {self.shape} on a {self.topology} fabric", hint="leave it out.")
        sizes = [tier.cards for tier in self.tiers]
        if not sizes or sizes[-1] != self.card_count or sizes != sorted(set(sizes)):
            raise SpecError(
                f"`tiers` hold {sizes} cards on a machine of {self.card_count}",
                hint="give them innermost first, each larger than the one before, the last with every card.",
            )

    @property
    def is_direct(self) -> bool:
        """Whether cards are joined to each other without a switch between."""
        return self.topology in DIRECT

    @property
    def nodes(self) -> int:
        """Groups of `node_cards` cards, the last one perhaps part-filled."""
        return -(-self.card_count // self.node_cards)

    @property
    def nested_tiers(self) -> tuple[Tier, ...]:
        """The tiers that each hold whole numbers of the one before, and the outermost.

        A tier of which the machine is no whole number (racks of 64 cards under 96) is left out; the last node may be
        part-filled.
        """
        kept, last = [self.tiers[0]], self.tiers[-1]
        for tier in self.tiers[1:-1]:
            if tier.cards % kept[-1].cards == 0 and last.cards % tier.cards == 0:
                kept.append(tier)
        return (*kept, last) if len(self.tiers) > 1 else (last,)

    @property
    def cpus(self) -> int:
        """CPU packages over all hosts."""
        return self.node.cpus * self.hosts if self.node else 1

    @property
    def memory(self) -> int:
        """Bytes of all cards together."""
        return self.card.memory * self.card_count

    @property
    def unified_memory(self) -> int:
        """Bytes of all cards and hosts together; CPU cores have no memory but the host's."""
        return self.memory if self.card.kind == "cpu" else self.memory + self.host_memory

    @property
    def link_bandwidth(self) -> float:
        """Bytes/s of one link to a neighbour, one direction; of the card's port where a switch is between.

        The card's scale-up links are shared evenly by its neighbours' directions: a 3D torus has six.
        """
        if self.topology == "full_mesh":
            return self.card.scale_up_bandwidth / max(1, self.card_count - 1)
        if self.is_direct:
            return self.card.scale_up_bandwidth / (2 * max(1, sum(size > 1 for size in self.shape)))
        return self.tiers[0].bandwidth

    def tier_for(self, cards: int) -> Tier:
        """Return the slowest tier that an aligned contiguous group of so many cards crosses.

        Groups are aligned: group `i` holds cards `i * cards` to `(i + 1) * cards - 1`. A tier whose groups cut some of
        them does not hold them.

        Raises:
            SpecError: `cards` is below 1 or above the machine's.
        """
        if not 1 <= cards <= self.card_count:
            raise SpecError(f"{cards} cards of a machine of {self.card_count}", hint=f"choose 1 to {self.card_count}.")
        holds = (tier for tier in self.tiers if tier.cards >= cards and tier.cards % cards == 0)
        return next(holds, self.tiers[-1])
