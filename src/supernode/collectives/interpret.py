"""What does a schedule compute? Carries its messages out on arrays, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from supernode.collectives.message import Schedule
from supernode.errors import SpecError

Array = npt.NDArray[Any]


def execute(schedule: Schedule, inputs: Sequence[Array]) -> list[Array]:
    """Return each rank's result.

    Args:
        inputs: one vector a rank, of one length; an all-to-all's hold a part of equal length for each rank. Of an
            all-gather, and of a reduce-scatter's result, only as many pieces as the rank owns.

    Raises:
        SpecError: not one vector a rank, or a length that the pieces do not divide.
    """
    sizes = sorted({vector.size for vector in inputs})
    if len(inputs) != schedule.ranks or len(sizes) != 1:
        raise SpecError(
            f"{len(inputs)} vectors of {sizes} elements for {schedule.ranks} ranks",
            hint="give one vector a rank, all of one length.",
        )
    state_VPE = _loaded(schedule, inputs)
    for one, repeat in schedule.steps():
        piece = one.pieces(repeat)
        moved = state_VPE[one.source, piece]
        copies = ~one.reduces
        state_VPE[one.target[copies], piece[copies]] = moved[copies]
        np.add.at(state_VPE, (one.target[one.reduces], piece[one.reduces]), moved[one.reduces])
    return [state_VPE[rank, _result(schedule, rank)].ravel() for rank in range(schedule.ranks)]


def _loaded(schedule: Schedule, inputs: Sequence[Array]) -> Array:
    """Return (vertices, pieces, elements of a piece), with each rank's input in place."""
    held = [_held(schedule, rank) for rank in range(schedule.ranks)]
    for vector, pieces in zip(inputs, held, strict=True):
        if vector.size % max(1, pieces.size):
            raise SpecError(
                f"{vector.size} elements in {pieces.size} pieces", hint="give a length that the pieces divide."
            )
    elements = inputs[0].size // max(1, held[0].size)
    state_VPE = np.zeros((schedule.vertices, schedule.pieces, elements), dtype=inputs[0].dtype)
    for rank, (vector, pieces) in enumerate(zip(inputs, held, strict=True)):
        state_VPE[rank, pieces] = vector.reshape(pieces.size, elements)
    return state_VPE


def _held(schedule: Schedule, rank: int) -> Array:
    if schedule.kind == "all_gather":
        return np.flatnonzero(schedule.owner == rank)
    if schedule.kind == "all_to_all":
        return np.arange(rank * schedule.ranks, (rank + 1) * schedule.ranks)
    return np.arange(schedule.pieces)


def _result(schedule: Schedule, rank: int) -> Array:
    if schedule.kind == "reduce_scatter":
        return np.flatnonzero(schedule.owner == rank)
    if schedule.kind == "all_to_all":
        return np.arange(rank, schedule.pieces, schedule.ranks)
    return np.arange(schedule.pieces)
