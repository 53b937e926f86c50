"""What of a graph differs between training and evaluation? It follows the module's `training`, as layers do."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from supernode.axes.tensor import draw_apart
from supernode.splitting.places import is_attribute
from supernode.splitting.tidy import in_training, schema_of, written

aten = torch.ops.aten


def let_switch(module: fx.GraphModule) -> None:
    """Make what is random, or changes buffers, follow the module's `training`, as the layers that it came from did.

    Those are the arguments `train` and `training` of ATen operations, `dropout_p` of attention, and changes of buffers.
    """
    graph = module.graph
    training: fx.Node | None = None
    for node in list(graph.nodes):
        flags = _flags(node)
        changes_buffer = schema_of(node) is not None and any(is_attribute(value) for value in written(node))
        if not flags and not changes_buffer:
            continue
        if training is None:
            with graph.inserting_before(next(iter(graph.nodes))):
                training = graph.create_node("get_attr", "training")
        for where, given in flags.items():
            with graph.inserting_before(node):
                now = training if given is True else graph.call_function(operator.mul, (given, training))
            if isinstance(where, int):
                node.update_arg(where, now)
            else:
                node.update_kwarg(where, now)
        if changes_buffer:
            node.args, node.target = (training, node.target, *node.args), in_training
    module.training = True
    module.recompile()


def _flags(node: fx.Node) -> dict[int | str, Any]:
    """Return the arguments of an operation that say that it trains, by their places or names."""
    before = 2 if node.target is draw_apart else 0  # the operation and the rank
    operation = node.args[0] if before else node.target
    if not isinstance(operation, torch._ops.OpOverload) or _is_stateless(node):
        return {}
    found: dict[int | str, Any] = {}
    for place, argument in enumerate(operation._schema.arguments, start=before):
        where = place if place < len(node.args) else argument.name
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        is_flag = argument.name in ("train", "training") and given is True
        if is_flag or (argument.name == "dropout_p" and isinstance(given, float) and given > 0):
            found[where] = given
    return found


def _is_stateless(node: fx.Node) -> bool:
    """Tell whether a norm has no running statistics, and so takes the batch's in evaluation, too."""
    return node.target is aten.batch_norm.default and node.args[3] is None
