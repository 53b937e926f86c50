"""What does a node of the graph do: its operation, the arguments by name, its shape, and where the user wrote it?"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def name_of(node: Node) -> str:
    """Return the operation's name without its overload: `linear`, or `library::name` of one that is not ATen's."""
    if node.op != "call_function":
        return str(node.op)
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    name: str = schema.name if schema is not None else getattr(node.target, "__name__", str(node.target))
    return name.removeprefix("aten::")


def has_tag(node: Node, tag: torch.Tag) -> bool:
    """Whether PyTorch marks the operation so."""
    return tag in getattr(node.target, "tags", ())


def given(node: Node, name: str) -> Any:
    """Return an argument of an operation by the name in its schema: as given, or its default; None for none such."""
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if index < len(node.args):
                return node.args[index]
            return node.kwargs.get(name, argument.default_value if argument.has_default_value() else None)
    return None


def put(node: Node, name: str, value: Any) -> None:
    """Change an argument of an operation by the name in its schema."""
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name and index < len(node.args):
            node.update_arg(index, value)
            return
    node.update_kwarg(name, value)


def shape(node: Node) -> tuple[Any, ...]:
    """Return the logical shape of a node that gives one tensor."""
    return tuple(node.meta["val"].shape)


def is_tensor(node: Any) -> bool:
    """Whether a node gives one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def wrap(dim: int, rank: int) -> int:
    """Return a dim counted from 0, given from either end."""
    return dim % rank if rank else 0


def where(node: Node) -> str:
    """Name a node for people: the operation, the module that it is in, and the user's line."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]  # One of several outputs is that of the operation.
    stack = node.meta.get("nn_module_stack") or {}
    # What is exported is the module inside one of our own, under the name `model`.
    module = next((path for path, _ in reversed(list(stack.values())) if path), "").removeprefix("model").lstrip(".")
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
    own = [frame for frame in frames if str(Path(torch.__file__).parent) not in frame]
    line = ""
    if own:
        file, _, rest = own[-1].removeprefix('File "').partition('", line ')
        line = f"{Path(file).name}, line {rest.split(',')[0]}"
    about = ", ".join(part for part in (module, line) if part)
    return f"`{name_of(node)}`" + (f" ({about})" if about else "")
