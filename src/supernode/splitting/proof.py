"""Does the model in parts compute what the user's module computes? Tried on one micro-batch before any step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from supernode.axes.tensor import draw_apart
from supernode.errors import ModelError
from supernode.splitting.divide import Divided

Loss = Callable[[Any, Tensor], Tensor]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference over the largest value: other orders of summation differ by some units in the last place."""
MOST_BYTES = 1 << 30
"""Bytes of parameters up to which the whole model is computed on every rank."""


def prove(
    model: nn.Module,
    divided: Divided,
    *,
    inputs: Tensor,
    targets: Tensor,
    expected: Loss,
    measured: Loss,
    evaluates: bool,
) -> str:
    """Compare a module in parts with the module; returns what was found, in a line.

    The whole graph, split over the tensor axis, is held against the module, and this rank's stages against the graph.
    Neither parameters nor buffers change. All ranks of the tensor axis must call this together.

    Args:
        inputs: of one micro-batch.
        targets: likewise.
        expected: (what the module returns, targets) to the sum of the losses.
        measured: (last stage's tuple, targets) to the same.
        evaluates: the run tries the model on held-out data, too.

    Raises:
        ModelError: outputs or loss differ; the message names the stage.
    """
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if nbytes > MOST_BYTES:
        return (
            f"not computed beforehand: {nbytes / 2**30:.1f} GiB of parameters, and {MOST_BYTES >> 30} GiB are the most"
        )
    drawn = draws(divided.whole)
    if drawn == "always":
        return "not computed beforehand: the forward draws numbers of its own, in evaluation, too"
    modes = [True] * (drawn == "never") + [False] * (evaluates or drawn == "training")
    worst = 0.0
    for mode in modes:
        pieces = divided.kept.pieces
        with _unchanged(model, divided.whole, *(piece.module for piece in pieces.values())) as buffers, torch.no_grad():
            model.train(mode)
            divided.whole.train(mode)
            values = _Watch(divided)
            found = values.run(inputs)
            # Each forward begins with the same buffers: stages share the graph's, and a forward may read what it moves.
            buffers.restore()
            wanted, ours = float(expected(model(inputs), targets)), float(measured(found, targets))
            worst = max(worst, _compare_loss(ours, wanted, _tolerance(found), mode=mode))
            for index in pieces:
                buffers.restore()
                worst = max(worst, _compare_stage(divided, index, values, found, mode=mode))
    if dist.is_initialized():
        found_worst = torch.tensor(worst, dtype=torch.float64)
        dist.all_reduce(found_worst, op=dist.ReduceOp.MAX)
        worst = float(found_worst)
    return f"a micro-batch of the model in parts differs from the module by at most {worst:.1e} of its largest value"


def draws(module: fx.GraphModule) -> str:
    """Return when a graph draws random numbers: `never`, in `training`, or `always`."""
    found = "never"
    for node in module.graph.nodes:
        is_apart = node.target is draw_apart
        operation, *given_args = node.args if is_apart else (node.target, *node.args)
        if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
            continue
        known = [argument.name for argument in operation._schema.arguments]
        given = dict(zip(known, given_args[is_apart:], strict=False)) | node.kwargs
        shares = [given.get(name, 0.0) for name in ("dropout_p", "dropout", "p") if name in known]
        if shares and not any(isinstance(share, fx.Node) or share for share in shares):
            continue
        is_switched = any(isinstance(given.get(name), fx.Node) for name in ("train", "training", "dropout_p"))
        if not is_switched:
            return "always"
        found = "training"
    return found


def _tolerance(values: Any) -> float:
    return max(TOLERANCE.get(leaf.dtype, 0.0) for leaf in tree_leaves(values))


def _compare_loss(ours: float, wanted: float, tolerance: float, *, mode: bool) -> float:
    if ours == wanted or (math.isnan(ours) and math.isnan(wanted)):
        return 0.0  # What to do about a loss that is not finite, the step knows.
    gap = abs(ours - wanted) / max(abs(wanted), 1e-30)
    if not gap <= tolerance:
        raise ModelError(
            f"in {_name(mode)} the model in parts has a loss of {ours:.9g}, and the module {wanted:.9g}",
            hint="set `parallelism.tensor` to 1; if they still differ, the forward depends on values or draws numbers.",
        )
    return gap


def _compare_stage(divided: Divided, index: int, values: _Watch, found: Any, *, mode: bool) -> float:
    how, stage = divided.how, divided.kept.pieces[index].module
    wanted = found if index == how.stages - 1 else [values.seen[value] for value in how.travels[index + 1]]
    stage.train(mode)
    outputs = stage(*(values.seen[value] for value in how.travels[index]))
    stage.train()
    differences = [_difference(ours, theirs) for ours, theirs in zip(outputs, wanted, strict=True)]
    if not max(differences) <= _tolerance(found):
        place = differences.index(max(differences))
        raise ModelError(
            f"in {_name(mode)} stage {index} of {how.stages} differs in value {place} of {len(differences)}, by "
            f"{max(differences):.1e} of its largest number",
            hint="set `parallelism.pipeline` to 1 and report it: stages run the module's own operations.",
        )
    return max(differences)


def _name(mode: bool) -> str:
    return "training" if mode else "evaluation"


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if not theirs.numel():
        return 0.0
    if not theirs.is_floating_point():
        return float((ours != theirs).sum())
    finite = theirs.isfinite()
    if not torch.allclose(ours[~finite], theirs[~finite], rtol=0, atol=0, equal_nan=True):
        return float("inf")
    ours, theirs = ours[finite].float(), theirs[finite].float()
    return float((ours - theirs).abs().amax() / theirs.abs().amax().clamp(min=1e-30)) if theirs.numel() else 0.0


class _Watch(fx.Interpreter):
    """Runs the whole graph and keeps what travels over the cuts."""

    def __init__(self, divided: Divided) -> None:
        super().__init__(divided.whole)
        self.wanted = {value for values in divided.how.travels for value in values}
        self.seen: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        if n in self.wanted:
            self.seen[n] = value.clone()
        return value


class _unchanged:  # noqa: N801 - reads as a word in `with`
    """Gives modules their buffers back, and their mode."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = modules

    def __enter__(self) -> _unchanged:
        self.before = [(buffer, buffer.clone()) for module in self.modules for buffer in module.buffers()]
        return self

    def restore(self) -> None:
        """Give the buffers back what they held."""
        for buffer, value in self.before:
            buffer.copy_(value)

    def __exit__(self, *_: object) -> None:
        self.restore()
        for module in self.modules:
            module.train()
