"""What may be done to a graph's operations: where may a cut go, what is live there, and what can be computed again?"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from supernode.axes.tensor import local, spread
from supernode.roles.shards import part_of
from supernode.splitting.tidy import schema_of, value_of, viewed, written

FLOPS_PER_BYTE = 100.0
"""Arithmetic in whose time a byte is read or written: accelerators of 2020 to 2025 lie between 60 and 300."""
MOST_PLACES = 1500
"""Places considered; of a longer graph those where the fewest bytes are live."""


def is_attribute(node: fx.Node) -> bool:
    """Tell whether a node is a parameter or buffer, or this rank's part of one."""
    return node.op == "get_attr" or (node.target is local and is_attribute(node.all_input_nodes[0]))


class Places:
    """A graph's operations in order, and what may be done to them."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        graph = module.graph
        (self.input,) = graph.find_nodes(op="placeholder")
        self.output = graph.output_node()
        self.nodes = _in_order(graph)
        self.at = {node: place for place, node in enumerate(self.nodes)} | {
            self.input: -1,
            self.output: len(self.nodes),
        }
        self.last = {
            value: max((self.at[user] for user in value.users), default=self.at[value])
            for value in (self.input, *self.nodes)
        }
        self.changed = {value for node in self.nodes for value in (*written(node), *_statistics(node))}
        self.seen = self._seen()

    def _seen(self) -> set[fx.Node]:
        """Return parameters, and views of them: in each stage that uses them they are taken anew, and never sent."""
        found: set[fx.Node] = set()
        for node in self.module.graph.nodes:
            is_view = bool(viewed(node)) or node.target in (local, spread, part_of)
            if node.op == "get_attr":
                if isinstance(attribute(self.module, node), nn.Parameter):
                    found.add(node)
            elif is_view and not written(node) and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found

    def trains(self, node: fx.Node) -> bool:
        """Tell whether an operation computes with a trained parameter."""
        return node not in self.seen and any(
            argument in self.seen and self._is_trained(argument) for argument in node.all_input_nodes
        )

    def _is_trained(self, node: fx.Node) -> bool:
        while node.op != "get_attr":
            node = node.all_input_nodes[0]
        return bool(getattr(attribute(self.module, node), "requires_grad", False))

    def places(self) -> np.ndarray:
        """Return the places where a cut may go, both ends included."""
        allowed = np.ones(len(self.nodes) + 1, dtype=bool)
        for value in (self.input, *self.nodes):
            if value is not self.input and not isinstance(value_of(value), Tensor):
                allowed[self.at[value] + 1 : self.last[value] + 1] = False  # A tuple or a number does not travel.
        for first, last in self._bound_together():
            allowed[first + 1 : last + 1] = False
        allowed[[0, -1]] = True
        places = np.flatnonzero(allowed)
        if len(places) > MOST_PLACES:
            few = np.argsort(self.sent()[places], kind="stable")[:MOST_PLACES]
            places = places[sorted({0, len(places) - 1, *few.tolist()})]
        return places

    def _bound_together(self) -> list[tuple[int, int]]:
        """Return spans that one stage must hold: from a value's making, or a buffer's first use, to its last change."""
        spans = []
        for value in self.changed:
            root = value
            while seen := viewed(root):
                root = seen[0]
            root = root.all_input_nodes[0] if root.target is local else root
            family = self._family(root)
            users = [self.at[user] for each in family for user in each.users if user in self.at]
            first = min(users) if root.op == "get_attr" else self.at[root]
            last = users if root.op == "get_attr" else [self.at[n] for n in self.nodes if set(written(n)) & family]
            spans.append((max(first, 0), max(last)))
        return spans

    def _family(self, root: fx.Node) -> set[fx.Node]:
        """Return a value with all views of it."""
        family, waiting = {root}, [root]
        while waiting:
            value = waiting.pop()
            new = [u for u in value.users if u not in family and (u.target is local or value in viewed(u))]
            family.update(new)
            waiting += new
        return family

    def repeatable(self, *, from_input: bool) -> set[fx.Node]:
        """Return values that follow from constants (and the input) alone and cost little, and views of parameters."""
        found = self.seen.intersection(self.nodes) | ({self.input} if from_input else set())
        fixed = {
            node
            for node in self.module.graph.nodes
            if is_attribute(node) and node not in self.seen and not self._family(node) & self.changed
        }
        for node in self.nodes:
            schema = schema_of(node)
            is_plain = schema is not None or node.target in (operator.getitem, part_of)
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            is_changed = bool(written(node)) or bool(self._family(node) & self.changed)
            is_cheap = is_plain and not is_random and not is_changed and not node.meta.get("flops")
            known = [a in fixed or (a in found and a not in self.seen) for a in node.all_input_nodes]
            if is_cheap and all(known):
                found.add(node)
        return found

    def sent(self) -> np.ndarray:
        """Return the bytes that are live at each place."""
        constant, repeatable = self.repeatable(from_input=False), self.repeatable(from_input=True)
        fixed, derived = np.zeros(len(self.nodes) + 1), np.zeros(len(self.nodes) + 1)
        for value in (self.input, *self.nodes):
            if value not in constant:
                into = derived if value in repeatable else fixed
                into[self.at[value] + 1 : self.last[value] + 1] += nbytes(value)
        return fixed + np.minimum(derived, nbytes(self.input))


def _in_order(graph: fx.Graph) -> tuple[fx.Node, ...]:
    ordered: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and not is_attribute(node):
            ordered += [node, *_parts(node)]
    return tuple(ordered)


def _parts(node: fx.Node) -> list[fx.Node]:
    parts = [user for user in node.users if user.target is operator.getitem]
    return [each for part in parts for each in (part, *_parts(part))]


def cost_of(node: fx.Node) -> float:
    """Return a node's forward in FLOPs, what it reads and writes counted by the time it takes."""
    if (viewed(node) and not written(node)) or node.target in (spread, part_of):
        return 0.0
    moved = nbytes(node) + sum(nbytes(argument) for argument in node.all_input_nodes)
    return float(node.meta.get("flops", 0.0)) + FLOPS_PER_BYTE * moved


def nbytes(node: fx.Node) -> float:
    """Return the bytes of a node's value."""
    leaves = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    return float(sum(leaf.numel() * leaf.element_size() for leaf in leaves))


def _statistics(node: fx.Node) -> list[fx.Node]:
    """Return the running statistics that a norm changes in training, which its schema does not tell."""
    if node.target not in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
        return []
    return [state for state in node.args[3:5] if isinstance(state, fx.Node)]


def attribute(module: nn.Module, node: fx.Node) -> Any:
    """Return the parameter, buffer or other attribute that a node stands for."""
    owner, _, last = str(node.target).rpartition(".")
    return getattr(module.get_submodule(owner), last, None)
