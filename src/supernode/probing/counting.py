"""What does a module do in a forward and a backward? Every operation counted where it happens, real or without values.

An operation belongs to the module whose forward is running, one of the backward to the module that made its autograd
node. A child named `loss` would share its row with the loss.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from supernode.schema.trace import Work

LOSS = "loss"
# Nothing is read or written: memory is only set aside.
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# What is written is not read before.
WRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"})
# Of the table, as much is read as goes out.
LOOK_UPS = frozenset({"embedding", "index", "index_select", "gather", "take", "slice_backward", "select_backward"})


@dataclass(slots=True)
class Tally:
    """What one module's own operations came to in one pass."""

    work: Work = field(default_factory=Work)
    kernels: int = 0
    operations: int = 0


class Counter(TorchDispatchMode):
    """Counts while it is entered; one forward and backward of `model`.

    Attributes:
        forward: tallies by module name; `LOSS` for what runs outside of the model.
        backward: likewise.
        kept: bytes saved for the backward, by the module that saved them first.
        outputs: bytes that each module returned.
        order: names of modules in the order in which they were met first.
        workspace: most bytes alive beside kept ones and gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.forward: defaultdict[str, Tally] = defaultdict(Tally)
        self.backward: defaultdict[str, Tally] = defaultdict(Tally)
        self.kept: defaultdict[str, int] = defaultdict(int)
        self.outputs: dict[str, int] = {}
        self.order: dict[str, None] = {}
        self.workspace = 0
        self._stack: list[str] = []
        self._marks: list[tuple[int, str]] = [(0, LOSS)]  # from which autograd node on which module runs
        self._is_backward = False
        self._fixed = {key for t in (*model.parameters(), *model.buffers()) for key in _keys(t)}
        self._saved: dict[int, torch.UntypedStorage] = {}  # held, so that no number is given twice
        self._live: dict[int, int] = {}
        self._live_bytes = self._most = 0
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: its work counts as its parent's
                continue
            self._handles += [
                module.register_forward_pre_hook(self._entering(name)),
                module.register_forward_hook(self._leaving(name), always_call=True),
            ]
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def run(self, forward: Callable[[], Tensor]) -> None:
        """Count a forward that returns the loss, and its backward."""
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                loss = forward()
                kept = sum(self.kept.values())
                self._is_backward = True
                loss.backward()
            self.workspace = max(0, self._most - kept)
        finally:
            for handle in self._handles:
                handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tally = (self.backward if self._is_backward else self.forward)[self._place()]
        tally.operations += 1
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._follow(outputs)
        name = func._overloadpacket.__name__
        if name in ALLOCATIONS or func.is_view or (_alias(inputs, outputs) and not func._schema.is_mutable):
            return
        tally.kernels += 1
        written = sum(map(_bytes, outputs))
        read = [0 if name in WRITES and tensor is inputs[0] else _bytes(tensor) for tensor in inputs]
        if name in LOOK_UPS and read:
            read[0] = written
        tally.work = tally.work + _work(func, args, kwargs, result, sum(read) + written)

    def _place(self) -> str:
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node() if self._is_backward else None
        if node is None:
            return LOSS
        number: int = node._sequence_nr()  # a parameter's accumulation has the largest there is, and comes last
        return self._marks[bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1][1]

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.order.setdefault(name)
            self._stack.append(name)
            self._mark()

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()
            self._mark()
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self.outputs.setdefault(name, sum(map(_bytes, tensors)))

        return hook

    def _mark(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        self._marks.append((number, self._stack[-1] if self._stack else LOSS))

    def _pack(self, tensor: Tensor) -> Tensor:
        for storage in _storages(tensor):
            key = storage._cdata
            if key not in self._fixed and key not in self._saved and not self._is_backward:
                self._saved[key] = storage
                self.kept[self._place()] += storage.nbytes()
        return tensor

    def _follow(self, outputs: list[Tensor]) -> None:
        """Know what is alive, so as to know the fullest moment."""
        for storage in [storage for tensor in outputs for storage in _storages(tensor)]:
            key, size = storage._cdata, storage.nbytes()
            if key in self._fixed or key in self._live:
                continue
            self._live[key] = size
            self._live_bytes += size
            weakref.finalize(storage, self._freed, key)
        self._most = max(self._most, self._live_bytes)

    def _freed(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key, 0)

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            for key in _keys(parameter.grad):
                self._freed(key)


def _keys(tensor: Tensor) -> set[int]:
    return {storage._cdata for storage in _storages(tensor)}


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [part.untyped_storage() for part in _parts(tensor)]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that a tensor is held in; none where its memory is a library's own."""
    if tensor.layout is torch.strided:
        return (tensor,)
    with _disable_current_modes():  # To look is no operation of the step.
        if tensor.layout is torch.sparse_coo:
            return (tensor._indices(), tensor._values())
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; what is repeated by a stride of 0 is read once."""
    if tensor.layout is not torch.strided:
        return sum(map(_bytes, _parts(tensor))) or tensor.numel() * tensor.element_size()
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _alias(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    return bool(outputs) and set().union(*map(_keys, outputs)) <= set().union(*map(_keys, inputs))


def _work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, nbytes: float) -> Work:
    packet = func._overloadpacket
    if packet.__name__.startswith("_scaled_dot_product"):
        return _attention(func, args, kwargs, nbytes)
    if packet in flop_registry:
        return Work(products=float(flop_registry[packet](*args, **kwargs, out_val=result)), operands=nbytes)
    return Work(moved=nbytes)


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nbytes: float) -> Work:
    """Return the work of a fused attention: two products over the pairs that see each other, or five in the backward.

    Source: Dao, arXiv:2307.08691, section 4.1.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    queries, keys, values = (given[name] for name in ("query", "key", "value"))
    pairs = queries.shape[:-1].numel() * keys.shape[-2] * (0.5 if given.get("is_causal") else 1.0)
    width, value = queries.shape[-1], values.shape[-1]
    products = 3 * width + 2 * value if "backward" in func.name() else width + value
    return Work(scores=2.0 * pairs * products, exponentials=pairs, moved=nbytes)
