"""If an operation's output is to be split, how must its inputs be? One rule an operation; no rule, no split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from supernode.roles.contracting import contraction_of, depthwise, through_attention, through_contraction
from supernode.roles.ops import given, has_tag, is_tensor, name_of, shape, wrap
from supernode.roles.reshaping import Needs, through_expand, through_order, through_repeat, through_reshape
from supernode.roles.shards import Split


@dataclass(frozen=True, slots=True)
class Item:
    """One of several outputs, wanted split."""

    index: int
    split: Split


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice along the split dim itself, wanted split: together with the other slices it makes up the whole."""

    start: int
    split: Split


Want = Split | tuple[Split | None, ...]
"""What is asked of a node's output: a split, or one for each of several outputs (None where nothing reads it)."""
Demand = Split | Item | Piece
"""What a node asks of one of its inputs."""
Demands = Mapping[Node, Demand]


def needs_of(node: Node, want: Want, parts: int) -> Demands | str:
    """Return how a node's inputs must be split, so that its output comes split without anything sent; or why not."""
    name = name_of(node)
    if not isinstance(want, Split):
        several = _SEVERAL.get(name)
        return several(node, want, parts) if several is not None else "it has no rule"
    if refused := want.refusal(parts):
        return refused
    if name == "getitem":
        source, index = node.args
        assert isinstance(source, Node)
        assert isinstance(index, int)
        return {source: Item(index, want)}
    if name in ("slice", "narrow"):
        return _slice(node, want)
    if name in _RULES:
        return _RULES[name](node, want, parts)
    if has_tag(node, torch.Tag.pointwise) or name in _POINTWISE:
        return _pointwise(node, want, parts)
    return "it has no rule"


def merged(node: Node, demands: list[Demand]) -> Want | str:
    """Return what all readers of a node together ask of it; or why they cannot have it."""
    first = demands[0]
    if isinstance(first, Split):
        return first if all(demand == first for demand in demands) else "its readers want it split in different ways"
    if isinstance(first, Item):
        outputs: list[Split | None] = [None] * len(node.meta["val"])
        for demand in demands:
            if not isinstance(demand, Item) or outputs[demand.index] not in (None, demand.split):
                return "its readers want it split in different ways"
            outputs[demand.index] = demand.split
        return tuple(outputs)
    pieces = {demand for demand in demands if isinstance(demand, Piece)}
    ends, segments = 0, tuple[int, ...]()
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start != ends or piece.split.dim != first.split.dim:
            return "its slices do not make up the whole"
        ends += piece.split.size
        segments += piece.split.segments
    if len(pieces) < len(set(demands)) or ends != shape(node)[first.split.dim]:
        return "its slices do not make up the whole"
    return Split(first.split.dim, segments)


def _pointwise(node: Node, want: Split, _: int) -> Needs | str:
    if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        first = node.args[0]
        assert isinstance(first, Node)
        if len(first.users) > 1 or first.op != "call_function" or name_of(first) in _VIEWS:
            return "it changes a value in place that others read"
    needs: dict[Node, Split] = {}
    for operand in node.all_input_nodes:
        if not is_tensor(operand):
            continue
        dim = want.dim - (len(shape(node)) - len(shape(operand)))
        if dim >= 0 and shape(operand)[dim] == want.size:
            needs[operand] = want.moved(dim)
    return needs


def _along(names: tuple[str, ...], *, keeps: bool = True) -> Callable[[Node, Split, int], Needs | str]:
    """Return the rule of an operation that mixes numbers along some dims alone, which it removes unless it keeps."""

    def rule(node: Node, want: Split, _: int) -> Needs | str:
        source = node.all_input_nodes[0]
        rank = len(shape(source))
        found = next((given(node, name) for name in names if given(node, name) is not None), None)
        if found in (None, [], ()):  # `roll` without dims has an empty list of them, and so may `sum`
            return "it mixes all dims"
        mixed = {wrap(dim, rank) for dim in ([found] if isinstance(found, int) else found)}
        dim = want.dim
        if not keeps and not given(node, "keepdim"):
            left = [other for other in range(rank) if other not in mixed]
            dim = left[want.dim]
        return "it mixes the numbers of the split dim" if dim in mixed else {source: want.moved(dim)}

    return rule


