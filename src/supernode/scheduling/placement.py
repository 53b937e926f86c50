"""Which free cards suit a request best? Blocks on a torus, few nodes elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from supernode.fabric.topology import Fabric
from supernode.hardware.machine import Machine
from supernode.scheduling.blocks import Block, Blocks, BoxSums
from supernode.scheduling.ledger import PARTS, Claim, Flags, Ints, Ledger, parts_of
from supernode.scheduling.packing import pack
from supernode.scheduling.regions import MOST_EXACT, diameter_within, grow
from supernode.schema.slice import Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """Cards that suit, what they take, and the block that they form."""

    claim: Claim
    diameter: int
    shape: tuple[int, ...] = ()


class Placement:
    """Finds cards; holds nothing but what it remembers about shapes."""

    def __init__(self, machine: Machine, fabric: Fabric) -> None:
        self.fabric = fabric
        self._blocks = Blocks(fabric.shape) if fabric.shape else None
        self._diameters: dict[Block, int] = {}
        sizes = [tier.cards for tier in fabric.tiers]
        self._groups = tuple(sizes) if not fabric.is_direct else tuple(sorted({machine.node_cards, machine.card_count}))

    def find(self, request: Request, ledger: Ledger) -> Placed | None:
        """Return the best place for a request, or None: a block, else connected cards, else (without bandwidth) any."""
        free = ledger.eligible(request)
        if np.count_nonzero(free) < request.cards:
            return None
        if self._blocks is None:
            return self._packed(request, free, ledger)
        placed = self._block(request, free, ledger)
        if placed or request.shape:
            return placed
        return self._region(request, free, ledger) or self._scattered(request, free, ledger)

    def _packed(self, request: Request, free: Flags, ledger: Ledger) -> Placed | None:
        cards = pack(request.cards, free, sizes=self._groups, ledger=ledger, bandwidth=request.bandwidth)
        claim = None if cards is None else ledger.claim(cards, request)
        if claim is None and self.fabric.is_direct and request.share < 1:
            # Links of part-filled cards may be taken; those of wholly free cards are not.
            untouched = free & (ledger.parts == 0)
            cards = pack(request.cards, untouched, sizes=self._groups, ledger=ledger, bandwidth=request.bandwidth)
            claim = None if cards is None else ledger.claim(cards, request)
        if claim is None or cards is None:
            return None
        return Placed(claim=claim, diameter=int(self.fabric.hops(cards[0], cards).max()))

    def _block(self, request: Request, free: Flags, ledger: Ledger) -> Placed | None:
        assert self._blocks is not None
        blocks = self._blocks.of_sizes(request.shape) if request.shape else self._blocks.of(request.cards)
        enough = [block for block in blocks if _may_carry(block, request, self.fabric.link_bandwidth)]
        sums = BoxSums(free, self.fabric.shape)
        open_cards = sums if request.share == 1 else BoxSums(ledger.parts == 0, self.fabric.shape)
        held = None if request.share == 1 else BoxSums((ledger.parts > 0) & free, self.fabric.shape)
        for _, alike in _by_diameter(enough):
            for block, place in self._ranked(alike, sums, open_cards, held):
                claim = ledger.claim(self._blocks.cards(block, place), request)
                if claim:
                    return Placed(claim=claim, diameter=self._diameter(block), shape=self._shape(block))
        return None

    def _ranked(
        self, blocks: list[Block], free: BoxSums, open_cards: BoxSums, held: BoxSums | None
    ) -> Iterator[tuple[Block, int]]:
        """Yield blocks with their places: most part-filled cards, then least free cards left exposed.

        Whole cards: the best place of each shape, for all their links are free. Shares: all places.
        """
        assert self._blocks is not None
        found: list[tuple[int, int, int, int, Block]] = []
        for index, block in enumerate(blocks):
            places = np.flatnonzero(self._blocks.places(block, free))
            if not len(places):
                continue
            exposed = self._blocks.exposure(block, open_cards)[places]
            shared = np.zeros_like(exposed)
            if held:
                shared = -held.at((0,) * len(block.sizes), block.sizes).ravel()[places]
            order = np.lexsort((places, exposed, shared))[: None if held else 1]
            found += [(int(shared[i]), int(exposed[i]), index, int(places[i]), block) for i in order]
        for *_, place, block in sorted(found, key=lambda entry: entry[:4]):
            yield block, place

    def _region(self, request: Request, free: Flags, ledger: Ledger) -> Placed | None:
        fewest = math.ceil(request.bandwidth / self.fabric.link_bandwidth - 1e-9)
        for cards in grow(request.cards, free, peers=self.fabric.peers, units=self.fabric.units, fewest=fewest):
            claim = ledger.claim(cards, request)
            if claim:
                return Placed(claim=claim, diameter=self._counted(cards))
        return None

    def _scattered(self, request: Request, free: Flags, ledger: Ledger) -> Placed | None:
        """Return any free cards, part-filled first: without bandwidth, what they send may pass through others."""
        if request.bandwidth:
            return None
        there = np.flatnonzero(free)
        cards = np.sort(there[np.argsort(-ledger.parts[there], kind="stable")[: request.cards]])
        claim = ledger.claim(cards, request)
        far = self.fabric.diameter
        if len(cards) <= MOST_EXACT // 4:
            far = int(self.fabric.hops(cards[:, None], cards[None, :]).max())
        return Placed(claim=claim, diameter=far) if claim else None

    def _diameter(self, block: Block) -> int:
        """Return the hops across a block; a snake may lack links of a ring that its box has, so it is counted."""
        longest = max(block.sizes)
        has_rings = any(
            size == longest == whole > 1 for size, whole in zip(block.sizes, self.fabric.shape, strict=True)
        )
        if block.is_whole or not has_rings:
            return block.diameter
        if block not in self._diameters:
            assert self._blocks is not None
            self._diameters[block] = self._counted(self._blocks.cards(block, 0))
        return self._diameters[block]

    def _counted(self, cards: Ints) -> int:
        return self.fabric.cards if len(cards) > MOST_EXACT else diameter_within(cards, self.fabric.peers)

    def _shape(self, block: Block) -> tuple[int, ...]:
        return block.sizes if block.is_whole else ()


def _may_carry(block: Block, request: Request, link_bandwidth: float) -> bool:
    """Whether the block has the links for the bandwidth; a snake's are counted later, a single card's are its own."""
    if not block.links or block.cards == 1:
        return True
    return request.bandwidth <= block.links * link_bandwidth * (1 + 1e-12)


def _by_diameter(blocks: list[Block]) -> Iterator[tuple[int, list[Block]]]:
    alike: dict[tuple[int, bool], list[Block]] = {}
    for block in blocks:
        alike.setdefault((block.diameter, not block.is_whole), []).append(block)
    for (diameter, _), group in sorted(alike.items(), key=lambda entry: entry[0]):
        yield diameter, group


def nearest_that_fits(request: Request, placement: Placement, ledger: Ledger) -> float:
    """Return the greatest bandwidth, in bytes/s, with which the request would find a place; 0 where none does."""
    if placement.find(replace(request, bandwidth=0.0), ledger) is None:
        return 0.0
    if placement.fabric.shape and parts_of(request.share) == PARTS:
        link = placement.fabric.link_bandwidth
        most = int(request.bandwidth // link)
        steps = [links * link for links in range(min(most, 2 * int(placement.fabric.units.sum())), 0, -1)]
        return next((step for step in steps if placement.find(replace(request, bandwidth=step), ledger)), 0.0)
    low, high = 0.0, request.bandwidth
    for _ in range(20):
        middle = (low + high) / 2
        if placement.find(replace(request, bandwidth=middle), ledger):
            low = middle
        else:
            high = middle
    return low
