"""Where may a split begin: products with a parameter, look-ups of tokens, and the graph's outputs?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule, Node

from supernode.roles.contracting import contraction_of
from supernode.roles.ops import given, is_tensor, name_of, shape
from supernode.roles.shards import Split


@dataclass(frozen=True, slots=True, eq=False)
class Seed:
    """Where a wish for a split begins.

    Attributes:
        node: a row, a look-up of tokens, or the graph's output.
        needs: the inputs that it wants split.
        holds: the parameter that is split for it; None at the output.
        kind: `row`, `look-up` or `output`.
    """

    node: Node
    needs: dict[Node, Split]
    holds: Node | None
    kind: str


def candidates(module: GraphModule, parts: int) -> Iterator[Seed]:
    """Yield every place where a split could begin, in the order of the graph."""
    tokens = _from_inputs(module)
    for node in module.graph.nodes:
        if node.op == "output":
            yield from _outputs(node, parts)
        elif name_of(node) == "embedding":
            if (found := _look_up(node, module, tokens, parts)) is not None:
                yield found
        elif node.op == "call_function" and (found := _row(node, module, parts)) is not None:
            yield found


def parameter_behind(node: Node, module: GraphModule) -> Node | None:
    """Return the parameter that a node is, up to its shape and type; None where it is something computed."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    if node.op != "get_attr" or not isinstance(tensor_of(module, node), nn.Parameter):
        return None
    return node


def tensor_of(module: GraphModule, node: Node) -> object:
    """Return the parameter or buffer of a `get_attr` node."""
    assert isinstance(node.target, str)
    owner, _, last = node.target.rpartition(".")
    return getattr(module.get_submodule(owner), last)


def widening(product: Node) -> float:
    """Return a product's own output dim over the dim that it sums over."""
    found = contraction_of(product)
    if found is None or len(found.summed) != 1:
        return 1.0
    (first, labels), (_, others) = found.operands
    own = [label for label in found.output if (label in labels) != (label in others)]
    into = shape(first)[labels.index(found.summed[0])]
    out = shape(product)[found.output.index("n" if "n" in own else own[-1])] if own else into
    return float(out / into) if isinstance(out, int) else 1.0


def _row(node: Node, module: GraphModule, parts: int) -> Seed | None:
    product = contraction_of(node)
    if product is None or len(product.summed) != 1 or (name_of(node) in ("addmm", "baddbmm") and not _plain(node)):
        return None
    (label,) = product.summed
    held = [parameter_behind(operand, module) for operand, _ in product.operands]
    if (held[0] is None) == (held[1] is None):
        return None
    needs = {}
    for operand, labels in product.operands:
        dim = labels.index(label)
        size = shape(operand)[dim]
        if not isinstance(size, int) or Split(dim, (size,)).refusal(parts):
            return None
        needs[operand] = Split(dim, (size,))
    return Seed(node, needs, held[0] or held[1], "row")


def _look_up(node: Node, module: GraphModule, tokens: set[Node], parts: int) -> Seed | None:
    weight = given(node, "weight")
    table = parameter_behind(weight, module)
    if table is None or table is not weight:
        return None
    split = Split(0, (shape(weight)[0],))
    if given(node, "sparse") or given(node, "scale_grad_by_freq"):
        return None
    # A table of positions is read in the same places by all: splitting it would only send more.
    if given(node, "indices") not in tokens or split.refusal(parts):
        return None
    return Seed(node, {table: split}, table, "look-up")


def _outputs(node: Node, parts: int) -> Iterator[Seed]:
    for value in node.all_input_nodes:
        if is_tensor(value) and value.meta["val"].is_floating_point() and len(shape(value)) > 1:
            size = shape(value)[-1]
            split = Split(len(shape(value)) - 1, (size,)) if isinstance(size, int) else None
            if split is not None and not split.refusal(parts):
                yield Seed(node, {value: split}, None, "output")


def _from_inputs(module: GraphModule) -> set[Node]:
    """Return the nodes whose numbers, not only their shapes, come from the model's inputs."""
    found: set[Node] = set()
    shapes = {"sym_size", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full"}
    for node in module.graph.nodes:
        if node.op == "placeholder" or (
            node.op == "call_function"
            and name_of(node) not in shapes
            and any(operand in found for operand in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _plain(node: Node) -> bool:
    return bool(given(node, "beta") == 1 and given(node, "alpha") == 1)
