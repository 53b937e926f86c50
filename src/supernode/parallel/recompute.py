"""Which parts of a module are computed again in the backward instead of kept, and how does that change nothing?"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from supernode.errors import ModelError
from supernode.models.decoder import Block, attend_causally


def recompute_block(block: nn.Module, what: str) -> None:
    """Let a decoder's block keep less.

    Args:
        what: `none`; `selective` keeps all but the attention's core, its scores and what is left of them (attention
            over a ring keeps none of these anyway); `full` keeps the block's input alone.

    Source: Chen et al., arXiv:1604.06174; the attention's core alone: Korthikanti et al., arXiv:2205.05198, section 5.
    """
    assert isinstance(block, Block)
    if what == "full":
        _again(block, "forward")
    elif what == "selective" and block.attention.attend is attend_causally:
        _again(block.attention, "attend")


def recompute_user(model: nn.Module, what: str) -> None:
    """Let a user's module keep only what flows into its repeated layers.

    Those are the items of each list of modules of one class, and of a sequence the children that have children of their
    own; a sequence of single layers is computed again in about √n runs.

    Raises:
        ModelError: nothing in it repeats.
    """
    if what == "none":
        return
    found = list(_repeated(model))
    for layer in found:
        _again(layer, "forward", owner=layer)
    if found:
        return
    if isinstance(model, nn.Sequential):
        model.forward = _in_runs(model)  # type: ignore[method-assign]
    else:
        raise ModelError(
            f"`parallelism.recompute` is {what}, and nothing repeats in the model, a {type(model).__name__}",
            hint="set it to none, or keep repeated layers in an nn.ModuleList or an nn.Sequential.",
        )


def recompute_stage(stage: nn.Module, what: str) -> None:
    """Let a stage of a graph keep its inputs alone: a graph has no layers left that could be computed one by one."""
    if what == "full":
        _again(stage, "forward", owner=stage)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost layers that repeat."""
    for child in module.children():
        kinds = {type(item) for item in child.children()}
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len(kinds) == 1:
            yield from child
        elif isinstance(module, nn.Sequential) and any(True for _ in child.children()):
            yield child
        else:
            yield from _repeated(child)


def _again(module: nn.Module, name: str, *, owner: nn.Module | None = None) -> None:
    """Compute a method's result again in the backward. On the instance: names of parameters stay as they are."""
    setattr(module, name, _checkpointed(getattr(module, name), owner))


def _in_runs(model: nn.Sequential) -> Callable[[Any], Any]:
    children = list(model)
    size = math.ceil(math.sqrt(len(children)))
    runs = [nn.Sequential(*children[start : start + size]) for start in range(0, len(children), size)]
    # The last run's backward comes at once, so nothing would be won.
    steps = [_checkpointed(run.forward, run) for run in runs[:-1]] + [runs[-1].forward]

    def forward(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return forward


def _checkpointed(function: Callable[..., Any], owner: nn.Module | None) -> Callable[..., Any]:
    """Return a function that keeps its inputs alone, and whose second run is the first one's likeness.

    torch's generators are put back by torch itself, so dropout draws the mask that it drew.

    Args:
        owner: a module of the user's, whose buffers (running statistics) the second run must not change, and which may
            draw from Python's and numpy's generators.
    """

    def forward(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*inputs, **named)
        if owner is None:
            return checkpoint(function, *inputs, use_reentrant=False, **named)
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: _likeness(owner), **named)

    return forward


def _likeness(owner: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds a first run, which is nothing, and its second."""
    drawn = _generators()

    @contextmanager
    def again() -> Iterator[None]:
        kept, now = [(buffer, buffer.clone()) for buffer in owner.buffers()], _generators()
        _put_back(drawn)
        try:
            yield
        finally:
            _put_back(now)
            for buffer, before in kept:
                buffer.data.copy_(before)  # Past autograd, which holds some of them for this very backward.

    return nullcontext(), again()


def _generators() -> tuple[Any, Any]:
    return random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _put_back(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
