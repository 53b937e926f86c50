"""What was split and how, what stayed whole on every rank, and why?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from supernode.roles.contracting import contraction_of
from supernode.roles.ops import is_tensor, name_of, shape, where
from supernode.roles.roles import Roles
from supernode.roles.rules import needs_of, random
from supernode.roles.seeds import tensor_of
from supernode.roles.shards import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How the tensor ranks hold one parameter or buffer.

    Attributes:
        name: its first name in the graph.
        shape: its logical shape.
        split: how it is split; None where every rank holds it whole.
        reason: why it is whole; empty where it is split.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None
    reason: str = ""

    @property
    def size(self) -> int:
        """Numbers in the whole of it."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """What splitting a graph over the tensor ranks came to.

    Attributes:
        parts: the tensor ranks.
        parameters: every parameter of the graph, once.
        buffers: every buffer that the graph reads.
        rows: products whose sums are all-reduced, forward; as many regions' gradients are, backward.
        logits_split: size of the output's last dim where it is left split, cut as `torch.chunk` would; else 0.
        draws_apart: whether random numbers are drawn inside a split region, other ones on each rank.
    """

    parts: int
    parameters: tuple[Kept, ...]
    buffers: tuple[Kept, ...]
    rows: int
    logits_split: int
    draws_apart: bool

    @property
    def whole(self) -> tuple[Kept, ...]:
        """The parameters that every rank holds whole."""
        return tuple(kept for kept in self.parameters if kept.split is None)

    @property
    def segmented(self) -> tuple[Kept, ...]:
        """What a rank holds in several pieces: plain tensors, to be put together with `shards.to_full`."""
        return tuple(
            kept for kept in (*self.parameters, *self.buffers) if kept.split is not None and not kept.split.is_plain
        )

    @property
    def share(self) -> float:
        """Share of the parameters' numbers that are split, in 0…1."""
        everything = sum(kept.size for kept in self.parameters)
        return sum(kept.size for kept in self.parameters if kept.split is not None) / max(everything, 1)

    def lines(self) -> Iterator[str]:
        """Yield one line for each parameter that is whole, largest first, with the reason."""
        for kept in sorted(self.whole, key=lambda kept: -kept.size):
            yield f"{kept.name} {list(kept.shape)}: {kept.reason}"


def report(module: GraphModule, roles: Roles, *, parts: int, keeps_logits_split: bool) -> SplitReport:
    """Tell what `roles` come to; the graph is as it was before it was rewritten."""
    nodes = {id(tensor_of(module, node)): node for node in module.graph.nodes if node.op == "get_attr"}
    outputs = [split for seed in roles.seeds if seed.kind == "output" for split in seed.needs.values()]
    return SplitReport(
        parts=parts,
        parameters=tuple(_kept(name, p, nodes.get(id(p)), roles, parts) for name, p in module.named_parameters()),
        buffers=tuple(
            _kept(name, b, nodes.get(id(b)), roles, parts) for name, b in module.named_buffers() if id(b) in nodes
        ),
        rows=sum(seed.kind != "output" for seed in roles.seeds),
        logits_split=outputs[0].size if outputs and keeps_logits_split else 0,
        draws_apart=any(node.op == "call_function" and random(node) for node in roles.wants),
    )


def _kept(name: str, tensor: Tensor, node: Node | None, roles: Roles, parts: int) -> Kept:
    shape = tuple(tensor.shape)
    split = roles.wants.get(node) if node is not None else None
    if isinstance(split, Split):
        return Kept(name=name, shape=shape, split=split)
    return Kept(name=name, shape=shape, split=None, reason=_why(node, roles, parts))


def _why(node: Node | None, roles: Roles, parts: int) -> str:
    """Say why a parameter is whole: what stopped a wish for it, or why what reads it is not split."""
    if node is None or not node.users:
        return "nothing reads it"
    if node in roles.stops:
        return roles.stops[node]
    reader, given = next(iter(node.users)), node
    while len(reader.all_input_nodes) == 1 and reader.users and reader not in roles.wants:
        reader, given = next(iter(reader.users)), reader
    product = contraction_of(reader)
    if product is not None and product.bias is not None and product.bias[0] is given:
        is_row = reader in roles.needs and reader not in roles.wants
        return f"{where(reader)} {'adds it after the sum over the ranks' if is_row else 'is whole'}"
    if product is not None and reader in roles.dropped:
        after = _after(reader, roles, parts)
        return f"{where(reader)} can neither end a split ({roles.dropped[reader]}) nor begin one ({after})"
    if reader in roles.needs:
        return f"{where(reader)} needs the whole of it for each part; its gradient is summed"
    if name_of(reader) == "embedding":
        return f"{where(reader)} reads it in the same places on every rank"
    return f"{where(reader)} works on what is whole on every rank"


def _after(product: Node, roles: Roles, parts: int) -> str:
    """Say what keeps a product's output from being split."""
    ahead, seen = list(product.users), {product}
    while ahead:
        node = ahead.pop(0)
        if node.op == "output":
            return "the model returns it, and its last dim cannot be cut"
        if node in roles.wants or node in roles.needs:
            return f"{where(node)} needs it whole"
        if node in roles.stops:
            return f"{where(node)}: {roles.stops[node]}"
        if contraction_of(node) is not None:
            return f"{where(node)} is whole as well"
        source = next(operand for operand in node.all_input_nodes if operand in seen)
        if blocked := _blocked(node, source, parts):
            return f"{where(node)}: {blocked}"
        seen.add(node)
        ahead += [user for user in node.users if user not in seen]
    return "nothing reads it"


def _blocked(node: Node, source: Node, parts: int) -> str:
    """Say why no split of a node's output asks for one of `source`; empty where some does."""
    reason = ""
    sizes = shape(node) if is_tensor(node) else ()
    for dim, size in enumerate(sizes):
        found = needs_of(node, Split(dim, (size,)), parts) if isinstance(size, int) else ""
        if not isinstance(found, str) and source in found:
            return ""
        reason = found if isinstance(found, str) and found else reason
    return reason if sizes else "" if isinstance(node.meta.get("val"), (list, tuple)) else "it mixes all dims"
