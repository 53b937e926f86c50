"""What does this rank hold of the user's module? It is exported, split over the tensor axis, and cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from supernode.roles.report import SplitReport
from supernode.splitting.cut import Cut, choose, cut, weigh
from supernode.splitting.export import export
from supernode.splitting.rewrite import split_tensor
from supernode.splitting.stages import Piece, build, homes
from supernode.splitting.switch import let_switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a rank goes on with: its own stages, and nothing that holds others' parameters.

    Attributes:
        pieces: this rank's stages by their index.
        rebuild: the last stage's tuple to what the loss is to be given.
        report: what is split over the tensor axis, where there is one.
    """

    pieces: dict[int, Piece]
    rebuild: Callable[[tuple[Tensor, ...]], Any]
    report: SplitReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """A module in parts, and the whole that they are held against.

    Attributes:
        whole: the graph of the whole model, split over the tensor axis, not yet cut.
        how: where it is cut.
        names: each shared parameter's names, the first one being that of the graph.
        kept: this rank's part.
    """

    whole: fx.GraphModule
    how: Cut
    names: tuple[tuple[str, ...], ...]
    kept: Kept

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters of the whole model, shared ones once."""
        return {name for name, _ in self.whole.named_parameters()}

    @property
    def homes(self) -> dict[str, tuple[int, ...]]:
        """The stages that hold each parameter and buffer."""
        return homes(self.whole, self.how)


def divide(
    model: nn.Module, example: Tensor, *, stages: int, mine: Sequence[int], mesh: DeviceMesh | None = None,
    whole_output: bool = False, keeps_logits_split: bool = False,
) -> Divided:  # fmt: skip
    """Return this rank's part of a module.

    Args:
        example: input of one micro-batch.
        stages: in all.
        mine: indices of this rank's.
        mesh: of the tensor axis, where it has more than one rank.
        whole_output: keep all that the module returns, for a loss of the user's.
        keeps_logits_split: let each tensor rank have its part of the logits, for `SplitCrossEntropy`.

    Raises:
        ModelError: the module cannot be exported, or cut into so many stages.
    """
    exported = export(model, example, whole_output=whole_output)
    whole = exported.graph
    weigh(whole)
    report = None
    if mesh is not None:
        report = split_tensor(whole, mesh.get_group(), mesh, keeps_logits_split=keeps_logits_split)
    let_switch(whole)
    bounds = _agreed(choose(whole, stages))
    how = cut(whole, bounds)
    pieces = {index: build(whole, how, index) for index in mine}
    kept = Kept(pieces=pieces, rebuild=exported.rebuild, report=report)
    return Divided(whole=whole, how=how, names=exported.names, kept=kept)


def _agreed(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Return rank 0's bounds on every rank: parts of one size are not a given, so places might differ."""
    if not dist.is_initialized():
        return bounds
    shared = torch.tensor(bounds)
    dist.broadcast(shared, src=0)
    return tuple(shared.tolist())
