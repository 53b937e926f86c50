"""What does the user's module compute? Its forward as one graph of ATen operations, under the user's own names."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from supernode.errors import ModelError
from supernode.splitting.tidy import tidy

STILL_WORKS = (
    "write that line without Python branches on values (`torch.where`), or set `parallelism.tensor` and `pipeline` to "
    "1: `data` and `fsdp` run any module as it is, and `pipeline` cuts an nn.Sequential between its children."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A module as a graph.

    Attributes:
        graph: one placeholder, then ATen operations in the order in which they run, then a tuple of tensors. Parameters
            and buffers are the module's own objects, as `get_attr` under their first names; `node.meta["val"]` has
            shapes. Parameters that nothing uses are there, too.
        names: each shared parameter's names, the first one being that of the graph.
        rebuild: the graph's tuple to what the loss is to be given.
    """

    graph: fx.GraphModule
    names: tuple[tuple[str, ...], ...]
    rebuild: Callable[[tuple[Tensor, ...]], Any]


def export(model: nn.Module, example: Tensor, *, whole_output: bool = False) -> Exported:
    """Return the graph of a module in training mode at one shape of its input.

    Dropout stays random, running statistics stay buffers that change, a shared parameter stays one.

    Args:
        example: input of one micro-batch.
        whole_output: keep all that the module returns, for a loss of the user's; else its tensor, or its `logits`.

    Raises:
        ModelError: the forward depends on values in a way that no graph holds, or returns no such output.
    """
    mode = model.training
    asked = _Asked(model.train(), whole_output=whole_output)
    try:
        with _quiet():
            program = torch.export.export(asked, (example,), strict=False)
            found = program.module()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{type(model).__name__} cannot be made a graph: {why(error)}", hint=STILL_WORKS) from error
    finally:
        model.train(mode)
    first, names = _first_names(model)
    flat, spec = _outputs(found.graph, program.call_spec.out_spec)
    graph = tidy(found, {node.target: first.get(id(_at(found, str(node.target)))) for node in _attributes(found.graph)})
    kept = {**graph[1], **_unused(model, graph[1], first)}
    module = fx.GraphModule(graph[1], graph[0], class_name=type(model).__name__)
    temporary = {name for part, m in model.named_modules() for name in _joined(part, m._non_persistent_buffers_set)}
    for name, tensor in kept.items():
        is_own = id(tensor) in first
        plant(module, name, tensor, persistent=is_own and name not in temporary)
    module.recompile()
    return Exported(graph=module, names=names, rebuild=_rebuild(flat, spec) if whole_output else _only)


def logits_of(output: Any) -> Tensor:
    """Return a model's tensor: what it returned, or the `logits` of a mapping or record.

    Raises:
        ModelError: it returned neither.
    """
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ModelError(
            f"the model returned a {type(output).__name__}, neither a tensor nor something with `logits`",
            hint="return a tensor, or name a `data.loss` of your own that takes what the model returns.",
        )
    return found


def plant(module: nn.Module, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
    """Give a module a parameter or buffer under a dotted name, with empty modules on the way to it."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor, persistent=persistent)


def why(error: BaseException) -> str:
    """Return what an error says in a line, and the line of the user's code that it came from."""
    own, libraries = Path(__file__).parent.parent, Path(torch.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(libraries) and not Path(frame.filename).is_relative_to(own)
        and not frame.filename.startswith("<")
    ]  # fmt: skip
    said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno}: `{frames[-1].line}`)" if frames else ""
    return f"{said}{where}"


class _Asked(nn.Module):
    """The module with only that of its output which the loss wants."""

    def __init__(self, model: nn.Module, *, whole_output: bool) -> None:
        super().__init__()
        self.model, self.whole_output = model, whole_output

    def forward(self, x: Tensor) -> Any:
        output = self.model(x)
        return output if self.whole_output else logits_of(output)


def _only(outputs: tuple[Tensor, ...]) -> Any:
    return outputs[0]


def _rebuild(flat: list[Any], spec: pytree.TreeSpec) -> Callable[[tuple[Tensor, ...]], Any]:
    # Nodes would keep the graph alive, and with it all parameters.
    leaves = [(isinstance(leaf, fx.Node), None if isinstance(leaf, fx.Node) else leaf) for leaf in flat]

    def rebuild(outputs: tuple[Tensor, ...]) -> Any:
        left = iter(outputs)
        return pytree.tree_unflatten([next(left) if is_tensor else leaf for is_tensor, leaf in leaves], spec)

    return rebuild


def _outputs(graph: fx.Graph, spec: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a graph's output, and lay the graph's own out as a tuple of its tensors."""
    node = graph.output_node()
    flat = pytree.tree_leaves(node.args[0])
    node.args = (tuple(leaf for leaf in flat if isinstance(leaf, fx.Node)),)
    graph.set_codegen(fx.graph.CodeGen())
    return flat, spec


def _attributes(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "get_attr")


def _at(module: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(module.get_submodule(owner), last)


def _first_names(model: nn.Module) -> tuple[dict[int, str], tuple[tuple[str, ...], ...]]:
    """Return the first name of each parameter and buffer by identity, and all names of each shared parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = tuple(tuple(group) for group in names.values() if len(group) > 1)
    for name, buffer in model.named_buffers():
        names.setdefault(id(buffer), [name])
    return {key: group[0] for key, group in names.items()}, shared


def _unused(model: nn.Module, used: Mapping[str, Tensor], first: Mapping[int, str]) -> dict[str, Tensor]:
    """Return what the module has and its forward does not use: the optimizer and checkpoints know it all the same."""
    everything = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in everything if name not in used and first[id(tensor)] == name}


def _joined(part: str, names: set[str]) -> Iterator[str]:
    return (f"{part}.{name}" if part else name for name in names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what exporting says about itself from the run's logs."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
