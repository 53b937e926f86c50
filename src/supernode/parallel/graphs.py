"""When is the user's module run as a graph in parts, and what does a plan make of it on one rank?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from supernode.errors import ModelError
from supernode.parallel.mesh import Place
from supernode.parallel.tensor import SplitCrossEntropy, cross_entropy, local
from supernode.schema.plan import Plan
from supernode.splitting.divide import Divided, Kept, divide
from supernode.splitting.export import logits_of
from supernode.splitting.places import nbytes
from supernode.units import show_bytes

MOST_TOLD = 12
"""Kinds of parameters that stay whole and are told of by name, largest first."""
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a module is made a graph with, and tried on before a run.

    Attributes:
        inputs: of one micro-batch.
        targets: likewise.
        loss: (what the module returns, targets) to the sum of the losses.
        evaluates: the run tries the model on held-out data, too.
        accepts: raises where the module does not go with the data.
    """

    inputs: Tensor
    targets: Tensor
    loss: Loss
    evaluates: bool = False
    accepts: Callable[[nn.Module], None] = lambda _: None


def needs_graph(model: nn.Module, plan: Plan) -> bool:
    """Tell whether a plan runs a module in parts of its forward: data and fsdp run it as it is, whatever it does."""
    if plan.layout.tensor > 1:
        return True
    return len(plan.stages) > 1 and not isinstance(model, nn.Sequential)


def divide_module(model: nn.Module, plan: Plan, place: Place, trial: Trial) -> Divided:
    """Return this rank's part of the user's module.

    Raises:
        ModelError: it cannot be made a graph, or cannot be cut as the plan wants.
    """
    divided = divide(
        model, trial.inputs, stages=len(plan.stages),
        mine=[stage.index for stage in plan.stages if stage.rank == place.pipeline],
        mesh=place.mesh["tensor"] if place.layout.tensor > 1 else None,
        whole_output=not is_stock(plan), keeps_logits_split=is_stock(plan),
    )  # fmt: skip
    _check_shared(divided, plan)
    return divided


def ties(divided: Divided, plan: Plan) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return the parameters with several names or on several stages: names, and the pipeline ranks that hold them."""
    names = {group[0]: group for group in divided.names}
    rank = {stage.index: stage.rank for stage in plan.stages}
    found = []
    for name, stages in divided.homes.items():
        ranks = tuple(sorted({rank[index] for index in stages}))
        if name in divided.parameters and (name in names or len(ranks) > 1):
            found.append((names.get(name, (name,)), ranks))
    return found


def is_stock(plan: Plan) -> bool:
    """Tell whether the loss is our cross-entropy, which wants logits alone."""
    return plan.job.data.loss == "cross_entropy"


def loss_of(plan: Plan, place: Place, kept: Kept | None, loss: Loss) -> Loss:
    """Return the loss of what the last stage returns.

    Args:
        kept: the user's module in parts.
        loss: of what the whole model returns.
    """
    if plan.job.shape is not None:
        return SplitCrossEntropy(place.group("tensor"), plan.vocabulary) if plan.layout.tensor > 1 else loss
    whole: Loss = read_logits if is_stock(plan) else loss
    if kept is None:
        return whole
    rebuild = kept.rebuild
    if kept.report is not None and kept.report.logits_split:
        whole = SplitCrossEntropy(place.group("tensor"), kept.report.logits_split)
    return lambda outputs, targets: whole(rebuild(outputs), targets)


def read_logits(output: Any, target: Tensor) -> Tensor:
    """Return the cross-entropy of a model that returns logits, or a mapping or record of them."""
    return cross_entropy(logits_of(output), target)


def _check_shared(divided: Divided, plan: Plan) -> None:
    layout, rank = plan.layout, {stage.index: stage.rank for stage in plan.stages}
    for name, stages in divided.homes.items():
        is_twice = len({rank[index] for index in stages}) < len(stages)
        if is_twice and name in divided.parameters and layout.sharding == "fsdp" and layout.copies > 1:
            raise ModelError(
                f"`{name}` is shared by two stages of one rank, which fsdp would shard apart",
                hint="set `parallelism.sharding` to replicas, or `parallelism.interleave` to 1.",
            )


def check_count(divided: Divided, plan: Plan, place: Place, wanted: int) -> None:
    """Check that every number of the user's parameters is held once by each copy of the model.

    Args:
        wanted: numbers in the module's parameters, shared ones once.

    Raises:
        ModelError: some are held nowhere, or twice.
    """
    rank = {stage.index: stage.rank for stage in plan.stages}
    ranks = {name: len({rank[index] for index in stages}) for name, stages in divided.homes.items()}
    split = (
        {held.name for held in divided.kept.report.parameters if held.split}
        if divided.kept.report is not None
        else set()
    )
    mine: dict[str, nn.Parameter] = {}
    for piece in divided.kept.pieces.values():
        mine |= dict(piece.module.named_parameters())
    layout = plan.layout
    share = sum(
        local(parameter).numel() / (ranks[name] * layout.copies * (1 if name in split else layout.tensor))
        for name, parameter in mine.items()
    )
    total = torch.tensor(share, dtype=torch.float64)
    dist.all_reduce(total)
    if round(float(total)) != wanted:
        raise ModelError(
            f"the model in parts has {round(float(total)):,} parameters, and the module {wanted:,}",
            hint="set `parallelism.tensor` and `pipeline` to 1, and report it: parts must hold each number once.",
        )


def tell(divided: Divided, proof: str) -> dict[str, str]:
    """Return what a reader of the run should know of a module in parts, by subject."""
    told = {"module in parts": proof}
    if divided.how.stages > 1:
        sent = [sum(map(nbytes, values)) for values in divided.how.travels[1:]]
        told["stages"] = f"{divided.how.stages}, cut in the module's graph; a micro-batch sends " + ", ".join(
            f"{len(values)} values of {show_bytes(size)}"
            for values, size in zip(divided.how.travels[1:], sent, strict=True)
        )
    if divided.kept.report is not None:
        report, kinds = divided.kept.report, _kinds(divided.kept.report.lines())
        told["split over tensor"] = (
            f"{report.share:.1%} of {sum(held.size for held in report.parameters):,} parameters, {report.rows} sums "
            "each way"
        )
        if kinds:
            rest = f"; and {len(kinds) - MOST_TOLD} kinds more" if len(kinds) > MOST_TOLD else ""
            told["whole on every tensor rank"] = "; ".join(kinds[:MOST_TOLD]) + rest
    return told


def _kinds(lines: Iterable[str]) -> list[str]:
    """Return lines without repeating those that differ in the numbers of layers alone."""
    counts = Counter(re.sub(r"(?<=[.])\d+(?=[.])", "*", line) for line in lines)
    return [f"{line} (× {count})" if count > 1 else line for line, count in counts.items()]