def _before(last: int) -> Callable[[Node, Split, int], Needs | str]:
    """Return the rule of an operation that mixes the numbers of the last dims."""

    def rule(node: Node, want: Split, _: int) -> Needs | str:
        if want.dim >= len(shape(node)) - last:
            return "it mixes the numbers of the split dim"
        return {node.all_input_nodes[0]: want}

    return rule


def _norm(node: Node, want: Split, _: int) -> Needs | str:
    if want.dim >= len(shape(node)) - len(given(node, "normalized_shape")):
        return "it needs all numbers of the split dim at once"
    return {node.all_input_nodes[0]: want}


def _batch_norm(node: Node, want: Split, _: int) -> Needs | str:
    if want.dim != 1:
        return "it mixes the numbers of the split dim"
    names = ("weight", "bias", "running_mean", "running_var")
    channels = [operand for name in names if isinstance(operand := given(node, name), Node)]
    return {node.all_input_nodes[0]: want, **{operand: want.moved(0) for operand in channels}}


def _group_norm(node: Node, want: Split, parts: int) -> Needs | str:
    groups = given(node, "num_groups")
    if want.dim != 1 or not want.is_plain or groups % parts:
        return (
            f"{groups} groups do not divide by {parts}" if groups % parts else "it mixes the numbers of the split dim"
        )
    channels = [operand for name in ("weight", "bias") if isinstance(operand := given(node, name), Node)]
    return {node.all_input_nodes[0]: want, **{operand: want.moved(0) for operand in channels}}


def _cat(node: Node, want: Split, _: int) -> Needs | str:
    rank = len(shape(node))
    dim = wrap(given(node, "dim"), rank)
    operands = [operand for operand in given(node, "tensors") if isinstance(operand, Node)]
    if name_of(node) == "stack":
        if want.dim == dim:
            return "it makes the split dim"
        return {operand: want.moved(want.dim - (want.dim > dim)) for operand in operands}
    if want.dim != dim:
        return dict.fromkeys(operands, want)
    needs: dict[Node, Split] = {}
    left = list(want.segments)
    for operand in operands:
        mine: list[int] = []
        while left and sum(mine) < shape(operand)[dim]:
            mine.append(left.pop(0))
        if sum(mine) != shape(operand)[dim] or operand in needs:
            return "it joins several values along the split dim"
        needs[operand] = Split(dim, tuple(mine))
    return needs


def _slice(node: Node, want: Split) -> Demands | str:
    source = node.all_input_nodes[0]
    dim = wrap(given(node, "dim"), len(shape(source)))
    if dim != want.dim:
        return {source: want}
    start = given(node, "start") or 0
    if not isinstance(start, int) or given(node, "step") not in (None, 1):
        return "it takes numbers out of the split dim"
    size = shape(source)[dim]
    return {source: Piece(min(start % size if start < 0 else start, size), want)}


def _select(node: Node, want: Split, _: int) -> Needs | str:
    source = node.all_input_nodes[0]
    dim = wrap(given(node, "dim"), len(shape(source)))
    return {source: want.moved(want.dim + (want.dim >= dim))}


def _gather(node: Node, want: Split, _: int) -> Needs | str:
    source, index = node.args[0], given(node, "index")
    assert isinstance(source, Node)
    if wrap(given(node, "dim"), len(shape(source))) == want.dim:
        return "it takes numbers out of the split dim"
    if name_of(node) == "index_select":
        return {source: want}
    return {source: want, index: want} if shape(source)[want.dim] == shape(index)[want.dim] else "sizes differ"


def _embedding(node: Node, want: Split, _: int) -> Needs | str:
    weight, indices = given(node, "weight"), given(node, "indices")
    rank = len(shape(node))
    return {weight: want.moved(1)} if want.dim == rank - 1 else {indices: want}


def _convolution(node: Node, want: Split, parts: int) -> Needs | str:
    return depthwise(node, want, parts) if contraction_of(node) is None else through_contraction(node, want, parts)


