"""What of a graph differs between training and evaluation? It follows the module's `training`, as layers do."""

from __future__ import annotations

import operator

import torch
from torch import fx

from supernode.splitting.tidy import in_training, schema_of, written

aten = torch.ops.aten


def let_switch(module: fx.GraphModule) -> None:
    """Make what is random, or changes buffers, follow the module's `training`, as the layers that it came from did.

    Those are the arguments `train` and `training` of ATen operations, `dropout_p` of attention, and changes of buffers.
    """
    graph = module.graph
    training: fx.Node | None = None
    for node in list(graph.nodes):
        schema = schema_of(node)
        if schema is None:
            continue
        changes = {}
        for place, argument in enumerate(schema.arguments):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            is_flag = argument.name in ("train", "training") and given is True and not _is_stateless(node)
            is_share = argument.name == "dropout_p" and isinstance(given, float) and given > 0
            if is_flag or is_share:
                changes[argument.name, place] = given
        changes_buffer = any(value.op == "get_attr" for value in written(node))
        if not changes and not changes_buffer:
            continue
        if training is None:
            with graph.inserting_before(next(iter(graph.nodes))):
                training = graph.create_node("get_attr", "training")
        for (name, place), given in changes.items():
            with graph.inserting_before(node):
                now = training if given is True else graph.call_function(operator.mul, (given, training))
            if place < len(node.args):
                node.update_arg(place, now)
            else:
                node.update_kwarg(name, now)
        if changes_buffer:
            node.args, node.target = (training, node.target, *node.args), in_training
    module.recompile()


def _is_stateless(node: fx.Node) -> bool:
    """Tell whether a norm has no running statistics, and so takes the batch's in evaluation, too."""
    return node.target is aten.batch_norm.default and node.args[3] is None
