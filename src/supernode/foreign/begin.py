"""How does a run begin from weights that another trainer, or another run, left? All ranks fill theirs together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from supernode.checkpoint.source import fill
from supernode.foreign.look import look
from supernode.foreign.match import Match, match_decoder, match_module
from supernode.foreign.source import Renamed
from supernode.parallel.assemble import Parts
from supernode.parallel.mesh import Place
from supernode.passes.logical import empties, take
from supernode.schema.plan import Plan


def begin_from(path: Path, plan: Plan, parts: Parts, place: Place) -> Match:
    """Fill this rank's weights from a file; numbers are cast to the model's precision. Ranks call this together.

    Args:
        parts: as assembled, before an optimizer copies anything of them.

    Raises:
        CheckpointError: a tensor is missing, too many or of another shape; the message names it and the remedy.
    """
    found = look(path)
    named = {f"model.{name}": parameter.detach() for name, parameter in parts.parameters()}
    named |= {f"buffer.0.{name}": buffer for name, buffer in parts.buffers()}
    roomy = empties(named, parts, place)
    plain = {_plain(key): tensor for key, tensor in roomy.items()}
    shape = plan.job.shape
    if shape is not None:
        match = match_decoder(found, replace(shape, vocabulary=plan.vocabulary))
    else:
        everyone: list[Any] = [None] * dist.get_world_size()
        # A stage knows its own names alone, and all must find the same.
        dist.all_gather_object(everyone, {name: tuple(tensor.shape) for name, tensor in plain.items()})
        wanted = {name: size for one in everyone for name, size in one.items()}
        match = match_module(found, wanted, [names for names, _ in parts.tied])
    source = Renamed(match)
    if place.rank == 0:
        source.check_ties()
    fill(plain, source)
    take(roomy, named, parts, place)
    return match


def _plain(key: str) -> str:
    return key.removeprefix("model.").removeprefix("buffer.0.") if key.startswith("buffer.") else key[len("model.") :]
