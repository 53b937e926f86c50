"""What does a traced module ask of a card? Each of its blocks, forward and backward, in the terms of the sublayers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from supernode.schema.trace import ModelTrace, PassWork, TracedPart
from supernode.workload.shape import as_numbers
from supernode.workload.sublayers import Demand


def block_passes(trace: ModelTrace) -> tuple[tuple[PassWork, PassWork], ...]:
    """Return the forward and the backward of each piece that the model can be cut into."""
    return tuple(
        (_sum([part.forward for part in block]), _sum([part.backward for part in block]))
        for block in map(trace.block, range(trace.blocks))
    )


def redone_passes(trace: ModelTrace, names: Collection[str]) -> tuple[PassWork, ...]:
    """Return the forward of the named parts in each piece, which is computed once more."""
    blocks = map(trace.block, range(trace.blocks))
    return tuple(_sum([part.forward for part in block if part.name in names]) for block in blocks)


def traced_demand(passes: Sequence[PassWork], *, samples: float, element: int) -> Demand:
    """Return what passes ask, one entry for each; time it as a forward, whichever it is: the backward is counted too.

    Args:
        samples: of the micro-batch.
        element: bytes of an operand of the products.
    """
    works = [each.of(samples) for each in passes]
    return Demand(
        products=as_numbers([work.products for work in works]),
        operands=as_numbers([work.operands / element for work in works]),
        inputs=np.zeros(()),
        scores=as_numbers([work.scores for work in works]),
        traffic=as_numbers([work.moved for work in works]),
        kernels=as_numbers([each.kernels for each in passes]),
        score_traffic=np.zeros(()),
        exponentials=as_numbers([work.exponentials for work in works]),
    )


def held_parameters(parts: Sequence[TracedPart]) -> tuple[int, int]:
    """Return elements that parts work with, and those of them that are trained; what they tie to others is kept here,
    too."""
    names = {part.name for part in parts}
    borrowed = {owner: count for part in parts for owner, count in part.shared if owner not in names}
    tied = sum(borrowed.values())
    return sum(part.parameters for part in parts) + tied, sum(part.trained for part in parts) + tied


def _sum(passes: Sequence[PassWork]) -> PassWork:
    total = PassWork()
    for each in passes:
        total = total + each
    return total
