"""What of an exported graph can go? Regions become plain nodes, in-place operations new values, and no-ops vanish."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from supernode.errors import ModelError

aten = torch.ops.aten
# Copies of values that are as asked for already, and checks of what a graph of fixed shapes cannot break.
PASSING = frozenset({aten.to, aten.alias, aten.detach_, aten.contiguous, aten.lift_fresh_copy, aten.expand, aten.slice})
_REGIONS = {
    "wrap_with_set_grad_enabled": 1,  # (enabled, graph, *inputs)
    "wrap_with_autocast": 4,  # (device, dtype, enabled, cache, graph, *inputs)
    "tag_activation_checkpoint": 0,  # (graph, *inputs)
}


def tidy(exported: fx.GraphModule, names: Mapping[Any, str | None]) -> tuple[fx.Graph, dict[str, Any]]:
    """Return an exported graph made plain, and the tensors that it uses by the names that it uses them under.

    Args:
        names: attribute of the exported graph to the user's name; None for a constant of the graph's own.

    Raises:
        ModelError: the forward switches mixed precision on, or has control flow of its own.
    """
    copier = _Copier(exported, names)
    copier.copy(exported.graph)
    graph = copier.graph
    replace_in_place(graph, copier.tensors)
    _drop_passing(graph)
    _drop_dead(graph)
    graph.lint()
    left = {node.target for node in graph.nodes if node.op == "get_attr"}
    return graph, {name: tensor for name, tensor in copier.tensors.items() if name in left}


def schema_of(node: fx.Node) -> Any:
    """Return the schema of an ATen operation; None for another node."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def value_of(node: Any) -> Any:
    """Return the shape-only value of a node; a constant as it is."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def in_training(is_training: bool, change: Callable[..., Any], buffer: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Change a buffer while the module trains."""
    if is_training:
        change(buffer, *rest, **named)
    return buffer


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation changes in place."""
    if node.target is in_training:
        return [argument for argument in node.args[2:3] if isinstance(argument, fx.Node)]
    schema = schema_of(node)
    if schema is None or not schema.is_mutable:
        return []
    by_name = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    changed = [by_name.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [argument for argument in changed if isinstance(argument, fx.Node)]


def viewed(node: fx.Node) -> list[fx.Node]:
    """Return the arguments whose memory a node's value may be, or be part of."""
    if node.target is operator.getitem:
        return [argument for argument in node.args[:1] if isinstance(argument, fx.Node)]
    schema = schema_of(node)
    if schema is None or not any(value.alias_info is not None for value in schema.returns):
        return []
    by_name = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    seen = [by_name.get(argument.name) for argument in schema.arguments if argument.alias_info is not None]
    return [argument for argument in seen if isinstance(argument, fx.Node)]


class _Copier:
    """Copies a graph into a new one, regions' graphs in the place of the regions."""

    def __init__(self, exported: fx.GraphModule, names: Mapping[Any, str | None]) -> None:
        self.exported, self.names = exported, names
        self.graph = fx.Graph()
        self.tensors: dict[str, Any] = {}
        self._attributes: dict[str, fx.Node] = {}

    def copy(self, graph: fx.Graph) -> None:
        """Copy the whole."""
        done: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "call_module" and node.target == "_guards_fn":
                continue
            done[node] = self._one(node, done, self.exported)

    def _one(self, node: fx.Node, done: dict[fx.Node, Any], owner: nn.Module) -> Any:
        if node.op == "get_attr":
            path, _, last = str(node.target).rpartition(".")
            value = getattr(owner.get_submodule(path), last)
            return value if isinstance(value, fx.GraphModule) else self._attribute(node, value)
        if node.target is torch._C._set_grad_enabled:
            return None
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._region(node, [done[a] if isinstance(a, fx.Node) else a for a in node.args])
        source: Any = node.args[0] if node.target is operator.getitem else None
        if isinstance(done.get(source), tuple):
            place: Any = node.args[1]
            return done[source][place]
        return self.graph.node_copy(node, lambda argument: done[argument])

    def _attribute(self, node: fx.Node, value: Any) -> fx.Node:
        name = self.names.get(node.target) or f"constant_{str(node.target).replace('.', '_')}"
        if name not in self._attributes:
            self.tensors[name] = value
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                made = self.graph.create_node("get_attr", name, name=name.replace(".", "_"))
            made.meta["val"] = node.meta.get("val", value)
            self._attributes[name] = made
        return self._attributes[name]

    def _region(self, node: fx.Node, arguments: list[Any]) -> tuple[Any, ...]:
        operation: Any = node.target
        name = str(operation.name())
        if name not in _REGIONS:
            raise ModelError(
                f"the model's forward holds `{name}`, which is not cut",
                hint="write it without control flow on values, or use `data` and `fsdp` alone.",
            )
        at = _REGIONS[name]
        if name == "wrap_with_autocast" and arguments[2]:
            raise ModelError(
                "the model's forward switches `torch.autocast` on, which is not cut",
                hint="leave autocast out and set `precision` in the job, or use `data` and `fsdp` alone.",
            )
        inner: fx.GraphModule = arguments[at]
        inputs = iter(arguments[at + 1 :])
        done: dict[fx.Node, Any] = {}
        for each in inner.graph.nodes:
            if each.op == "output":
                break
            done[each] = next(inputs) if each.op == "placeholder" else self._one(each, done, inner)
        given: Any = inner.graph.output_node().args[0]
        outputs = tuple(done[value] if isinstance(value, fx.Node) else value for value in given)
        if name == "wrap_with_set_grad_enabled" and not arguments[0]:
            return tuple(self._detached(value) for value in outputs)
        return outputs

    def _detached(self, value: Any) -> Any:
        if not isinstance(value, fx.Node) or not isinstance(value_of(value), Tensor):
            return value
        made = self.graph.call_function(aten.detach.default, (value,))
        made.meta = {**value.meta}
        return made


