"""Which dims of a matrix product, convolution or attention go together?"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from supernode.roles.ops import given, name_of, shape, wrap
from supernode.roles.reshaping import Needs
from supernode.roles.shards import Split

ALONE = "."
"""Label of a dim that can be split neither here nor at the other operand, or that is broadcast."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """A sum of products with a label for each dim, as in Einstein's notation.

    Attributes:
        operands: the two factors with their dims' labels.
        output: the output's labels; what only the factors have is summed over.
        bias: what is added to the sum, with its dims' labels.
    """

    operands: tuple[tuple[Node, tuple[str, ...]], tuple[Node, tuple[str, ...]]]
    output: tuple[str, ...]
    bias: tuple[Node, tuple[str, ...]] | None = None

    @property
    def summed(self) -> tuple[str, ...]:
        """Labels that both factors have and the output has not."""
        (_, first), (_, second) = self.operands
        return tuple(label for label in first if label in second and label not in self.output and label != ALONE)


def contraction_of(node: Node) -> Contraction | None:
    """Return the labels of a product; None for anything else, or where no dim of it can be split."""
    reader = _READERS.get(name_of(node))
    return reader(node) if reader is not None else None


def through_contraction(node: Node, want: Split, _: int) -> Needs | str:
    """Trace a split of a product's output to the factors that have the dim."""
    found = contraction_of(node)
    if found is None or found.output[want.dim] == ALONE:
        return "it has no rule for this dim"
    if found.operands[0][0] is found.operands[1][0]:
        return "both factors are the same value"
    label = found.output[want.dim]
    needs: dict[Node, Split] = {}
    for operand, labels in (*found.operands, *([found.bias] if found.bias else [])):
        if label in labels:
            needs[operand] = want.moved(labels.index(label))
    return needs


def through_attention(node: Node, want: Split, parts: int) -> Needs | str:
    """Trace a split of attention's heads to queries, keys, values and a mask that differs between heads."""
    rank = len(shape(node))
    if want.dim == rank - 2:
        return "positions attend to each other"
    needs: dict[Node, Split] = {}
    names = ("query", "key", "value", "attn_mask") if want.dim < rank - 2 else ("value",)
    if len(names) == 1 and given(node, "value") in (given(node, "query"), given(node, "key")):
        return "values are keys or queries, too"
    for name in names:
        operand = given(node, name)
        if not isinstance(operand, Node):
            continue
        dim = want.dim - (rank - len(shape(operand)))
        if dim < 0 or shape(operand)[dim] == 1:
            continue
        size = shape(operand)[dim]
        if size != want.size:  # Grouped queries: heads of keys and values in the same order, fewer.
            if not want.is_plain or size % parts or want.size % parts:
                return f"{size} heads of keys do not divide by {parts}"
            needs[operand] = Split(dim, (size,))
        else:
            needs[operand] = want.moved(dim)
    return needs


def _batch(count: int) -> tuple[str, ...]:
    return tuple(f"b{index}" for index in range(-count, 0))


def _broadcast(node: Node, out: Node, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a value that is broadcast to an output."""
    sizes, rank = shape(node), len(labels)
    mine = labels[rank - len(sizes) :]
    return tuple(
        ALONE if size == 1 and shape(out)[rank - len(sizes) + dim] != 1 else label
        for dim, (size, label) in enumerate(zip(sizes, mine, strict=True))
    )


def _linear(node: Node) -> Contraction | None:
    x, weight, bias = (given(node, name) for name in ("input", "weight", "bias"))
    if len(shape(weight)) != 2:
        return None
    batch = _batch(len(shape(x)) - 1)
    return Contraction(((x, (*batch, "k")), (weight, ("n", "k"))), (*batch, "n"), (bias, ("n",)) if bias else None)


def _matmul(node: Node) -> Contraction | None:
    first, second = (given(node, name) for name in (("self", "other") if name_of(node) == "matmul" else _MM))
    if len(shape(first)) < 2 or len(shape(second)) < 2:
        return None
    batch = len(shape(node)) - 2
    output = (*_batch(batch), "m", "n")
    operands = []
    for operand, own in ((first, ("m", "k")), (second, ("k", "n"))):
        sizes = shape(operand)
        labels = (*_batch(batch)[batch - (len(sizes) - 2) :], *own)
        offset = len(output) - len(sizes)
        lone = [size == 1 and dim < len(sizes) - 2 and shape(node)[dim + offset] != 1 for dim, size in enumerate(sizes)]
        operands.append((operand, tuple(ALONE if one else label for one, label in zip(lone, labels, strict=True))))
    return Contraction((operands[0], operands[1]), output)


_MM = ("self", "mat2")


def _addmm(node: Node) -> Contraction | None:
    names = ("mat1", "mat2") if name_of(node) == "addmm" else ("batch1", "batch2")
    first, second = (given(node, name) for name in names)
    batch = _batch(len(shape(node)) - 2)
    output = (*batch, "m", "n")
    bias = given(node, "self")
    labels = _broadcast(bias, node, output)
    return Contraction(((first, (*batch, "m", "k")), (second, (*batch, "k", "n"))), output, (bias, labels))


def _grouped_mm(node: Node) -> Contraction | None:
    first, second = node.args[0], node.args[1]
    assert isinstance(first, Node)
    assert isinstance(second, Node)
    if len(shape(first)) != 2 or len(shape(second)) != 3:
        return None
    return Contraction(((first, (ALONE, "k")), (second, (ALONE, "k", "n"))), (ALONE, "n"))


def _convolution(node: Node) -> Contraction | None:
    x, weight, bias = (given(node, name) for name in ("input", "weight", "bias"))
    if given(node, "groups") != 1 or len(shape(x)) != len(shape(weight)):
        return None
    places = (ALONE,) * (len(shape(x)) - 2)
    own = ("k", "n") if "transpose" in name_of(node) else ("n", "k")
    added = (bias, ("n",)) if bias else None
    return Contraction(((x, ("b", "k", *places)), (weight, (*own, *places))), ("b", "n", *places), added)


def _einsum(node: Node) -> Contraction | None:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str)
    assert isinstance(operands, (list, tuple))
    into, arrow, output = equation.replace(" ", "").partition("->")
    labels = into.split(",")
    if not arrow or "." in equation or len(labels) != 2 or any(len(set(part)) < len(part) for part in labels):
        return None
    first, second = operands
    assert isinstance(first, Node)
    assert isinstance(second, Node)
    return Contraction(((first, tuple(labels[0])), (second, tuple(labels[1]))), tuple(output))


def depthwise(node: Node, want: Split, parts: int) -> Needs | str:
    """Trace a split of a convolution whose channels do not mix, or mix in groups that stay whole."""
    x, weight, bias, groups = (given(node, name) for name in ("input", "weight", "bias", "groups"))
    rank = len(shape(node))
    if wrap(want.dim, rank) != rank - len(shape(weight)) + 1 or not want.is_plain or groups % parts:
        return f"{groups} groups of channels do not divide by {parts}"
    needs = {x: Split(want.dim, (shape(x)[want.dim],)), weight: Split(0, (shape(weight)[0],))}
    if bias is not None:
        needs[bias] = Split(0, (shape(bias)[0],))
    return needs


_READERS = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "einsum": _einsum,
    "_grouped_mm": _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm,
    **{f"conv{dims}d": _convolution for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _convolution for dims in (1, 2, 3)},
}
