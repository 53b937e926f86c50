"""What a job is given: cards, memory and bandwidth, guaranteed while others allocate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an allocation asks for.

    Attributes:
        cards: how many.
        memory: bytes on each card.
        bandwidth: bytes/s from each card to the others of its slice, one direction.
        shape: block of the torus that the cards shall form, such as (4, 2, 1); empty for any.
        share: part of each card, above 0 and at most 1.
    """

    cards: int = 1
    memory: int = 0
    bandwidth: float = 0.0
    shape: tuple[int, ...] = ()
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Part of a machine, held until it is released.

    Attributes:
        name: unique within the machine.
        cards: the cards, by number, in an order where neighbours are close.
        memory: bytes granted on each card.
        bandwidth: bytes/s granted from each card to the others of the slice, one direction.
        share: part of each card that is granted.
        shape: block of the torus that the cards form; empty where they form none.
        diameter: most hops between two cards of the slice.
    """

    name: str
    cards: tuple[int, ...]
    memory: int
    bandwidth: float
    share: float = 1.0
    shape: tuple[int, ...] = ()
    diameter: int = 0
