"""What may a job have? One pool of cards that hands out slices and takes them back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from supernode.errors import CapacityError, SpecError
from supernode.fabric.topology import build_fabric
from supernode.hardware.machine import Machine
from supernode.registry import did_you_mean
from supernode.scheduling.ledger import PARTS, Claim, Ledger, parts_of
from supernode.scheduling.placement import Placed, Placement, nearest_that_fits
from supernode.schema.slice import Request, Slice
from supernode.units import show, show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """What a pool holds at one moment.

    Attributes:
        cards: cards of the machine.
        free_cards: cards that nobody holds any part of.
        used: held part of all cards, 0 to 1.
        memory_used: bytes held.
        slices: what is held, oldest first.
    """

    cards: int
    free_cards: tuple[int, ...]
    used: float
    memory_used: int
    slices: tuple[Slice, ...]


class Pool:
    """The cards of one machine, handed out in slices. Safe to use from several threads.

    Attributes:
        machine: whose cards they are.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        fabric = build_fabric(machine)
        self._ledger = Ledger(machine, fabric)
        self._placement = Placement(machine, fabric)
        self._held: dict[str, tuple[Slice, Claim]] = {}
        self._named = 0
        self._lock = Lock()

    @property
    def free_cards(self) -> int:
        """Cards that nobody holds any part of."""
        return int(np.count_nonzero(self._ledger.parts == 0))

    @property
    def used(self) -> float:
        """Held part of all cards, 0 to 1."""
        return int(self._ledger.parts.sum()) / (PARTS * self.machine.card_count)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What is held, oldest first."""
        with self._lock:
            return tuple(held for held, _ in self._held.values())

    def snapshot(self) -> PoolState:
        """Return what the pool holds now."""
        with self._lock:
            return PoolState(
                cards=self.machine.card_count,
                free_cards=tuple(np.flatnonzero(self._ledger.parts == 0).tolist()),
                used=self.used,
                memory_used=int(self._ledger.memory.sum()),
                slices=tuple(held for held, _ in self._held.values()),
            )

    def allocate(self, request: Request) -> Slice:
        """Return a slice that suits the request, and hold it until it is released.

        A whole card comes with all of its memory where the request names none. On a torus the cards form a block of
        the least diameter that is free, in any orientation; else they hang together along links; without a bandwidth,
        scattered cards do. Behind switches they fill as few nodes as possible.

        Raises:
            SpecError: the request makes no sense on this machine.
            CapacityError: the machine has not that much left; it says what is short and what would fit.
        """
        request = self._checked(request)
        with self._lock:
            placed = self._placement.find(request, self._ledger)
            if placed is None:
                raise self._shortage(request)
            return self._hold(request, placed)

    def release(self, held: Slice | str) -> Slice:
        """Take a slice back, by itself or by its name; return it.

        Raises:
            SpecError: the pool holds no such slice.
        """
        name = held if isinstance(held, str) else held.name
        with self._lock:
            if name not in self._held:
                raise SpecError(f"no slice `{name}` is held", hint=did_you_mean(name, self._held))
            mine, claim = self._held[name]
            if isinstance(held, Slice) and held != mine:
                raise SpecError(f"slice `{name}` is not the one that is held", hint="release it by its name.")
            del self._held[name]
            self._ledger.hold(claim, sign=-1)
            return mine

    def _hold(self, request: Request, placed: Placed) -> Slice:
        self._ledger.hold(placed.claim)
        self._named += 1
        made = Slice(
            name=f"slice-{self._named}",
            cards=tuple(placed.claim.cards.tolist()),
            memory=request.memory,
            bandwidth=float(request.bandwidth),
            share=float(request.share),
            shape=placed.shape,
            diameter=placed.diameter,
        )
        self._held[made.name] = (made, placed.claim)
        return made

    def _checked(self, request: Request) -> Request:
        """Return the request with its open ends filled in."""
        _whole("cards", request.cards, least=1)
        _whole("memory", request.memory, least=0)
        if not _is_number(request.bandwidth) or not math.isfinite(request.bandwidth) or request.bandwidth < 0:
            raise SpecError(f"`bandwidth` is {request.bandwidth}", hint="give bytes/s, 0 or more.")
        if not _is_number(request.share) or not 0 < request.share <= 1:
            raise SpecError(f"`share` is {request.share}", hint="give a part of a card, above 0 and at most 1.")
        if request.shape:
            self._check_shape(request)
        if request.memory == 0 and request.share == 1:
            return replace(request, memory=self.machine.card.memory)
        return request

    def _check_shape(self, request: Request) -> None:
        for size in request.shape:
            _whole("shape", size, least=1)
        block = " × ".join(map(str, request.shape))
        if math.prod(request.shape) != request.cards:
            raise SpecError(
                f"`shape` {block} has {math.prod(request.shape)} cards, and `cards` is {request.cards}",
                hint=f"set `cards` to {math.prod(request.shape)}, or leave out `shape`.",
            )
        sizes = self.machine.shape
        if not sizes:
            raise SpecError(f"`shape` {block} on a {self.machine.topology} machine", hint="leave out `shape`.")
        padded = sorted(request.shape + (1,) * (len(sizes) - len(request.shape)))
        if len(padded) > len(sizes) or any(side > size for side, size in zip(padded, sorted(sizes), strict=True)):
            torus = " × ".join(map(str, sizes))
            raise SpecError(f"`shape` {block} does not fit on a torus of {torus}", hint="choose smaller sides.")

    def _shortage(self, request: Request) -> CapacityError:
        """Return what is short: cards, their memory, a block, or bandwidth."""
        machine, ledger = self.machine, self._ledger
        with_share = int(np.count_nonzero(ledger.parts + parts_of(request.share) <= PARTS))
        kind = "free" if request.share == 1 else f"with a share of {request.share:g} free"
        if with_share < request.cards:
            return CapacityError(
                f"{request.cards} cards are asked for, and {with_share} of {machine.card_count} are {kind}",
                hint=f"ask for at most {with_share} cards, or release a slice." if with_share else "release a slice.",
            )
        left = np.where(ledger.parts + parts_of(request.share) <= PARTS, machine.card.memory - ledger.memory, -1)
        most = int(np.sort(left)[-request.cards])
        if most < request.memory:
            return CapacityError(
                f"{show_bytes(request.memory)} a card are asked for, and {request.cards} cards have at most "
                f"{show_bytes(most)} ({most} bytes) each left",
                hint=f"ask for at most {most} bytes a card, or for fewer cards.",
            )
        if request.shape and self._placement.find(replace(request, bandwidth=0.0), ledger) is None:
            block = " × ".join(map(str, request.shape))
            return CapacityError(f"no block of {block} is free", hint="leave out `shape`, or release a slice.")
        fits = nearest_that_fits(request, self._placement, ledger)
        return CapacityError(
            f"{show(request.bandwidth, 'B/s')} a card are asked for, and {request.cards} free cards that hang together "
            f"have at most {show(fits, 'B/s')} each",
            hint=f"ask for at most {fits:.0f} bytes/s a card, for fewer cards, or release a slice.",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(key: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"`{key}` is {value!r}", hint=f"give a whole number, {least} or more.")