def replace_in_place(graph: fx.Graph, tensors: Mapping[str, Any]) -> None:
    """Make each in-place operation on an activation one that makes a new value, where nothing else sees the old one.

    Those on buffers stay: they are what the module keeps. So do those on values that have views, which `cut` keeps
    in one stage.
    """
    for node in list(graph.nodes):
        changed = written(node)
        if len(changed) != 1 or node.args[:1] != (changed[0],) or _roots(changed[0]) & set(tensors):
            continue
        target, later = _functional(node), _later_users(changed[0], node)
        others = [user for user in [*changed[0].users, *_bases(changed[0])] if user is not node]
        if target is None or any(viewed(user) for user in changed[0].users if user is not node):
            continue
        if viewed(changed[0]) and any(_later_users(base, node) for base in _bases(changed[0])):
            continue
        if any(written(user) and user not in later for user in others if isinstance(user, fx.Node)):
            continue
        node.target = target
        before, after = value_of(changed[0]), _computed(node)
        if after is None or after.shape != before.shape:
            continue
        node.meta["val"] = after
        result = node
        if after.dtype != before.dtype:
            with graph.inserting_after(node):
                result = graph.call_function(aten.to.dtype, (node, before.dtype))
            result.meta = {**node.meta, "val": before}
            node.replace_all_uses_with(result, delete_user_cb=lambda user, keep=result: user is not keep)
        for user in later:
            user.replace_input_with(changed[0], result)


def _functional(node: fx.Node) -> Any:
    operation: Any = node.target
    packet, overload = operation._overloadpacket, operation._overloadname
    name = packet.__name__
    if packet is aten.detach_:
        return aten.detach.default
    other = getattr(aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    return getattr(other, overload, None) if other is not None else None


def _computed(node: fx.Node) -> Tensor | None:
    """Return what a node gives without values."""
    operation: Any = node.target
    given: Any = fx.node.map_arg((node.args, node.kwargs), value_of)
    modes = [value.fake_mode for value in torch.utils._pytree.tree_leaves(given) if hasattr(value, "fake_mode")]
    if not modes:
        return None
    with modes[0], torch.no_grad():
        found = operation(*given[0], **given[1])
    return found if isinstance(found, Tensor) else None


def _later_users(value: fx.Node, node: fx.Node) -> list[fx.Node]:
    order = {each: place for place, each in enumerate(value.graph.nodes)}
    return [user for user in value.users if order[user] > order[node]]


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    for base in viewed(node):
        yield base
        yield from _bases(base)


def _roots(node: fx.Node) -> set[str]:
    """Return the attributes whose memory a value may be."""
    own = {str(node.target)} if node.op == "get_attr" else set()
    return own.union(*(_roots(base) for base in viewed(node)))


def _drop_passing(graph: fx.Graph) -> None:
    """Drop nodes whose value is their input's, where nothing in the graph is changed in place."""
    kept = {each for node in graph.nodes for value in written(node) for each in (value, *_bases(value))}
    for node in list(graph.nodes):
        packet: Any = getattr(node.target, "_overloadpacket", None)
        if packet is aten._assert_tensor_metadata:
            graph.erase_node(node)
        elif packet is aten.cat:
            _drop_empty(node)
        elif (packet is aten.dropout and node.args[1] == 0.0) or (
            packet in PASSING and node not in kept and node.args[0] not in kept and _is_same(node)
        ):
            node.replace_all_uses_with(node.args[0])


def _is_same(node: fx.Node) -> bool:
    before, after = value_of(node.args[0]), value_of(node)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    is_same = before.shape == after.shape and before.dtype == after.dtype and before.device == after.device
    operation: Any = node.target
    if operation._overloadpacket in (aten.contiguous, aten.slice, aten.to):
        return is_same and before.stride() == after.stride()
    return is_same


def _drop_empty(node: fx.Node) -> None:
    """Leave out of a concatenation what holds nothing, as caches hold before a first token."""
    given: Any = node.args[0]
    parts = [part for part in given if not (value_of(part).numel() == 0 and value_of(part).ndim == 1)]
    if len(parts) == 1:
        node.replace_all_uses_with(parts[0])
    elif len(parts) < len(given):
        node.args = (parts, *node.args[1:])


def _drop_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output") and not written(node):
            graph.erase_node(node)
