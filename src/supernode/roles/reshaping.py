"""What becomes of a split dim where a tensor changes its shape but not its numbers?"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch.fx import Node

from supernode.roles.ops import given, name_of, shape, wrap
from supernode.roles.shards import Split

Needs = Mapping[Node, Split]
"""The inputs that must be split, and how; the others must be whole."""


def through_reshape(node: Node, want: Split, parts: int) -> Needs | str:
    """Trace a split backward through view, reshape, flatten, squeeze and the like, by shapes alone."""
    (source,) = node.all_input_nodes[:1]
    into, out = shape(source), shape(node)
    group = _group_of(into, out, want.dim)
    if group is None:
        return "a size that is not fixed is merged with the split one"
    sources, targets = group
    before = [out[dim] for dim in targets if dim < want.dim]
    after = [out[dim] for dim in targets if dim > want.dim]
    numbers = [*before, *after, *(into[dim] for dim in sources)]
    if not all(isinstance(size, int) for size in numbers):
        return "a size that is not fixed is merged with the split one"
    flat = [segment * prod(after) for segment in want.segments] * prod(before)
    reason = ""
    for dim in sources:
        outer = prod(into[other] for other in sources if other < dim)
        inner = prod(into[other] for other in sources if other > dim)
        if into[dim] == 1 or len(flat) % outer or flat != flat[: len(flat) // outer] * outer:
            continue
        pattern = flat[: len(flat) // outer]
        if any(size % inner for size in pattern):
            continue
        segments = tuple(size // inner for size in pattern)
        if sum(segments) != into[dim]:
            continue
        # Parts end at the same numbers on both sides only where both divide, unless the dim stays what it is.
        if inner != prod(after) and any(size % parts for size in (*segments, *want.segments)):
            odd = next(size for size in (*segments, *want.segments) if size % parts)
            reason = f"{odd} of `{name_of(node)}` {list(into)} → {list(out)} does not divide by {parts}"
            continue
        return {source: Split(dim, segments)}
    return reason or f"the split part of `{name_of(node)}` {list(into)} → {list(out)} is not contiguous before it"


def _group_of(into: tuple[Any, ...], out: tuple[Any, ...], wanted: int) -> tuple[list[int], list[int]] | None:
    """Return the dims on both sides that hold the same numbers and contain one dim of the output."""
    i, j = len(into) - 1, len(out) - 1
    while i >= 0 and j >= 0:
        sources, targets, a, b = [i], [j], into[i], out[j]
        while not _same(a, b):
            if not isinstance(a, int) and not isinstance(b, int):
                return None
            if i > 0 and isinstance(a, int) and (not isinstance(b, int) or a < b or j == 0):
                i -= 1
                sources.insert(0, i)
                a = a * into[i]
            elif j > 0 and isinstance(b, int):
                j -= 1
                targets.insert(0, j)
                b = b * out[j]
            else:
                return None
        if wanted in targets:
            return sources, targets
        i, j = i - 1, j - 1
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def through_order(node: Node, want: Split, _: int) -> Needs | str:
    """Trace a split backward through permute, transpose and the like."""
    (source,) = node.all_input_nodes[:1]
    rank = len(shape(source))
    name = name_of(node)
    order = list(range(rank))
    if name == "permute":
        order = [wrap(dim, rank) for dim in given(node, "dims")]
    elif name == "movedim":
        return "no rule"
    elif name == "numpy_T":
        order.reverse()
    else:
        first, second = (-2, -1) if name in ("t", "mT") else (node.args[1], node.args[2])
        if rank > 1:
            a, b = wrap(first, rank), wrap(second, rank)  # type: ignore[arg-type]
            order[a], order[b] = order[b], order[a]
    return {source: want.moved(order[want.dim])}


def through_expand(node: Node, want: Split, _: int) -> Needs | str:
    """Trace a split backward through expand; a size of one on the way is the same for each rank."""
    (source,) = node.all_input_nodes[:1]
    dim = want.dim - (len(shape(node)) - len(shape(source)))
    if dim < 0 or shape(source)[dim] != want.size:
        return {}
    return {source: want.moved(dim)}


def through_repeat(node: Node, want: Split, parts: int) -> Needs | str:
    """Trace a split backward through repeat_interleave of whole numbers of times."""
    source, times, dim = node.args[0], given(node, "repeats"), given(node, "dim")
    assert isinstance(source, Node)
    if not isinstance(times, int) or dim is None:
        return "no rule"
    if wrap(dim, len(shape(source))) != want.dim:
        return {source: want}
    if any(segment % (times * parts) for segment in want.segments):
        return f"{want.size // times} repeated {times} times does not divide by {parts}"
    return {source: Split(want.dim, tuple(segment // times for segment in want.segments))}
