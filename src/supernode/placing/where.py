"""Where would a strategy lie best? The order of its axes, the cards of its tensor groups, and what that saves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supernode.errors import SpecError
from supernode.forecast.efficiency import CardModel
from supernode.hardware.machine import Machine
from supernode.placing.placement import RANK_ORDER, best_order, place
from supernode.placing.torus import TorusPlaces, cards_of
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import Software, Strategies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Where:
    """Where a strategy lies best.

    Attributes:
        order: of the axes that have more than one card, innermost first; on a torus a word for each dim, such as
            `tensor 2 < data 4`.
        is_torus: the order is one of dims.
        cards: of each rank, ranks being numbered tensor innermost, then context, data, pipeline.
        tensor: ranks of a tensor group.
        saved: part of the step that it saves over ranks in order on cards in order.
    """

    order: tuple[str, ...]
    is_torus: bool
    cards: NDArray[np.int64]
    tensor: int
    saved: float

    @property
    def groups(self) -> NDArray[np.int64]:
        """The cards of each tensor group, one row a group."""
        return self.cards.reshape(-1, self.tensor)


def where(model: ModelShape, ways: Strategies, card: CardModel, software: Software, machine: Machine) -> Where:
    """Return where a strategy lies best on a machine's first cards, or on the whole of a torus."""
    if machine.shape and int(ways.cards) == machine.card_count:
        try:
            return _on_torus(TorusPlaces(model, ways, card, software, machine))
        except SpecError:  # degrees that do not lie evenly along its dims
            pass
    tiers = machine.nested_tiers
    best = best_order(model, ways, card, software, tiers)
    usual = place(model, ways, card, software, tiers)
    wide = tuple(axis for axis in best.order if float(getattr(ways, axis)) > 1)
    return Where(
        order=wide, is_torus=False, cards=ranks_in(best.order, ways), tensor=int(ways.tensor),
        saved=max(0.0, 1 - best.time / usual.time),
    )  # fmt: skip


def _on_torus(places: TorusPlaces) -> Where:
    usual = places.in_rank_order()
    shares = places.best_shares()
    best = places.at(shares)
    return Where(
        order=best.order, is_torus=True, cards=cards_of(shares), tensor=int(places.ways.tensor),
        saved=max(0.0, 1 - best.time / usual.time),
    )  # fmt: skip


def ranks_in(order: tuple[str, ...], ways: Strategies) -> NDArray[np.int64]:
    """Return the card of each rank where the axes lie in this order, innermost first, on cards in order."""
    degrees = {axis: int(getattr(ways, axis)) for axis in RANK_ORDER}
    stride = {axis: math.prod(degrees[inner] for inner in order[: order.index(axis)]) for axis in order}
    cards = np.zeros(1, dtype=np.int64)
    for axis in RANK_ORDER:
        cards = (np.arange(degrees[axis])[:, None] * stride[axis] + cards[None, :]).ravel()
    return cards
