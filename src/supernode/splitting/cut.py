"""Where is a graph cut into pipeline stages, and what travels over each cut? Balanced first, then few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from supernode.errors import ModelError
from supernode.splitting.places import Places, attribute, cost_of, is_attribute, nbytes
from supernode.splitting.tidy import schema_of, value_of

SLACK = 1.1
"""How much slower than the best balanced cut's slowest stage a stage may be, for fewer bytes to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A graph's stages.

    Attributes:
        nodes: the graph's operations in order, parts of a tuple right behind it.
        bounds: stage s is `nodes[bounds[s]:bounds[s + 1]]`.
        again: for each stage, earlier operations that it computes once more instead of being sent their values.
        travels: for each stage, the values that it receives, those for later stages included; of the first, the input.
    """

    nodes: tuple[fx.Node, ...]
    bounds: tuple[int, ...]
    again: tuple[tuple[fx.Node, ...], ...]
    travels: tuple[tuple[fx.Node, ...], ...]

    @property
    def stages(self) -> int:
        """Stages in all."""
        return len(self.bounds) - 1

    def stage(self, index: int) -> tuple[fx.Node, ...]:
        """Return the operations of a stage, repeated ones first."""
        return (*self.again[index], *self.nodes[self.bounds[index] : self.bounds[index + 1]])


def weigh(module: fx.GraphModule) -> None:
    """Note the FLOPs of each operation's forward in `node.meta["flops"]`, from shapes alone."""
    known: dict[str, float] = {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            key = f"{node.target} {fx.node.map_arg((node.args, node.kwargs), _kind)}"
            if key not in known:
                known[key] = _flops(node)
            node.meta["flops"] = known[key]


def choose(module: fx.GraphModule, stages: int) -> tuple[int, ...]:
    """Return the bounds of so many stages: of the cuts whose slowest stage is nearly the fastest, the least sent.

    Raises:
        ModelError: the graph has too few operations with parameters, or none of its values can travel.
    """
    graph = Places(module)
    places = graph.places()
    everywhere = graph.repeatable(from_input=True)  # or nearly so
    own = [0.0 if node in everywhere else cost_of(node) for node in graph.nodes]
    cost = np.concatenate(([0.0], np.cumsum(own)))[places]
    trained = np.concatenate(([0], np.cumsum([graph.trains(node) for node in graph.nodes])))[places]
    sent = graph.sent()[places]
    # [i, j]: a stage from place i to place j.
    spans = cost[None, :] - cost[:, None]
    spans[(trained[None, :] <= trained[:, None]) | (places[None, :] <= places[:, None])] = np.inf
    slowest, _ = _best(spans, stages, worst=True)
    if not np.isfinite(slowest):
        raise ModelError(
            f"the model's {int(trained[-1])} operations with parameters cannot be cut into {stages} stages that each "
            "train some",
            hint="set `parallelism.pipeline` × `interleave` to fewer.",
        )
    allowed = np.where(spans <= slowest * SLACK, sent[None, :], np.inf)
    return tuple(int(places[at]) for at in _best(allowed, stages, worst=False)[1])


def cut(module: fx.GraphModule, bounds: Sequence[int]) -> Cut:
    """Return what each stage does and receives.

    A value that follows from the input or from constants alone, such as a mask, is computed again in each stage where
    that sends fewer bytes.
    """
    graph = Places(module)
    ways = [_cut(graph, tuple(bounds), from_input=way) for way in (False, True)]
    return min(ways, key=lambda way: sum(nbytes(value) for values in way.travels[1:] for value in values))


def _cut(graph: Places, bounds: tuple[int, ...], *, from_input: bool) -> Cut:
    repeatable = graph.repeatable(from_input=from_input)
    count = len(bounds) - 1
    again, needs = [], []
    for index in range(count):
        own = graph.nodes[bounds[index] : bounds[index + 1]]
        users = [*own, graph.output] if index == count - 1 else own
        repeated: set[fx.Node] = set()
        needed: set[fx.Node] = set()
        waiting = [argument for user in users for argument in user.all_input_nodes]
        while waiting:
            value = waiting.pop()
            if is_attribute(value) or value in repeated or bounds[index] <= graph.at[value] < bounds[index + 1]:
                continue
            if value in repeatable and value.op != "placeholder":
                repeated.add(value)
                waiting += value.all_input_nodes
            else:
                needed.add(value)
        again.append(tuple(sorted(repeated, key=graph.at.__getitem__)))
        needs.append(needed)
    travels: list[tuple[fx.Node, ...]] = [(graph.input,)]
    for index in range(1, count):
        live = {value for need in needs[index:] for value in need if graph.at[value] < bounds[index]}
        travels.append(tuple(sorted(live, key=graph.at.__getitem__)))
    return Cut(nodes=graph.nodes, bounds=bounds, again=tuple(again), travels=tuple(travels))


def needs_gradient(module: fx.GraphModule) -> dict[fx.Node, bool]:
    """Return for each value whether a gradient comes back for it; rather too many than too few."""
    found: dict[fx.Node, bool] = {}
    for node in module.graph.nodes:
        value = value_of(node)
        if node.op == "get_attr":
            found[node] = isinstance(attribute(module, node), nn.Parameter) and attribute(module, node).requires_grad
        elif node.target is torch.ops.aten.detach.default:
            found[node] = False
        else:
            is_number = not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
            found[node] = is_number and any(found[argument] for argument in node.all_input_nodes)
    return found


def _best(costs: np.ndarray, stages: int, *, worst: bool) -> tuple[float, list[int]]:
    """Return the least cost, by the worst stage or the sum of all, of a way through all places, and its places."""
    reached = np.full(len(costs), np.inf)
    reached[0] = 0.0
    came_from = []
    for _ in range(stages):
        ways = np.maximum(reached[:, None], costs) if worst else reached[:, None] + costs
        came_from.append(ways.argmin(axis=0))
        reached = ways.min(axis=0)
    place, way = len(costs) - 1, [len(costs) - 1]
    for step in reversed(came_from):
        place = int(step[place])
        way.append(place)
    return float(reached[-1]), way[::-1]


def _flops(node: fx.Node) -> float:
    operation: Any = node.target
    given: Any = fx.node.map_arg((node.args, node.kwargs), value_of)
    modes = [value.fake_mode for value in tree_leaves(given) if hasattr(value, "fake_mode")]
    if not modes or schema_of(node) is None:
        return 0.0
    counter = FlopCounterMode(display=False)
    with modes[0], torch.no_grad(), counter:
        operation(*given[0], **given[1])
    return float(counter.get_total_flops())


def _kind(node: fx.Node) -> Any:
    value = value_of(node)
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
