"""Which layers does each stage hold? Cuts the model so that its slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from supernode.errors import SpecError
from supernode.schema.plan import Stage


def cut_stages(
    costs: Sequence[float], *, pipeline: int, interleave: int = 1, embedding: float = 0.0, head: float = 0.0,
    slowness: Sequence[float] = (),
) -> tuple[Stage, ...]:  # fmt: skip
    """Return the stages, in the order in which a sample meets them; stage s is on pipeline rank s % `pipeline`.

    Args:
        costs: of each block, in any one unit (FLOPs, seconds).
        embedding: cost of the embedding, which the first stage adds.
        head: cost of the final norm and the head, which the last stage adds.
        slowness: times as long that each pipeline rank takes for the same; empty where all are alike.

    Raises:
        SpecError: there are fewer blocks than stages.

    >>> [(s.first, s.last) for s in cut_stages([1.0] * 8, pipeline=2, head=2.0)]
    [(0, 5), (5, 8)]
    """
    count = pipeline * interleave
    if len(costs) < count:
        raise SpecError(
            f"{len(costs)} layers cannot fill {count} stages (pipeline {pipeline} × interleave {interleave})",
            hint=f"set `parallelism.pipeline` to {max(1, len(costs) // interleave)} or fewer.",
        )
    least = min(slowness, default=1.0)
    factors = [slowness[s % pipeline] / least if slowness else 1.0 for s in range(count)]
    bounds = _best_bounds(costs, factors, embedding=embedding, head=head)
    return tuple(
        Stage(index=s, rank=s % pipeline, first=first, last=last, embeds=s == 0, heads=s == count - 1)
        for s, (first, last) in enumerate(pairwise(bounds))
    )


def _best_bounds(costs: Sequence[float], factors: Sequence[float], *, embedding: float, head: float) -> list[int]:
    """Return where stages begin and end: least slowest stage by dynamic programming, ties to the most even cut.

    Args:
        factors: what each stage's cost is multiplied by, 1 or more.
    """
    layers, count = len(costs), len(factors)
    sums = [0.0, *accumulate(costs)]
    # best[l]: (slowest stage, sum of squares) of the first l blocks over the stages so far.
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(float("inf"), 0.0)] * layers
    sources: list[list[int]] = []  # where the last of those stages began
    limit = _even_cut(costs, factors, embedding=embedding, head=head) * (1 + 1e-9)
    for stage in range(count):
        extra = (embedding if stage == 0 else 0.0) + (head if stage == count - 1 else 0.0)
        longer: list[tuple[float, float]] = [(float("inf"), 0.0)] * (layers + 1)
        source = [0] * (layers + 1)
        for last in range(stage + 1, layers - (count - stage - 1) + 1):
            if sums[last] > (stage + 1) * limit or sums[-1] - sums[last] > (count - stage - 1) * limit:
                continue  # too much before or behind for any cut that beats the even one
            for first in range(last - 1, stage - 1, -1):
                cost = (sums[last] - sums[first] + extra) * factors[stage]
                if cost > min(limit, longer[last][0]):
                    break  # a longer stage costs more still
                slowest, squares = best[first]
                longer[last], source[last] = min(
                    (longer[last], source[last]), ((max(slowest, cost), squares + cost * cost), first)
                )
        best = longer
        sources.append(source)
    bounds = [layers]
    for source in reversed(sources):
        bounds.append(source[bounds[-1]])
    return bounds[::-1]


def _even_cut(costs: Sequence[float], factors: Sequence[float], *, embedding: float, head: float) -> float:
    """Return the slowest stage where all hold the same number of blocks, give or take one: what is to be beaten."""
    count = len(factors)
    bounds = [len(costs) * stage // count for stage in range(count + 1)]
    stages = [sum(costs[first:last]) for first, last in pairwise(bounds)]
    stages[0] += embedding
    stages[-1] += head
    return max(cost * factor for cost, factor in zip(stages, factors, strict=True))
