"""A snapshot is of one step, whatever passes do meanwhile, each tensor in it once, and training hardly waits for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from supernode.checkpoint.snapshot import CHANGED, InMemory, Snapshots
from supernode.checkpoint.source import fill
from supernode.errors import CheckpointError
from supernode.keeping.client import Keep
from supernode.keeping.keepers import Keepers
from supernode.keeping.lines import Line
from supernode.schema.job import JobSpec
from supernode.schema.lasting import RecoverySpec
from supernode.schema.plan import Layout, Plan

RANKS = 2


@contextmanager
def kept(folder: Path, nodes: int = 1) -> Iterator[tuple[Keepers, list[socket.socket]]]:
    (folder / "logs").mkdir()
    plan = Plan(
        job=JobSpec(recovery=RecoverySpec(nodes=nodes)), layout=Layout(data=RANKS), machine="m", cards=(0, 1),
        micro_batch=1, micro_batches=1, stages=(),
    )  # fmt: skip
    keepers = Keepers(folder, plan)
    keepers.begin(plan, attempt=0)
    lines = [keepers.attach(rank) for rank in range(RANKS)]
    try:
        yield keepers, lines
    finally:
        for line in lines:
            line.close()
        keepers.close()


def taken(snapshots: Snapshots, step: int, held: dict[str, Tensor], **words: Any) -> bool:
    votes = torch.tensor(snapshots.votes())
    dist.all_reduce(votes)
    return snapshots.begin(step, held, votes=float(votes), disk=False, limit=0.0, beat=lambda: None, **words)


def writers(keep: Keep, step: int, wanted: list[int]) -> list[int]:
    """Return whose state of a step the keeper has; what another rank said may take it a moment."""
    deadline = time.monotonic() + 10
    while (found := sorted(keep.tables(step))) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_passes_change_nothing_of_a_snapshot_and_what_they_move_is_learnt(tmp_path: Path, together: Any) -> None:
    def go(rank: int) -> Any:
        keep = Keep(Line(lines[rank]), rank)
        snapshots = Snapshots(keep, wait=False)
        mesh = init_device_mesh("cpu", (RANKS,))
        whole = torch.arange(35.0).view(7, 5)
        held = {
            "model.w": distribute_tensor(whole.clone(), mesh, [Shard(0)]), "model.same": torch.full((40_000,), 3.0),
            "model.moved": torch.zeros(3), f"buffer.{rank}.count": torch.tensor(float(rank)),
        }  # fmt: skip
        snapshots.prepare(held)
        held["model.moved"] += 1.0  # Passes of the user's own module.
        held[f"buffer.{rank}.count"] += 10.0
        assert snapshots.finish() is None
        assert taken(snapshots, 5, held)
        held["model.moved"] += 1.0
        held[f"buffer.{rank}.count"] += 10.0
        handed = snapshots.finish()
        assert handed is not None
        assert handed[:2] == (5, False)
        held["model.w"].mul_(0)  # The update.
        assert writers(keep, 5, [0, 1]) == [0, 1]
        tables = keep.tables(5)
        back = {name: torch.full_like(tensor, -1.0) for name, tensor in held.items() if not name.startswith("buffer")}
        back |= {f"buffer.{other}.count": torch.tensor(-1.0) for other in range(RANKS)}
        fill(back, InMemory(keep, 5))
        snapshots.close()
        written = [[piece.name for piece in table] for _, table in sorted(tables.items())]
        back["model.w"] = back["model.w"].full_tensor()
        return written, {name: tensor.tolist() for name, tensor in back.items()}

    with kept(tmp_path) as (_, lines):
        results = together(go, ranks=RANKS)

    (written, back), other = results[0], results[1]
    assert other == (written, back)
    names = [name for table in written for name in table]
    assert sorted(names) == ["buffer.0.count", "buffer.1.count", "model.moved", "model.same", "model.w", "model.w"]
    assert back["model.w"] == torch.arange(35.0).view(7, 5).tolist()
    assert back["model.same"] == [3.0] * 40_000
    assert back["model.moved"] == [1.0, 1.0, 1.0]
    assert (back["buffer.0.count"], back["buffer.1.count"]) == (10.0, 11.0)


def test_a_tensor_that_moves_unforeseen_gives_up_one_save_and_is_foreseen_next(tmp_path: Path, together: Any) -> None:
    def go(rank: int) -> Any:
        keep = Keep(Line(lines[rank]), rank)
        snapshots = Snapshots(keep, wait=False)
        held = {"model.a": torch.zeros(5), "model.b": torch.zeros(5)}
        snapshots.prepare(held)
        snapshots.finish()
        taken(snapshots, 1, held)
        if rank == 0:
            held["model.a"] += 1
        snapshots.finish()
        first = writers(keep, 1, [1])
        taken(snapshots, 2, held)
        if rank == 0:
            held["model.a"] += 1
        snapshots.finish()
        second = writers(keep, 2, [0, 1])
        # Something that was not there before has all agree anew, by whoever sees it.
        held["model.c"] = torch.ones(2)
        assert taken(snapshots, 3, held)
        assert snapshots.votes() == CHANGED
        votes = torch.tensor(CHANGED)
        assert snapshots.begin(4, held, votes=float(votes), disk=False, limit=0.0, beat=lambda: None)
        snapshots.finish()
        assert writers(keep, 4, [0, 1]) == [0, 1]
        back = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
        fill(back, InMemory(keep, 4))
        snapshots.close()
        return first, second, {name: tensor.tolist() for name, tensor in back.items()}

    with kept(tmp_path) as (keepers, lines):
        results = together(go, ranks=RANKS)
        told = keepers.hear()

    (first, second, back), _ = results
    assert (first, second) == ([1], [0, 1])
    assert back["model.b"] == [0.0] * 5
    assert back["model.c"] == [1.0, 1.0]
    assert {event.step for event in told if type(event).__name__ == "Unsaved"} == {1, 3}


def test_what_ranks_hold_under_one_name_must_be_alike(tmp_path: Path, together: Any) -> None:
    def go(rank: int) -> None:
        snapshots = Snapshots(Keep(Line(lines[rank]), rank), wait=True)
        with pytest.raises(
            CheckpointError, match=r"rank 1 holds `model\.a` as float32\[6\], and another as float32\[5\]"
        ):
            snapshots.prepare({"model.a": torch.zeros(5 + rank)})
        with pytest.raises(CheckpointError, match=r"`model\.a` is of torch\.float8_e5m2fnuz"):
            snapshots.prepare({"model.a": torch.zeros(5).to(torch.float8_e5m2fnuz)})

    with kept(tmp_path) as (_, lines):
        together(go, ranks=RANKS)
