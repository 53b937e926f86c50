"""What should the reader know after the first step of a launch? Gathered from all ranks, told by the first."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from supernode.precision.float8 import layers_of
from supernode.training.step import Stepper


def notes_of_all(stepper: Stepper) -> dict[str, str]:
    """Return texts by name, on the first rank; nothing on the others. All ranks call this at the same time."""
    place = stepper.place
    low, layers = (sum(counts) for counts in zip(*map(layers_of, stepper.parts.modules), strict=True))
    told = _gather(
        {
            "unused": stepper.unused, "dropped": stepper.sending.dropped, "idle": stepper.sending.is_idle,
            # One rank of each stage counts.
            "low": low if place.data == place.context == place.tensor == 0 else 0,
            "layers": layers if place.data == place.context == place.tensor == 0 else 0,
        }
    )  # fmt: skip
    if not told:
        return {}
    notes = {}
    if unused := list(dict.fromkeys(name for one in told for name in one["unused"])):
        notes["parameters without a gradient"] = ", ".join(unused)
    if any(one["dropped"] for one in told):
        text = "the checkpoint's is of other buckets, ranks or settings; it starts from zero"
        ranks = [str(rank) for rank, one in enumerate(told) if one["dropped"]]
        where = "" if len(ranks) == len(told) else f"on ranks {', '.join(ranks)}: "
        notes["feedback of compressed gradients"] = where + text
    elif all(one["idle"] for one in told):
        notes["compressed gradients"] = (
            "all ranks share a host, so nothing is compressed; `communication.where: all` would"
        )
    if stepper.plan.job.arithmetic == "float8":
        low, layers = (sum(one[key] for one in told) for key in ("low", "layers"))
        notes["products in float8"] = f"{low} of {layers} linear layers"
    return notes


def _gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each rank has, on the first rank; nothing on the others."""
    text = json.dumps(own).encode()
    length = torch.tensor(len(text))
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    card = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
    cards = [torch.empty_like(card) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(card, cards, dst=0)
    return [json.loads(bytes(card.tolist())) for card in cards or ()]