def _parted(node: Node, want: tuple[Split | None, ...], _: int) -> Needs | str:
    """Split, chunk and unbind: along the split dim each output brings segments of its own."""
    source = node.all_input_nodes[0]
    dim = wrap(given(node, "dim"), len(shape(source)))
    wanted = [split for split in want if split is not None]
    if name_of(node) == "unbind":
        if len(set(wanted)) > 1:
            return "its readers want it split in different ways"
        return {source: wanted[0].moved(wanted[0].dim + (wanted[0].dim >= dim))}
    if all(split.dim == dim for split in wanted):
        outputs = node.meta["val"]
        each = [split.segments if split is not None else (outputs[i].shape[dim],) for i, split in enumerate(want)]
        return {source: Split(dim, tuple(segment for segments in each for segment in segments))}
    if len(set(wanted)) > 1 or wanted[0].dim == dim:
        return "its readers want it split in different ways"
    return {source: wanted[0]}


def _sorted(node: Node, want: tuple[Split | None, ...], _: int) -> Needs | str:
    source = node.all_input_nodes[0]
    wanted = {split for split in want if split is not None}
    dim = given(node, "dim")
    if len(wanted) > 1 or dim is None or wrap(dim, len(shape(source))) in {split.dim for split in wanted}:
        return "it mixes the numbers of the split dim"
    return {source: wanted.pop()}


# What passes each number on by itself, though PyTorch does not mark it so.
_POINTWISE = frozenset((
    "to", "_to_copy", "contiguous", "alias", "detach", "type_as", "dropout", "native_dropout", "alpha_dropout",
    "feature_dropout", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "masked_fill",
    "__and__", "__or__", "__xor__", "floor_divide", "where", "log_sigmoid", "lift_fresh_copy",
))  # fmt: skip
_RESHAPES = (
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
)  # fmt: skip
_ORDERS = ("permute", "transpose", "t", "mT", "numpy_T", "swapaxes")
_VIEWS = frozenset((*_RESHAPES, *_ORDERS, "expand", "slice", "narrow", "select", "detach", "alias", "getitem"))
_PRODUCTS = (
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "transformers::grouped_mm_fallback",
)  # fmt: skip
_MIXING = (
    "softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "flip", "roll", "logcumsumexp", "diff",
)  # fmt: skip
_REDUCING = (
    "sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod", "any", "all", "argmax", "argmin",
    "linalg_vector_norm", "norm", "nansum",
)  # fmt: skip
_RULES: dict[str, Callable[[Node, Split, int], Needs | str]] = {
    **dict.fromkeys(_RESHAPES, through_reshape),
    **dict.fromkeys(_ORDERS, through_order),
    "expand": through_expand,
    "repeat_interleave": through_repeat,
    **dict.fromkeys(_PRODUCTS, through_contraction),
    **{f"conv{dims}d": _convolution for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _convolution for dims in (1, 2, 3)},
    "scaled_dot_product_attention": through_attention,
    **dict.fromkeys(_MIXING, _along(("dim", "dims"))),
    **dict.fromkeys(_REDUCING, _along(("dim",), keeps=False)),
    **dict.fromkeys(("tril", "triu"), _before(2)),
    **{f"{kind}_pool{dims}d": _before(dims) for dims in (1, 2, 3) for kind in ("max", "avg")},
    **{f"adaptive_{kind}_pool{dims}d": _before(dims) for dims in (1, 2, 3) for kind in ("max", "avg")},
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "cat": _cat,
    "stack": _cat,
    "select": _select,
    **dict.fromkeys(("gather", "index_select"), _gather),
    "embedding": _embedding,
}
_SEVERAL: dict[str, Callable[[Node, tuple[Split | None, ...], int], Needs | str]] = {
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _parted),
    **dict.fromkeys(("sort", "topk"), _sorted),
}


def random(node: Node) -> bool:
    """Whether an operation draws random numbers as it is called here."""
    if not has_tag(node, torch.Tag.nondeterministic_seeded):
        return False
    chance: Any = next((given(node, name) for name in ("dropout_p", "p") if given(node, name) is not None), None)
    return chance != 0
