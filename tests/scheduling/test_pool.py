"""The pool hands out what it has, never more, and takes back exactly what it gave."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from supernode.errors import CapacityError, SpecError
from supernode.fabric.topology import Fabric, build_fabric
from supernode.hardware.assemble import build_machine
from supernode.hardware.discover import discover
from supernode.scheduling.pool import Pool
from supernode.schema.slice import Request, Slice

GB = 10**9
GIB = 2**30


def links_inside(fabric: Fabric, cards: tuple[int, ...]) -> list[int]:
    """Return how many links of each card stay among the cards, counted pair by pair."""
    pairs, bundled = fabric.links()
    mine = set(cards)
    count = dict.fromkeys(cards, 0)
    for (a, b), links in zip(pairs.tolist(), bundled.tolist(), strict=True):
        if a in mine and b in mine:
            count[a] += links
            count[b] += links
    return list(count.values())


def hops_inside(fabric: Fabric, cards: tuple[int, ...]) -> int:
    """Return the most hops between two of the cards by walking inside."""
    mine, worst = set(cards), 0
    for source in cards:
        hops, edge = {source: 0}, [source]
        while edge:
            card = edge.pop(0)
            for peer in fabric.neighbours(card).tolist():
                if peer in mine and peer not in hops:
                    hops[peer] = hops[card] + 1
                    edge.append(peer)
        assert hops.keys() == mine
        worst = max(worst, *hops.values())
    return worst


def test_eight_cards_that_need_400_gb_s_form_a_cube() -> None:
    pool = Pool(build_machine(512))

    made = pool.allocate(Request(cards=8, memory=80 * GIB, bandwidth=400 * GB))

    # A cube of two has three links inside for each card: 3 × 150 = 450 GB/s.
    assert made.shape == (2, 2, 2)
    assert made.diameter == 3
    assert links_inside(build_fabric(pool.machine), made.cards) == [3] * 8


def test_a_row_of_eight_is_a_ring_and_carries_300_gb_s() -> None:
    pool = Pool(build_machine(512))

    assert pool.allocate(Request(cards=8, shape=(8, 1, 1), bandwidth=300 * GB)).diameter == 4
    with pytest.raises(CapacityError, match="at most 300 GB/s each"):
        pool.allocate(Request(cards=8, shape=(8, 1, 1), bandwidth=400 * GB))


def test_the_shape_that_is_asked_for_comes_in_that_orientation_while_it_is_free() -> None:
    pool = Pool(build_machine(64))

    assert pool.allocate(Request(cards=8, shape=(4, 2, 1))).shape == (4, 2, 1)


def test_a_shape_is_turned_when_only_that_fits() -> None:
    pool = Pool(build_machine(8, shape=(1, 2, 4)))

    assert pool.allocate(Request(cards=8, shape=(4, 2, 1))).shape == (1, 2, 4)


@pytest.mark.parametrize("cards", [1, 2, 3, 5, 7, 11, 14, 23, 31, 64, 100, 127, 343, 450, 509, 512])
def test_any_number_of_cards_is_found_on_an_empty_torus(cards: int) -> None:
    pool = Pool(build_machine(512))

    made = pool.allocate(Request(cards=cards, bandwidth=100 * GB if cards > 1 else 0))

    assert len(set(made.cards)) == cards
    assert made.diameter <= build_fabric(pool.machine).diameter + 1


@pytest.mark.parametrize("shape", [(4, 4, 4), (2, 5, 6)])
def test_cards_hang_together_with_the_diameter_that_is_told(shape: tuple[int, ...]) -> None:
    machine = build_machine(math.prod(shape), shape=shape)
    fabric = build_fabric(machine)

    for cards in range(1, math.prod(shape) + 1, 4):
        made = Pool(machine).allocate(Request(cards=cards))
        assert made.diameter == hops_inside(fabric, made.cards), cards


def test_seven_cards_are_not_a_line() -> None:
    assert Pool(build_machine(512)).allocate(Request(cards=7)).diameter == 3


@pytest.mark.parametrize("cards", [2, 4, 6, 12, 30, 64])
def test_consecutive_cards_of_a_block_are_neighbours(cards: int) -> None:
    pool = Pool(build_machine(512))

    made = pool.allocate(Request(cards=cards))

    fabric = build_fabric(pool.machine)
    assert fabric.hops(np.array(made.cards[:-1]), np.array(made.cards[1:])).tolist() == [1] * (cards - 1)


def test_blocks_reach_around_the_torus() -> None:
    pool = Pool(build_machine(8, "Ring", card="H100"))
    row = [pool.allocate(Request(cards=1)) for _ in range(8)]
    for held in row:
        if held.cards[0] in (0, 1, 7):
            pool.release(held)

    assert set(pool.allocate(Request(cards=3, bandwidth=100 * GB)).cards) == {0, 1, 7}


def test_sixty_four_cubes_of_eight_fill_the_machine() -> None:
    pool = Pool(build_machine(512))

    made = [pool.allocate(Request(cards=8, bandwidth=450 * GB)) for _ in range(64)]

    assert pool.free_cards == 0
    assert pool.used == 1
    assert sorted(card for held in made for card in held.cards) == list(range(512))


def test_without_bandwidth_scattered_cards_do() -> None:
    pool = Pool(build_machine(8, "Ring", card="H100"))
    for held in [pool.allocate(Request()) for _ in range(8)]:
        if held.cards[0] % 2 == 0:
            pool.release(held)

    assert pool.allocate(Request(cards=4)).cards == (0, 2, 4, 6)


def test_with_bandwidth_scattered_cards_do_not() -> None:
    pool = Pool(build_machine(8, "Ring", card="H100"))
    for held in [pool.allocate(Request()) for _ in range(8)]:
        if held.cards[0] % 2 == 0:
            pool.release(held)

    with pytest.raises(CapacityError, match="at most 0 B/s each"):
        pool.allocate(Request(cards=4, bandwidth=GB))


def test_an_l_of_free_cards_serves_when_no_block_is_free() -> None:
    pool = Pool(build_machine(16, "2D_Torus"))
    keep = {0, 1, 2, 6, 10}  # an L on the 4 × 4 torus
    for held in [pool.allocate(Request()) for _ in range(16)]:
        if held.cards[0] in keep:
            pool.release(held)

    made = pool.allocate(Request(cards=5, bandwidth=10 * GB))

    assert set(made.cards) == keep
    assert made.diameter == hops_inside(build_fabric(pool.machine), made.cards) == 4
    assert made.shape == ()


def test_a_whole_card_comes_with_all_its_memory() -> None:
    assert Pool(build_machine(8)).allocate(Request(cards=2)).memory == 180 * 10**9


def test_shares_fill_a_card_before_they_open_another() -> None:
    pool = Pool(build_machine(8))

    thirds = [pool.allocate(Request(share=1 / 3, memory=60 * 10**9)) for _ in range(3)]

    assert len({held.cards for held in thirds}) == 1
    assert pool.allocate(Request(share=0.01)).cards != thirds[0].cards


def test_memory_can_run_out_before_the_share() -> None:
    pool = Pool(build_machine(1))
    pool.allocate(Request(share=0.25, memory=150 * 10**9))

    with pytest.raises(CapacityError, match=r"at most .* \(30000000000 bytes\) each left"):
        pool.allocate(Request(share=0.25, memory=40 * 10**9))
    assert pool.allocate(Request(share=0.25, memory=30 * 10**9)).cards == (0,)


def test_one_card_may_inject_what_its_ports_carry_and_no_more() -> None:
    pool = Pool(build_machine(64))

    pool.allocate(Request(share=0.5, bandwidth=900 * GB))
    second = pool.allocate(Request(share=0.5, bandwidth=900 * GB))

    assert second.cards != (0,)
    with pytest.raises(CapacityError, match="at most 900 GB/s each"):
        pool.allocate(Request(bandwidth=901 * GB))


def test_slices_that_share_cards_share_their_links() -> None:
    pool = Pool(build_machine(2, "Ring", card="H100"))  # two links of 225 GB/s between the two

    pool.allocate(Request(cards=2, share=0.5, bandwidth=300 * GB))

    with pytest.raises(CapacityError, match="at most 150 GB/s each"):
        pool.allocate(Request(cards=2, share=0.5, bandwidth=200 * GB))
    pool.allocate(Request(cards=2, share=0.5, bandwidth=150 * GB))


def test_a_whole_mesh_keeps_its_full_bandwidth() -> None:
    pool = Pool(build_machine(32, "Full_Mesh", card="H100"))

    assert pool.allocate(Request(cards=32, bandwidth=450 * GB)).diameter == 1


def test_part_of_a_mesh_has_the_links_that_stay_inside() -> None:
    pool = Pool(build_machine(16, "Full_Mesh", card="H100"))  # 30 GB/s to each of 15 others

    with pytest.raises(CapacityError, match="at most 210 GB/s each"):
        pool.allocate(Request(cards=8, bandwidth=220 * GB))
    assert len(pool.allocate(Request(cards=8, bandwidth=210 * GB)).cards) == 8


def test_mesh_shares_move_on_when_their_links_are_taken() -> None:
    pool = Pool(build_machine(4, "Full_Mesh", card="H100"))
    first = pool.allocate(Request(cards=2, share=0.5, bandwidth=150 * GB))

    second = pool.allocate(Request(cards=2, share=0.5, bandwidth=150 * GB))

    assert not set(first.cards) & set(second.cards)


def test_behind_switches_a_slice_fills_as_few_nodes_as_possible() -> None:
    pool = Pool(build_machine(64, "Hybrid", card="H100"))
    pool.allocate(Request(cards=5))

    # Three of the first node are left: the tightest place for three; eight take a node of their own.
    assert pool.allocate(Request(cards=3)).cards == (5, 6, 7)
    assert pool.allocate(Request(cards=8)).cards == tuple(range(8, 16))


def test_nodes_in_a_slice_talk_over_their_network_cards() -> None:
    pool = Pool(build_machine(64, "Hybrid", card="H100"))  # 50 GB/s a card between nodes, 450 inside

    assert len(pool.allocate(Request(cards=16, bandwidth=50 * GB)).cards) == 16
    assert len(pool.allocate(Request(cards=8, bandwidth=450 * GB)).cards) == 8


def test_a_slice_spreads_over_nodes_when_their_uplinks_ask_for_it() -> None:
    pool = Pool(build_machine(64, "Hybrid", card="H100"))

    made = pool.allocate(Request(cards=16, bandwidth=60 * GB))

    # Six cards of a node may send 60 GB/s each over its 400 GB/s; eight may not.
    assert max(np.bincount(np.array(made.cards) // 8)) <= 6
    with pytest.raises(CapacityError, match="at most 50 GB/s each"):
        Pool(pool.machine).allocate(Request(cards=64, bandwidth=60 * GB))


def test_uplinks_are_shared_by_the_cards_of_a_node() -> None:
    pool = Pool(build_machine(16, "Hybrid", card="H100"))

    # Two of eight cards may use the node's whole 400 GB/s, but ten of sixteen need five cards on each side.
    made = pool.allocate(Request(cards=10, bandwidth=80 * GB))

    assert sorted(card // 8 for card in made.cards) == [0] * 5 + [1] * 5


def test_an_oversubscribed_tree_guarantees_what_is_left_after_sharing() -> None:
    pool = Pool(build_machine(16, "Fat_Tree", card="H100", oversubscription=4))

    with pytest.raises(CapacityError, match=r"at most 11\d GB/s each"):
        pool.allocate(Request(cards=16, bandwidth=200 * GB))
    pool.allocate(Request(cards=16, bandwidth=112 * GB))


def test_this_computer_is_a_pool_too() -> None:
    pool = Pool(discover(8, measure=False))

    assert pool.allocate(Request(cards=8, memory=2**20)).cards == tuple(range(8))


def test_sixty_five_thousand_cards_are_a_pool() -> None:
    pool = Pool(build_machine(65_536))

    assert pool.allocate(Request(cards=64, bandwidth=450 * GB)).shape == (4, 4, 4)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(cards=65), "65 cards are asked for, and 64 of 64 are free"),
        (Request(memory=200 * GIB), "200 GiB a card are asked for, and 1 cards have at most 168 GiB"),
        (Request(cards=8, bandwidth=1000 * GB), "1 TB/s a card are asked for, and 8 free cards"),
    ],
)
def test_a_shortage_says_what_is_short_and_what_would_fit(request_: Request, words: str) -> None:
    with pytest.raises(CapacityError, match=words) as caught:
        Pool(build_machine(64)).allocate(request_)

    assert caught.value.hint


def test_what_a_shortage_says_would_fit_does_fit() -> None:
    pool = Pool(build_machine(512))
    for cards in (5, 8, 12, 31):
        with pytest.raises(CapacityError) as caught:
            pool.allocate(Request(cards=cards, bandwidth=5000 * GB))
        most = float(caught.value.hint.split(" bytes/s")[0].rpartition(" ")[2])

        assert most > 0
        pool.release(pool.allocate(Request(cards=cards, bandwidth=most)))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(cards=0), "`cards` is 0"),
        (Request(cards=-1), "`cards` is -1"),
        (Request(cards=True), "`cards` is True"),
        (Request(memory=-1), "`memory` is -1"),
        (Request(bandwidth=-1), "`bandwidth` is -1"),
        (Request(bandwidth=math.nan), "`bandwidth` is nan"),
        (Request(bandwidth=math.inf), "`bandwidth` is inf"),
        (Request(share=0), "`share` is 0"),
        (Request(share=1.01), "`share` is 1.01"),
        (Request(share=math.nan), "`share` is nan"),
        (Request(cards=8, shape=(2, 2)), "`shape` 2 × 2 has 4 cards, and `cards` is 8"),
        (Request(cards=8, shape=(8, 1, 1)), "does not fit on a torus of 4 × 4 × 4"),
        (Request(cards=2, shape=(2, 1, 1, 1)), "does not fit"),
        (Request(cards=4, shape=(-2, -2)), "`shape` is -2"),
    ],
)
def test_a_request_that_makes_no_sense_is_named(request_: Request, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Pool(build_machine(64)).allocate(request_)


def test_a_shape_needs_a_torus() -> None:
    with pytest.raises(SpecError, match="leave out `shape`"):
        Pool(build_machine(8, "Full_Mesh")).allocate(Request(cards=4, shape=(2, 2)))


def test_a_slice_is_released_once() -> None:
    pool = Pool(build_machine(8))
    held = pool.allocate(Request(cards=4))

    assert pool.release(held.name) == held
    with pytest.raises(SpecError, match="no slice `slice-1` is held"):
        pool.release(held)


def test_a_changed_slice_is_not_taken_back() -> None:
    pool = Pool(build_machine(8))
    held = pool.allocate(Request(cards=4))

    with pytest.raises(SpecError, match="not the one"):
        pool.release(replace(held, cards=(0,)))


def test_threads_never_get_the_same_card() -> None:
    pool = Pool(build_machine(64))

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: pool.allocate(Request(cards=2)), range(32)))

    assert sorted(card for held in made for card in held.cards) == list(range(64))
    assert len({held.name for held in made}) == 32


class Holding(RuleBasedStateMachine):
    """Allocates and releases at will; recounts everything from the slices that are held."""

    held = Bundle("held")
    interconnect, cards = "3D_Torus", 12

    def __init__(self) -> None:
        super().__init__()
        self.machine = build_machine(self.cards, self.interconnect, card="H100")
        self.pool, self.fabric = Pool(self.machine), build_fabric(self.machine)
        self.mine: dict[str, Slice] = {}

    @rule(
        target=held,
        cards=st.integers(1, 12),
        share=st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1.0]),
        memory=st.sampled_from([0, 10 * GB, 40 * GB, 80 * GB]),
        bandwidth=st.sampled_from([0.0, 1e9, 30e9, 75e9, 150e9, 300e9]),
    )
    def allocate(self, cards: int, share: float, memory: int, bandwidth: float) -> str:
        try:
            made = self.pool.allocate(Request(cards=cards, share=share, memory=memory, bandwidth=bandwidth))
        except CapacityError:
            return ""
        assert made.name not in self.mine
        assert len(set(made.cards)) == cards
        assert made.bandwidth == bandwidth
        assert made.memory >= memory
        self.mine[made.name] = made
        return made.name

    @precondition(lambda self: self.mine)
    @rule(name=held)
    def release(self, name: str) -> None:
        if name in self.mine:
            assert self.pool.release(name) == self.mine.pop(name)

    @invariant()
    def nothing_is_granted_twice(self) -> None:
        share, memory = np.zeros(self.cards), np.zeros(self.cards)
        for held in self.mine.values():
            share[list(held.cards)] += held.share
            memory[list(held.cards)] += held.memory
        assert (share <= 1 + 1e-6).all()
        assert (memory <= self.machine.card.memory).all()
        # A share is rounded down to a billionth of a card.
        assert self.pool.used == pytest.approx(share.sum() / self.cards, abs=1e-6)
        assert self.pool.free_cards == np.count_nonzero(share == 0)

    @invariant()
    def no_link_carries_more_than_it_can(self) -> None:
        if not self.fabric.is_direct:
            return
        pairs, bundled = self.fabric.links()
        load = np.zeros((self.cards, self.cards))
        for held in self.mine.values():
            if len(held.cards) == 1:
                card, peers = held.cards[0], self.fabric.peers[held.cards[0]]
                units = self.fabric.units[peers >= 0]
                load[card, peers[peers >= 0]] += held.bandwidth / units.sum() * units
            elif held.bandwidth:
                rate = held.bandwidth / min(links_inside(self.fabric, held.cards))
                for (a, b), links in zip(pairs.tolist(), bundled.tolist(), strict=True):
                    if a in held.cards and b in held.cards:
                        load[a, b] += rate * links
                        load[b, a] += rate * links
        for (a, b), links in zip(pairs.tolist(), bundled.tolist(), strict=True):
            # A slice's part of a link is rounded down to whole bytes/s.
            most = links * self.machine.link_bandwidth + 2 * len(self.mine)
            assert load[a, b] <= most
            assert load[b, a] <= most

    @invariant()
    def no_port_or_uplink_carries_more_than_it_can(self) -> None:
        tiers = self.machine.tiers
        if self.fabric.is_direct:
            return
        sent = np.zeros(self.cards)
        for held in self.mine.values():
            sent[list(held.cards)] += held.bandwidth
        assert (sent <= tiers[0].bandwidth).all()
        for tier, above in pairwise(tiers):
            out = np.zeros(-(-self.cards // tier.cards))
            for held in self.mine.values():
                groups = np.array(held.cards) // tier.cards
                if len(set(groups.tolist())) > 1:
                    np.add.at(out, groups, held.bandwidth)
            members = np.bincount(np.arange(self.cards) // tier.cards)
            assert (out <= members * above.bandwidth).all()

    def teardown(self) -> None:
        """All released is all free again, to the last byte/s."""
        for name in list(self.mine):
            self.pool.release(name)
        ledger = self.pool._ledger
        assert not ledger.parts.any()
        assert not ledger.memory.any()
        assert not ledger.ports.any()
        assert not any(uplink.any() for uplink in ledger.uplinks)
        assert len(self.pool.snapshot().free_cards) == self.cards


class HoldingMesh(Holding):
    interconnect = "Full_Mesh"


class HoldingHybrid(Holding):
    interconnect = "Hybrid"


for kind in (Holding, HoldingMesh, HoldingHybrid):
    kind.TestCase.settings = settings(max_examples=8, stateful_step_count=16, deadline=None, database=None)

TestTorus = Holding.TestCase
TestMesh = HoldingMesh.TestCase
TestHybrid = HoldingHybrid.TestCase
