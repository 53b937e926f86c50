"""What does one stage of a cut graph run? A module with its own parameters alone, that trains and evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from supernode.splitting.cut import Cut, needs_gradient
from supernode.splitting.export import plant
from supernode.splitting.places import is_attribute
from supernode.splitting.tidy import value_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stage.

    Attributes:
        module: takes what travels to it and returns what travels on, or, of the last stage, the model's outputs.
        inputs: meta tensors of what it takes; those that require a gradient send one back.
        outputs: likewise.
    """

    module: fx.GraphModule
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def sent(self) -> int:
        """Bytes of what it returns."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.outputs)


def build(whole: fx.GraphModule, how: Cut, index: int) -> Piece:
    """Return a stage of a graph; its parameters and buffers are the graph's own objects.

    What no stage uses is in the one that holds its neighbour before it, so that it is trained and saved once.
    """
    graph, made = fx.Graph(), {}
    gradients = needs_gradient(whole)
    names: dict[str, Any] = {}
    own = how.stage(index)
    final = whole.graph.output_node()
    is_last = index == how.stages - 1
    leaving = tuple(final.args[0]) if is_last else how.travels[index + 1]  # type: ignore[arg-type]
    for value in how.travels[index]:
        made[value] = graph.placeholder(value.name)
        made[value].meta = dict(value.meta)
    for node in own:
        for argument in node.all_input_nodes:
            _take(argument, whole, graph, made, names)
        made[node] = graph.node_copy(node, lambda argument: made[argument])
    results = []
    for value in leaving:
        _take(value, whole, graph, made, names)
        result = made[value]
        if not is_last:
            if not gradients[value] and value_of(value).is_floating_point():
                result = graph.call_function(aten.detach.default, (result,))
            result = graph.call_function(aten.contiguous.default, (result,))
            result.meta["val"] = value_of(value)
        results.append(result)
    graph.output(tuple(results))
    module = fx.GraphModule(names, graph, class_name=f"Stage{index}")
    temporary = _temporary(whole)
    for name, tensor in {**names, **_unused_at(whole, how, index)}.items():
        if isinstance(tensor, Tensor):
            plant(module, name, tensor, persistent=name not in temporary)
    return Piece(
        module=module,
        inputs=tuple(_bare(value, requires_grad=gradients[value]) for value in how.travels[index]),
        outputs=tuple(_bare(value, requires_grad=gradients[value]) for value in leaving),
    )


def homes(whole: fx.GraphModule, how: Cut) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter and buffer of a graph."""
    found: dict[str, set[int]] = {}
    for index in range(how.stages):
        users = [*how.stage(index), *([whole.graph.output_node()] if index == how.stages - 1 else [])]
        for argument in (argument for user in users for argument in user.all_input_nodes if is_attribute(argument)):
            while argument.op != "get_attr":
                (argument,) = argument.all_input_nodes
            found.setdefault(str(argument.target), set()).add(index)
    before = 0
    for name in (n for n, _ in (*whole.named_parameters(), *whole.named_buffers())):
        before = min(found.setdefault(name, {before}))
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


def _take(
    value: fx.Node, whole: fx.GraphModule, graph: fx.Graph, made: dict[Any, fx.Node], names: dict[str, Any]
) -> None:
    """Have an attribute of the whole graph, or this rank's part of it, in the stage's."""
    if not is_attribute(value) or value in made:
        return
    if value.op == "get_attr":
        owner, _, last = str(value.target).rpartition(".")
        names[str(value.target)] = getattr(whole.get_submodule(owner), last)
    for argument in value.all_input_nodes:
        _take(argument, whole, graph, made, names)
    made[value] = graph.node_copy(value, lambda argument: made[argument])


def _unused_at(whole: fx.GraphModule, how: Cut, index: int) -> dict[str, Tensor]:
    everything = dict([*whole.named_parameters(), *whole.named_buffers()])
    return {
        name: everything[name]
        for name, stages in homes(whole, how).items()
        if stages == (index,) and name in everything
    }


def _temporary(whole: nn.Module) -> set[str]:
    kept = whole.state_dict(keep_vars=True).keys()
    return {name for name, _ in whole.named_buffers() if name not in kept}


def _bare(value: fx.Node, *, requires_grad: bool) -> Tensor:
    known = value_of(value)
    return torch.empty(tuple(known.shape), dtype=known.dtype, device="meta", requires_grad=requires_grad)
