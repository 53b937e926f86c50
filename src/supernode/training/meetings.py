"""By which ways do a run's uncompressed gradients meet? Chosen once, for all groups alike, and kept from then on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from supernode.schema.plan import Plan, WayTaken
from supernode.syncing.buckets import Bucket
from supernode.ways.choose import Chosen, Predicted, choose
from supernode.ways.hosts import find_hosts

SIZES = (2**18, 2**20, 2**22, 2**24)
"""Bytes for which a way is chosen, besides the largest bucket: buckets are not known before the first backward."""


class Meetings:
    """Chooses for one group after the other; every rank makes one and calls it alike.

    Attributes:
        is_near: all ranks of the run share a host.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chosen: dict[str, Chosen] = {}
        wanted = plan.job.communication.algorithm
        # On one host gloo's ring crosses no slow link, and nothing is worth a second of every start.
        self.is_near = len(find_hosts(dist.group.WORLD).sizes) == 1  # type: ignore[arg-type]
        self._is_open = wanted != "auto" or not self.is_near

    def way(self, group: dist.ProcessGroup, name: str) -> Chosen | None:
        """Return where a group's buckets meet; None for the group's own all-reduce."""
        if not self._is_open:
            return None
        said, table = self.plan.job.communication, self.plan.sums
        sizes = sorted({*(size for size in SIZES if size < said.bucket), said.bucket})
        made = choose(
            group, sizes, algorithm=said.algorithm, known=self.plan.ways.get(name), agree=_as_the_first_says,
            predicted=Predicted(sizes=table.sizes, times=table.times) if table is not None else None,
        )  # fmt: skip
        self.chosen[name] = made
        return made

    def note(self) -> dict[str, dict[str, object]]:
        """Return what was chosen now and not known before, for the journal."""
        told = {
            name: asdict(WayTaken(hosts=one.hosts.sizes, sizes=one.choice.sizes, taken=one.choice.taken))
            for name, one in self.chosen.items()
        }
        return {} if told == {name: asdict(way) for name, way in self.plan.ways.items()} else told

    def text(self) -> str:
        """Return the measured table of the first group, for people; empty where nothing was chosen."""
        return next((one.choice.text() for one in self.chosen.values() if one.choice.measured), "")


def settle_in(chosen: Chosen, buckets: Sequence[Bucket]) -> None:
    """Let buckets lie where their way sums them without a copy."""
    for bucket in buckets:
        bucket.lie_in(chosen.empty(bucket.flat.numel(), bucket.flat.dtype))


def _as_the_first_says(own: WayTaken) -> WayTaken:
    """Return what rank 0's group takes; all ranks of the run call this."""
    text = json.dumps(asdict(own)).encode()
    length = torch.tensor([len(text)])
    dist.broadcast(length, 0)
    sent = torch.zeros(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0:
        sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(sent, 0)
    told = json.loads(bytes(sent.tolist()))
    return WayTaken(**{key: tuple(value) for key, value in told.items()})
