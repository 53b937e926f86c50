"""How does a graph become one tensor rank's part of it: shards for parameters, local sizes, and collectives between?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx import GraphModule, Node

from supernode.axes.tensor import gather, local, look_up, spread, total
from supernode.roles.adapt import adapt
from supernode.roles.ops import given, is_tensor, name_of, put, shape
from supernode.roles.report import SplitReport, report
from supernode.roles.roles import Roles, find_roles
from supernode.roles.rules import Want
from supernode.roles.seeds import Seed, tensor_of
from supernode.roles.shards import Split, part_of, to_local

aten = torch.ops.aten


def split_tensor(
    graph: GraphModule, group: ProcessGroup, mesh: DeviceMesh, *, keeps_logits_split: bool
) -> SplitReport:  # fmt: skip
    """Rewrite a graph into this rank's part of it, in place, and return what was split and what was not.

    Parameters become their local parts: DTensors where the part is contiguous, else plain parameters that the report
    tells how to put together. What computes the same on every rank stays; its gradients are summed where its values
    enter a split region, so a parameter that is held whole gets one gradient on all ranks. Random numbers inside a
    split region differ between ranks, so dropout there is another draw than one process makes.

    Args:
        graph: ATen operations as `torch.export` gives them in training mode, with whole shapes in `node.meta["val"]`;
            its parameters hold the whole values, the same on every rank, or none (on the meta device).
        group: the tensor ranks.
        mesh: their mesh, of one dim.
        keeps_logits_split: leave an only output split by its last dim as `torch.chunk` would cut it, for
            `SplitCrossEntropy`; the report says whether it is. Otherwise it is gathered.
    """
    parts = dist.get_world_size(group)
    _one_node_each(graph)
    if parts > 1:
        _repeat_heads(graph, parts)
    roles = find_roles(graph, parts) if parts > 1 else Roles()
    keeps = keeps_logits_split and len(graph.graph.output_node().all_input_nodes) == 1
    told = report(graph, roles, parts=parts, keeps_logits_split=keeps)
    _Rewriter(graph, roles, group, mesh).rewrite(keeps_logits_split=keeps)
    return told


def _one_node_each(graph: GraphModule) -> None:
    """Let one node stand for each parameter and buffer, by whatever names and however often it is read."""
    first: dict[int, Node] = {}
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        kept = first.setdefault(id(tensor_of(graph, node)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.graph.erase_node(node)


def _repeat_heads(graph: GraphModule, parts: int) -> None:
    """Repeat the heads of keys and values for their groups of queries, where they do not divide by themselves."""
    for node in list(graph.graph.nodes):
        if name_of(node) != "scaled_dot_product_attention" or not given(node, "enable_gqa"):
            continue
        heads, few = shape(given(node, "query"))[-3], shape(given(node, "key"))[-3]
        if heads % parts or few % parts == 0:
            continue
        for name in ("key", "value"):
            source = given(node, name)
            with graph.graph.inserting_before(node):
                whole = graph.graph.call_function(aten.repeat_interleave.self_int, (source, heads // few, -3))
            whole.meta = {**_origin(node), "val": source.meta["val"].repeat_interleave(heads // few, -3)}
            put(node, name, whole)
        put(node, "enable_gqa", False)


class _Rewriter:
    def __init__(self, module: GraphModule, roles: Roles, group: ProcessGroup, mesh: DeviceMesh) -> None:
        self.module, self.graph, self.roles = module, module.graph, roles
        self.group, self.mesh = group, mesh
        self.parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.trained = _trained(module)
        self._made: dict[tuple[Node, Split | None, Node | None], Node] = {}

    def rewrite(self, *, keeps_logits_split: bool) -> None:
        """Rewrite the graph and its parameters."""
        seeds = {seed.node: seed for seed in self.roles.seeds if seed.kind != "output"}
        outputs = [seed for seed in self.roles.seeds if seed.kind == "output"]
        split = set(self.roles.wants)
        logical = {node: dict(node.meta) for node in split}
        for node in list(self.graph.nodes):
            if node.op == "get_attr" and node in split:
                self._shard(node)
            elif node in seeds or node in split:
                is_row = node in seeds and seeds[node].kind == "row"
                bias = self._without_bias(node) if is_row else None
                if node in split:
                    adapt(node, self.roles, parts=self.parts, rank=self.rank)
                self._connect(node)
                if is_row:
                    self._end_row(node, bias)
                elif node in seeds:
                    self._look_up(node)
        for seed in outputs:
            if not keeps_logits_split:
                self._gather(seed)
        for node, meta in logical.items():
            node.meta["val"] = self._local_value(meta["val"], self.roles.wants[node])
        self.graph.lint()
        self.module.recompile()

    def _shard(self, node: Node) -> None:
        """Put this rank's part in a parameter's or buffer's place, under all of its names."""
        whole, split = tensor_of(self.module, node), self.roles.wants[node]
        assert isinstance(whole, Tensor)
        assert isinstance(split, Split)
        part: Tensor = to_local(whole, split, self.group)
        if split.is_plain:
            part = DTensor.from_local(
                part, self.mesh, [Shard(split.dim)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        if isinstance(whole, nn.Parameter):
            part = nn.Parameter(part, requires_grad=whole.requires_grad)
        for owner in self.module.modules():
            kinds: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
            for held in kinds:
                held.update({name: part for name, tensor in held.items() if tensor is whole})
        # Beside each reader, for what comes of a parameter alone must not travel from one pipeline stage to another.
        for user in list(node.users):
            with self.graph.inserting_before(user):
                mine = self.graph.call_function(local, (node,))
            mine.meta = {**_origin(user), "val": self._local_value(node.meta["val"], split)}
            user.replace_input_with(node, mine)
            self.roles.wants[mine] = split

    def _connect(self, node: Node) -> None:
        """Give a split node each input as it needs it: split already, or cut from the whole, or whole."""
        needs = self.roles.needs[node]
        for source in node.all_input_nodes:
            if source in self.roles.wants or not is_tensor(source):
                continue
            demand = needs.get(source)
            assert demand is None or isinstance(demand, Split)
            node.replace_input_with(
                source, self._whole(source, node) if demand is None else self._cut(source, demand, node)
            )

    def _whole(self, source: Node, user: Node) -> Node:
        if source not in self.trained:
            return source
        return self._once(source, None, user, spread, (source, self.group.group_name))

    def _cut(self, source: Node, split: Split, user: Node) -> Node:
        whole = self._whole(source, user)
        if split.is_plain:
            ((first, held),) = split.pieces(parts=self.parts, rank=self.rank)
            return self._once(source, split, user, aten.slice.Tensor, (whole, split.dim, first, first + held))
        return self._once(source, split, user, part_of, (whole, split.dim, split.segments, self.parts, self.rank))

    def _once(self, source: Node, split: Split | None, user: Node, function: Callable[..., Any], args: Any) -> Node:
        """Return what a source becomes for split readers, made once; of a parameter beside each reader."""
        key = (source, split, user if source.op == "get_attr" else None)
        if key not in self._made:
            with self.graph.inserting_before(user):
                made = self.graph.call_function(function, args)
            value = source.meta["val"]
            made.meta = {**_origin(user), "val": value if split is None else self._local_value(value, split)}
            self._made[key] = made
        return self._made[key]

    @staticmethod
    def _without_bias(node: Node) -> Node | None:
        """Take the bias off a row, and return it."""
        name = name_of(node)
        if name in ("addmm", "baddbmm"):
            bias, *factors = node.args[:3]
            node.target = aten.mm.default if name == "addmm" else aten.bmm.default
            node.args, node.kwargs = tuple(factors), {}
        else:
            bias = given(node, "bias")
            if bias is not None:
                put(node, "bias", None)
        assert bias is None or isinstance(bias, Node)
        return bias

    def _end_row(self, node: Node, bias: Node | None) -> None:
        """Sum a row's output over the ranks, and add its bias once."""
        users = list(node.users)
        summed = self._after(node, node, total, (node, self.group.group_name))
        if bias is not None:
            at = summed
            if name_of(node).startswith("conv"):
                at = self._after(at, node, aten.reshape.default, (bias, [-1] + [1] * (len(shape(node)) - 2)))
                at.meta["val"] = bias.meta["val"].reshape(at.args[1])
                bias = at
            summed = self._after(at, node, aten.add.Tensor, (summed, bias))
        for user in users:
            user.replace_input_with(node, summed)
            if node in (needs := self.roles.needs.get(user, {})):  # A later split region takes its part of the sum.
                self.roles.needs[user] = {**needs, summed: needs[node]}

    def _look_up(self, node: Node) -> None:
        weight, indices = given(node, "weight"), given(node, "indices")
        split = self.roles.wants[weight]
        assert isinstance(split, Split)
        first, _ = next(split.pieces(parts=self.parts, rank=self.rank))
        padding = given(node, "padding_idx")
        node.target = look_up
        node.args = (weight, indices, padding, first, self.group.group_name)
        node.kwargs = {}

    def _gather(self, seed: Seed) -> None:
        ((value, split),) = seed.needs.items()
        whole = self._after(value, value, gather, (value, split.dim, split.size, self.group.group_name))
        seed.node.replace_input_with(value, whole)

    def _after(self, node: Node, like: Node, function: Callable[..., Any], args: Any) -> Node:
        with self.graph.inserting_after(node):
            made = self.graph.call_function(function, args)
        made.meta = dict(like.meta)
        if like in self.trained:
            self.trained.add(made)
        return made

    def _local_value(self, value: Any, want: Want) -> Any:
        if isinstance(want, Split):
            return value.narrow(want.dim, 0, want.held(parts=self.parts, rank=self.rank))
        values = [v if w is None else self._local_value(v, w) for v, w in zip(value, want, strict=True)]
        return type(value)(values) if isinstance(value, (list, tuple)) else values


def _origin(node: Node) -> dict[str, Any]:
    """Return where the user wrote a node, for what is made beside it."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def _trained(module: GraphModule) -> set[Node]:
    """Return the nodes that a gradient flows through to some parameter."""
    found: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = tensor_of(module, node)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                found.add(node)
        elif node.op == "call_function" and name_of(node) != "detach" and found.intersection(node.all_input_nodes):
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
                found.add(node)
    return found
