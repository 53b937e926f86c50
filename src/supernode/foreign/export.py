"""How does one of our checkpoints become one of `torch.distributed.checkpoint`? Run as a process; asked on stdin.

One tensor is in memory at a time: the writer asks for each when its turn comes.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from supernode.checkpoint.boxes import KINDS
from supernode.checkpoint.source import OnDisk, whole
from supernode.errors import MachineError, SupernodeError
from supernode.foreign.leave import Leaving, Request
from supernode.foreign.naming import pairs_from_halves
from supernode.schema.codec import adapter
from supernode.schema.job import OptimizerSpec
from supernode.storing.saves import Saves
from supernode.storing.spread import Spread, disk_of


class _Planner(DefaultSavePlanner):
    """Plans with tensors that have a shape and no memory, and reads each when it is to be written."""

    def __init__(self, source: OnDisk, leaving: Mapping[str, Leaving]) -> None:
        super().__init__()
        self._source, self._leaving = source, leaving

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is to be written under a name."""
        if index.fqn not in self._leaving:
            return super().lookup_object(index)
        one = self._leaving[index.fqn]
        found = whole(one.own, self._source)
        return found[torch.tensor(pairs_from_halves(len(found), one.heads))] if one.heads else found


def write(request: Request) -> None:
    """Write what is asked for.

    Raises:
        CheckpointError: a tensor cannot be read.
        MachineError: the disk is full.
    """
    source = OnDisk(Saves(Spread(disks=tuple(map(disk_of, request.disks)))), request.name)
    leaving: dict[str, Leaving] = {}

    def shaped(name: str, one: Leaving) -> Tensor:
        leaving[name] = one
        piece = source.pieces[one.own][0][1]
        return torch.empty(piece.whole, dtype=KINDS[piece.kind], device="meta")

    begins = f"{request.under}." if request.under else ""
    weights = {name: shaped(begins + name, one) for name, one in request.weights.items()}
    state: dict[str, Any] = {request.under: weights} if request.under else dict(weights)
    if request.optimizer is not None:
        held: dict[str, dict[str, Tensor]] = {}
        for name, moments in request.moments.items():
            held[name] = {what: shaped(f"optimizer.state.{name}.{what}", one) for what, one in moments.items()}
            if request.optimizer.name == "adamw":
                held[name]["step"] = torch.tensor(float(request.step))
        state["optimizer"] = {"state": held, "param_groups": _groups(request, request.optimizer, weights)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(state, checkpoint_id=request.out, planner=_Planner(source, leaving), no_dist=True)
    except OSError as error:
        raise MachineError(
            f"{request.out} cannot be written: {error.strerror}", hint="free some space on its disk."
        ) from error


def _groups(request: Request, spec: OptimizerSpec, weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the settings of parameters as torch's own optimizer names them: matrices decay, vectors do not."""
    trained = [name for name in weights if name in request.moments]
    if not trained:
        trained = [name for name, one in request.weights.items() if one.own.startswith("model.")]
    alike: dict[float, list[str]] = {}
    for name in trained:
        alike.setdefault(spec.weight_decay if weights[name].ndim >= 2 else 0.0, []).append(name)
    found = []
    for decay, names in alike.items():
        one = [nn.Parameter(torch.empty(0))]
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(one, lr=request.rate, betas=spec.betas, eps=spec.epsilon, weight_decay=decay)
            if spec.name == "adamw"
            else torch.optim.SGD(one, lr=request.rate, momentum=spec.momentum, weight_decay=decay)
        )
        found.append(optimizer.state_dict()["param_groups"][0] | {"params": names})
    return found


def main() -> int:
    """Answer one request, with an error as JSON where there is one."""
    with redirect_stdout(sys.stderr):
        request: Request = adapter(Request).validate_json(sys.stdin.buffer.read())
        told: dict[str, str] = {}
        code = 0
        try:
            write(request)
        except SupernodeError as error:
            told = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
            code = error.exit_code
    print(json.dumps(told))
    return code


if __name__ == "__main__":
    sys.exit(main())
