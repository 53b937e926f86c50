"""Which numbers in an operation's arguments are sizes of the whole, and what are they on one rank?"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from supernode.axes.tensor import draw_apart
from supernode.roles.contracting import contraction_of
from supernode.roles.ops import given, name_of, put, shape, wrap
from supernode.roles.roles import Roles
from supernode.roles.rules import random
from supernode.roles.shards import Split

aten = torch.ops.aten


def adapt(node: Node, roles: Roles, *, parts: int, rank: int) -> None:
    """Change a split node's own arguments to this rank's sizes; its inputs are left to the caller."""
    want = roles.wants[node]
    name = name_of(node)
    if isinstance(want, Split):
        held = want.held(parts=parts, rank=rank)
        if name in ("view", "reshape", "_unsafe_view"):
            _resize(node, list(node.args[1]), want.dim, held)  # type: ignore[arg-type]
        elif name in ("unflatten", "view_as", "reshape_as") or (name == "squeeze" and len(node.args) < 2):
            _resize(node, list(shape(node)), want.dim, held)
        elif name == "expand":
            sizes = list(given(node, "size"))
            sizes[want.dim] = held if sizes[want.dim] != -1 else -1
            put(node, "size", sizes)
        elif name in ("slice", "narrow"):
            _slice(node, want, roles, parts=parts, rank=rank)
        elif name == "repeat_interleave" and given(node, "output_size") is not None:
            put(node, "output_size", None)
        elif name.startswith("conv") and contraction_of(node) is None:
            put(node, "groups", given(node, "groups") // parts)
        elif name == "group_norm":
            put(node, "num_groups", given(node, "num_groups") // parts)
    elif name in ("split", "split_with_sizes", "chunk"):
        _part(node, want, parts=parts, rank=rank)
    if getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:  # type: ignore[union-attr]
        packet = getattr(aten, name.removesuffix("_"))
        node.target = getattr(packet, node.target._overloadname)  # type: ignore[union-attr]
    if random(node):
        assert not isinstance(node.target, str)
        node.args = (node.target, rank, *node.args)  # type: ignore[arg-type]
        node.target = draw_apart


def _resize(node: Node, sizes: list[Any], dim: int, held: int) -> None:
    if sizes[dim] != -1:
        sizes[dim] = held
    # A part may lie in memory in another way than the whole, so a view may need a copy.
    node.target = aten.reshape.default
    node.args = (node.args[0], sizes)
    node.kwargs = {}


def _slice(node: Node, want: Split, roles: Roles, *, parts: int, rank: int) -> None:
    source = node.all_input_nodes[0]
    if wrap(given(node, "dim"), len(shape(source))) != want.dim:
        return
    whole = roles.wants[source]
    assert isinstance(whole, Split)
    start = given(node, "start") or 0
    start += shape(source)[want.dim] if start < 0 else 0
    before, count = 0, 0
    while before < start:
        before, count = before + whole.segments[count], count + 1
    first = Split(want.dim, whole.segments[:count]).held(parts=parts, rank=rank)
    held = want.held(parts=parts, rank=rank)
    put(node, "start", first)
    put(node, *(("length", held) if name_of(node) == "narrow" else ("end", first + held)))


def _part(node: Node, want: tuple[Split | None, ...], *, parts: int, rank: int) -> None:
    source = node.all_input_nodes[0]
    dim = wrap(given(node, "dim"), len(shape(source)))
    if any(split is not None and split.dim != dim for split in want):
        return
    whole = [Split(dim, (value.shape[dim],)) for value in node.meta["val"]]
    sizes = [(split or other).held(parts=parts, rank=rank) for split, other in zip(want, whole, strict=True)]
    node.target = aten.split_with_sizes.default
    node.args = (source, sizes, dim)
    node.kwargs = {}
