"""What was split and how, what stayed whole on every rank, and why?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from supernode.splitting.contracting import contraction_of
from supernode.splitting.ops import name_of, where
from supernode.splitting.roles import Roles, tensor_of
from supernode.splitting.rules import random
from supernode.splitting.shards import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
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
    parameters: tuple[Held, ...]
    buffers: tuple[Held, ...]
    rows: int
    logits_split: int
    draws_apart: bool

    @property
    def whole(self) -> tuple[Held, ...]:
        """The parameters that every rank holds whole."""
        return tuple(held for held in self.parameters if held.split is None)

    @property
    def segmented(self) -> tuple[Held, ...]:
        """What a rank holds in several pieces: plain tensors, to be put together with `shards.to_full`."""
        return tuple(
            held for held in (*self.parameters, *self.buffers) if held.split is not None and not held.split.is_plain
        )

    @property
    def share(self) -> float:
        """Share of the parameters' numbers that are split, in 0…1."""
        everything = sum(held.size for held in self.parameters)
        return sum(held.size for held in self.parameters if held.split is not None) / max(everything, 1)

    def lines(self) -> Iterator[str]:
        """Yield one line for each parameter that is whole, largest first, with the reason."""
        for held in sorted(self.whole, key=lambda held: -held.size):
            yield f"{held.name} {list(held.shape)}: {held.reason}"


def report(module: GraphModule, roles: Roles, *, parts: int, keeps_logits_split: bool) -> SplitReport:
    """Tell what `roles` come to; the graph is as it was before it was rewritten."""
    nodes = {id(tensor_of(module, node)): node for node in module.graph.nodes if node.op == "get_attr"}
    outputs = [split for seed in roles.seeds if seed.kind == "output" for split in seed.needs.values()]
    return SplitReport(
        parts=parts,
        parameters=tuple(_held(name, p, nodes.get(id(p)), roles) for name, p in module.named_parameters()),
        buffers=tuple(_held(name, b, nodes.get(id(b)), roles) for name, b in module.named_buffers() if id(b) in nodes),
        rows=sum(seed.kind != "output" for seed in roles.seeds),
        logits_split=outputs[0].size if outputs and keeps_logits_split else 0,
        draws_apart=any(node.op == "call_function" and random(node) for node in roles.wants),
    )


def _held(name: str, tensor: Tensor, node: Node | None, roles: Roles) -> Held:
    shape = tuple(tensor.shape)
    split = roles.wants.get(node) if node is not None else None
    if isinstance(split, Split):
        return Held(name=name, shape=shape, split=split)
    return Held(name=name, shape=shape, split=None, reason=_why(node, roles))


def _why(node: Node | None, roles: Roles) -> str:
    if node is None or not node.users:
        return "nothing reads it"
    if node in roles.stops:
        return roles.stops[node]
    seen = {node}
    ahead = list(node.users)
    user = ahead[0]
    while ahead:  # The first thing on its way that was tried says why.
        user = ahead.pop(0)
        if user in roles.dropped and contraction_of(user) is not None:
            after = _after(user, roles)
            return f"{where(user)}: {roles.dropped[user]}{after}"
        if user in roles.stops:
            return f"{where(user)}: {roles.stops[user]}"
        if contraction_of(user) is not None or user in roles.wants:
            break
        seen.add(user)
        ahead += [other for other in user.users if other not in seen and len(seen) < 3]
    if user in roles.wants or user in roles.needs:
        return f"{where(user)} reads it whole on each rank"
    if name_of(user) == "embedding":
        return f"{where(user)} reads it in the same places on each rank"
    return f"{where(user)} works on what every rank has whole"


def _after(user: Node, roles: Roles) -> str:
    """Say where a product's output stops being something that could be split."""
    ahead, seen = list(user.users), {user}
    while ahead:
        node = ahead.pop(0)
        if node in roles.stops or node in roles.dropped or node in roles.wants or node.op == "output":
            known = roles.stops.get(node) or roles.dropped.get(node, "")
            return f"; after it, {where(node)}: {known}" if known else ""
        seen.add(node)
        ahead += [other for other in node.users if other not in seen]
        if len(seen) > 12:
            break
    return ""
