"""Who holds how much of which card, link and uplink? In whole numbers, so that a release restores exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from supernode.fabric.topology import Fabric
from supernode.hardware.machine import Machine
from supernode.schema.slice import Request

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

PARTS = 1_000_000_000
"""Parts of a card. A share is rounded down to parts, so that three thirds fit on one card."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claim:
    """What one slice takes.

    Attributes:
        cards: (S,) its cards.
        parts: of each card.
        memory: bytes of each card.
        ports: (S, P) bytes/s on each port of each card, one direction.
        uplinks: for each tier but the last, (groups, bytes/s on the uplink of each).
    """

    cards: Ints
    parts: int
    memory: int
    ports: Ints
    uplinks: tuple[tuple[Ints, Ints], ...] = ()


class Ledger:
    """What is held of a machine.

    On direct fabrics a port is one end of a link to a neighbour, and what leaves a card stays on the links inside its
    slice. Behind switches a card has one port, and each group of a tier has an uplink to the next tier that all of its
    cards share: a node's network cards serve every card in it, as NCCL's do.

    Attributes:
        parts: (C,) parts held of each card.
        memory: (C,) bytes held of each card.
        ports: (C, P) bytes/s held of each port.
        uplinks: for each tier but the last, (groups,) bytes/s held of each uplink.
    """

    def __init__(self, machine: Machine, fabric: Fabric) -> None:
        self.fabric = fabric
        self.is_direct = fabric.is_direct and fabric.cards > 1
        self.card_memory = machine.card.memory
        if self.is_direct:
            self.link = int(fabric.link_bandwidth)
            self.port_capacity = fabric.units * self.link
        else:
            self.link = int(fabric.tiers[0].bandwidth)
            self.port_capacity = np.array([self.link], dtype=np.int64)
        self.uplink_capacity = [] if self.is_direct else _uplinks(fabric)
        self.parts = np.zeros(fabric.cards, dtype=np.int64)
        self.memory = np.zeros(fabric.cards, dtype=np.int64)
        self.ports = np.zeros((fabric.cards, len(self.port_capacity)), dtype=np.int64)
        self.uplinks = [np.zeros_like(capacity) for capacity in self.uplink_capacity]
        self._inside = np.zeros(fabric.cards, dtype=np.bool_)

    def eligible(self, request: Request) -> Flags:
        """Return (C,) which cards have the share and the memory, and alone the bandwidth where no link is shared."""
        flags = self.parts + parts_of(request.share) <= PARTS
        if request.memory:
            flags &= self.memory + request.memory <= self.card_memory
        if request.bandwidth and not self.is_direct:
            flags &= self.ports[:, 0] + int(request.bandwidth) <= self.link
        elif request.bandwidth and request.cards == 1:
            there = self.fabric.peers >= 0
            rate = request.bandwidth // np.maximum(1, (there * self.fabric.units).sum(axis=1))
            fits = self.ports + rate[:, None].astype(np.int64) * self.fabric.units <= self.port_capacity
            flags &= np.all(fits | ~there, axis=1)
        return flags

    def claim(self, cards: Ints, request: Request) -> Claim | None:
        """Return what a slice of these cards takes; None if the ports or uplinks have not that much left.

        Each card of the slice can send `request.bandwidth` to the others while all others use theirs. On direct fabrics
        the card with the fewest links inside the slice sets what each link carries, to the byte/s below. A slice of one
        card takes it on its ports towards the fabric.
        """
        parts, bandwidth = parts_of(request.share), request.bandwidth
        if self.is_direct:
            inside = self.links_inside(cards)
            fewest = int(inside.sum(axis=1).min())
            if bandwidth and (not fewest or bandwidth > fewest * self.fabric.link_bandwidth * (1 + 1e-12)):
                return None
            ports = inside * int(bandwidth // max(1, fewest))
            uplinks: tuple[tuple[Ints, Ints], ...] = ()
        else:
            ports = np.full((len(cards), 1), int(bandwidth), dtype=np.int64)
            uplinks = self._crossed(cards, int(bandwidth))
        if bandwidth and not self._has_left(cards, ports, uplinks):
            return None
        return Claim(cards=cards, parts=parts, memory=request.memory, ports=ports, uplinks=uplinks)

    def links_inside(self, cards: Ints) -> Ints:
        """Return (S, P) the links of each port that stay inside; for one card, all that it has."""
        peers = self.fabric.peers[cards]
        if len(cards) == 1:
            return (peers >= 0) * self.fabric.units
        self._inside[cards] = True
        inside = (peers >= 0) & self._inside[peers]
        self._inside[cards] = False
        return inside * self.fabric.units

    def hold(self, claim: Claim, *, sign: int = 1) -> None:
        """Enter a claim; with `sign` -1, strike it out."""
        self.parts[claim.cards] += sign * claim.parts
        self.memory[claim.cards] += sign * claim.memory
        self.ports[claim.cards] += sign * claim.ports
        for held, (groups, amounts) in zip(self.uplinks, claim.uplinks, strict=False):
            held[groups] += sign * amounts

    def _crossed(self, cards: Ints, bandwidth: int) -> tuple[tuple[Ints, Ints], ...]:
        """Return the uplinks that the slice crosses: those of every tier whose groups do not hold all of it."""
        crossed = []
        for tier in self.fabric.tiers[:-1]:
            groups, members = np.unique(cards // tier.cards, return_counts=True)
            if len(groups) == 1:
                break
            crossed.append((groups, members.astype(np.int64) * bandwidth))
        return tuple(crossed)

    def _has_left(self, cards: Ints, ports: Ints, uplinks: tuple[tuple[Ints, Ints], ...]) -> bool:
        if not bool(np.all(self.ports[cards] + ports <= self.port_capacity)):
            return False
        tiers = zip(self.uplinks, self.uplink_capacity, uplinks, strict=False)
        return all(bool(np.all(held[groups] + more <= most[groups])) for held, most, (groups, more) in tiers)


def parts_of(share: float) -> int:
    """Return a share in parts, at least one.

    >>> parts_of(0.5)
    500000000
    """
    return max(1, int(share * PARTS))


def _uplinks(fabric: Fabric) -> list[Ints]:
    """Return the bytes/s of each group's uplink: its cards times what the next tier gives each."""
    capacities = []
    for tier, above in zip(fabric.tiers[:-1], fabric.tiers[1:], strict=True):
        members = np.bincount(np.arange(fabric.cards) // tier.cards)
        capacities.append((members * above.bandwidth).astype(np.int64))
    return capacities
