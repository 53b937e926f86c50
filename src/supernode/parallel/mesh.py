"""Where this rank stands: the device mesh of a layout, its groups, and this rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from supernode.errors import MachineError
from supernode.schema.plan import Layout

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place in the mesh, the mesh itself, and how long a collective may wait.

    Attributes:
        copies: mesh of one dim, data × context: the ranks that hold the same parameters and see other tokens.
        experts: mesh of the dims expert and tensor, over which experts are cut; None where they are not spread.
        expert_copies: mesh of one dim: the ranks that hold the same experts; None likewise.
    """

    layout: Layout
    rank: int
    mesh: DeviceMesh
    copies: DeviceMesh
    experts: DeviceMesh | None = None
    expert_copies: DeviceMesh | None = None
    limit: timedelta = timedelta(seconds=600)

    @property
    def pipeline(self) -> int:
        """Pipeline coordinate."""
        return self.layout.place(self.rank)[0]

    @property
    def data(self) -> int:
        """Data coordinate."""
        return self.layout.place(self.rank)[1]

    @property
    def context(self) -> int:
        """Context coordinate."""
        return self.layout.place(self.rank)[2]

    @property
    def tensor(self) -> int:
        """Tensor coordinate."""
        return self.layout.place(self.rank)[3]

    @property
    def copy(self) -> int:
        """Number of this rank among those that hold the same parameters."""
        return self.data * self.layout.context + self.context

    @property
    def tokens(self) -> tuple[int, ...]:
        """What tells the tokens of this rank's stream from other ranks'; ranks with the same draw alike for them."""
        return (self.copy, self.pipeline, *((self.tensor,) if self.layout.sequence else ()))

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank's row along an axis, or of its `copies` or `expert_copies`."""
        meshes = {"copies": self.copies, "expert_copies": self.expert_copies, "expert": self.experts}
        if axis not in meshes:
            return self.mesh[axis].get_group()
        mesh = meshes[axis]
        assert mesh is not None
        return mesh.get_group(*(("expert",) if axis == "expert" else ()))


def meet(layout: Layout, rank: int, *, folder: Path, rendezvous: str, silence: float) -> Place:
    """Join the other ranks; the first collective is done when this returns.

    Args:
        folder: an empty folder of this incarnation alone; the ranks meet through a file in it.
        rendezvous: `host:port` to meet at instead; empty for the file.
        silence: seconds that a collective may wait.

    Raises:
        MachineError: the port is taken, or nobody else came.
    """
    limit = timedelta(seconds=silence)
    store = _store(layout.ranks, rank, folder=folder, rendezvous=rendezvous, limit=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.ranks, timeout=limit)
    dist.all_reduce(torch.ones(1))
    return place_of(layout, rank, limit=limit)


def place_of(layout: Layout, rank: int, *, limit: timedelta = timedelta(seconds=600)) -> Place:
    """Return this rank's place; torch.distributed is up, and every rank calls this at the same time."""
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    copies = mesh["data"] if layout.context == 1 else mesh["data", "context"]._flatten("copies")
    if layout.expert == 1:
        return Place(layout=layout, rank=rank, mesh=mesh, copies=copies, limit=limit)
    # Experts are spread over neighbours on the data axis.
    sizes = (layout.pipeline, layout.data // layout.expert, layout.expert, layout.context, layout.tensor)
    spread = init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "others", "expert", "context", "tensor"))
    same = spread["others"] if layout.context == 1 else spread["others", "context"]._flatten("expert_copies")
    return Place(
        layout=layout, rank=rank, mesh=mesh, copies=copies, experts=spread["expert", "tensor"], expert_copies=same,
        limit=limit,
    )  # fmt: skip


def _store(ranks: int, rank: int, *, folder: Path, rendezvous: str, limit: timedelta) -> Store:
    if not rendezvous:
        return FileStore(str(folder / "store"), ranks)
    host, _, port = rendezvous.rpartition(":")
    try:
        return TCPStore(host, int(port), ranks, is_master=rank == 0, timeout=limit, use_libuv=True)
    except (RuntimeError, dist.DistNetworkError) as error:
        raise MachineError(
            f"rank {rank} cannot meet the others at {rendezvous}: {error}",
            hint="set `rendezvous` to a free port, or leave it out to meet through a file.",
        ) from error
