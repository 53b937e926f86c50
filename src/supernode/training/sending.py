"""Which gradients of a run travel compressed, and what of that is kept from step to step and in checkpoints?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from supernode.checkpoint import state
from supernode.checkpoint.source import Source
from supernode.compressing.choose import compressor
from supernode.parallel.assemble import Parts
from supernode.parallel.mesh import Place
from supernode.parallel.tensor import local
from supernode.precision.scaling import LossScale
from supernode.schema.plan import Plan
from supernode.syncing.buckets import Bucket, Start
from supernode.syncing.compressed import Compressed
from supernode.training.meetings import Meetings, settle_in

PREFIX = "compressor"
"""First word of the names in checkpoints; the rank follows, since each has left out something else."""


class Sending:
    """The compressors of one rank, one for each group that sums gradients; none where the job wants none.

    Parameters that other tensor ranks hold, too, travel whole, as vectors do: what a compressor makes of a number
    depends on its neighbours, and those ranks' copies must stay alike.
    """

    def __init__(self, plan: Plan, place: Place, parts: Parts) -> None:
        self.plan, self.place = plan, place
        self.ways: dict[str, Compressed] = {}
        self._said = plan.job.communication
        self._scale = 0.0
        self.meetings = Meetings(plan)
        self._named = {parameter: name for name, parameter in parts.parameters()}
        self._whole = {
            parameter for name, parameter in parts.parameters()
            if place.layout.tensor > 1 and not _is_split(parameter) and name not in parts.segments
        }  # fmt: skip

    def way(self, group: dist.ProcessGroup, name: str) -> tuple[Start | None, Callable[[Sequence[Bucket]], None]]:
        """Return what sums the buckets of a group, and what is to be told of them; all its ranks call this."""
        made = compressor(self._said, seed=self.plan.job.seed)
        if made is None:
            chosen = self.meetings.way(group, name)
            return (None, lambda _: None) if chosen is None else (chosen.start, partial(settle_in, chosen))
        way = Compressed(made, group, slow_only=self._said.where == "slow")
        self.ways[name] = way
        return way.start, lambda buckets: way.prepare([self._describe(bucket) for bucket in buckets])

    def _describe(self, bucket: Bucket) -> tuple[str, list[tuple[str, tuple[int, ...]]], Tensor]:
        held = [
            (self._named[p], (p.numel(),) if p in self._whole else tuple(local(p).shape)) for p in bucket.parameters
        ]
        return bucket.key, held, bucket.flat

    def begin(self, step: int, scaling: LossScale | None) -> None:
        """Await the sums of a step, whose loss is scaled so."""
        self._scale = scaling.scale if scaling is not None else 1.0
        for way in self.ways.values():
            way.begin(step)

    def rescale(self, scaling: LossScale) -> None:
        """Take the feedback of a step that is over to the scale of the next one, with which it is saved."""
        if scaling.scale != self._scale:
            for way in self.ways.values():
                way.compressor.scale(scaling.scale / self._scale)
            self._scale = scaling.scale

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold of this, by name."""
        return {
            f"{PREFIX}.{self.place.rank}.{name}.{key}": tensor
            for name, way in self.ways.items()
            for key, tensor in way.state().items()
        }

    def restore(self, source: Source) -> None:
        """Go on from a checkpoint as soon as the buckets are known; all ranks call this."""
        for name, way in self.ways.items():
            prefix = f"{PREFIX}.{self.place.rank}.{name}."
            way.load({key.removeprefix(prefix): tensor for key, tensor in state.find(source, prefix).items()})

    @property
    def is_near(self) -> bool:
        """Whether gradients cross no link that small buckets would keep busy."""
        return self._said.compress == "none" and self.meetings.is_near

    @property
    def dropped(self) -> bool:
        """Whether a checkpoint's feedback did not fit; known after the first step of a launch."""
        return any(way.kept is False for way in self.ways.values())

    @property
    def is_idle(self) -> bool:
        """Whether the job wants compression, and nothing of this rank's is."""
        return bool(self.ways) and not any(way.travels for way in self.ways.values())


def _is_split(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)
