"""How long does training stand still for a save? Ours beside torch's DCP `save` and `async_save`, turn about.

Four ranks hold 1 GB of weights and AdamW moments between them and train for real. Per save is counted what the loop
waits: for the call itself, for an earlier save to be done, and before the next update for what must be copied by then.
Steps while a save is written are held against those after it, the waiting taken off.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # The first optimizer step would import it, for seconds.
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import harness
from supernode.checkpoint.snapshot import Snapshots
from supernode.keeping.client import Keep
from supernode.keeping.keepers import Keepers
from supernode.keeping.lines import Line
from supernode.schema.event import Saved, Unsaved
from supernode.schema.job import JobSpec
from supernode.schema.lasting import CheckpointSpec
from supernode.schema.manifest import Manifest
from supernode.schema.plan import Layout, Plan
from supernode.storing.saves import saves_of

RANKS, WIDTH, LAYERS = 4, 2048, 5
TOKENS = 256
"""Rows of a step's batch; they set how long a step takes beside the copying of its state."""
AFTER = 4
"""Undisturbed steps after each save."""
MOST_STEPS = 120
WAYS = ("ours", "async_best", "async_default", "save")


class Run:
    """One rank's model, and its steps."""

    def __init__(self, rank: int, folder: Path, keep: Keep, say: Callable[..., None]) -> None:
        self.rank, self.folder, self.keep, self.say = rank, folder, keep, say
        torch.manual_seed(rank)
        # Each rank has weights of its own, as stages and shards have: nothing is there twice.
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(TOKENS, WIDTH)
        self.step = 0
        self.before_update: Callable[[], None] = lambda: None
        self.is_due = False
        self.snapshots = Snapshots(keep, wait=False)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
            )
        )
        # Its thread meets the other ranks' while this one trains on.
        self.group = dist.new_group(backend="gloo")
        self.take()
        self.snapshots.prepare(self.state())
        self.take()

    def take(self) -> float:
        """Take a step; returns its seconds."""
        begun = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.batch).square().mean().backward()
        self.before_update()
        votes = torch.tensor([self.snapshots.votes() if self.is_due else 0.0])
        dist.all_reduce(votes)  # The ranks' own sums are left out; they meet all the same.
        self.votes = float(votes)
        self.optimizer.step()
        self.step += 1
        return time.perf_counter() - begun

    def state(self) -> dict[str, Tensor]:
        named = {f"model.{self.rank}.{name}": one.detach() for name, one in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                named[f"optimizer.{self.rank}.{name}.{key}"] = self.optimizer.state[parameter][key]
        return named

    def cycle(self, way: str, number: int) -> dict[str, float]:
        """Save once, train on while it is written, and some steps more."""
        place = self.folder / way
        self.is_due = way == "ours"
        self.take()
        self.is_due = False
        is_done, stall = getattr(self, f"_{way}")(place / f"step-{number}")
        during, waited = [], 0.0

        def timed() -> None:
            nonlocal waited
            begun = time.perf_counter()
            if self._wait is not None:
                self._wait()
                self._wait = None
            waited += time.perf_counter() - begun

        self.before_update = timed
        while True:
            during.append(self.take())
            done = torch.tensor([float(is_done() or len(during) >= MOST_STEPS)])
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done:
                break
        self.before_update = lambda: None
        if way == "ours":
            assert self.keep.saved >= self._saved_at, "the save did not get to disk"
        self.take()
        after = [self.take() for _ in range(AFTER)]
        mine = torch.tensor([stall + waited, sum(during) - waited])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        dist.barrier()
        if self.rank == 0 and way != "ours":
            shutil.rmtree(place / f"step-{number}")
        return {
            "stall": float(mine[0]), "during": float(mine[1]) / len(during), "steps": len(during),
            "after": statistics.median(after),
        }  # fmt: skip

    _wait: Callable[[], None] | None = None
    _saved_at = 0

    def _ours(self, place: Path) -> tuple[Callable[[], bool], float]:
        del place
        begun = time.perf_counter()
        has_room = self.snapshots.begin(
            self.step, self.state(), votes=self.votes, disk=True, limit=120.0, beat=lambda: None
        )
        stall = time.perf_counter() - begun
        assert has_room
        step = self._saved_at = self.step

        def hand_over() -> None:
            assert self.snapshots.finish() is not None
            if self.rank == 0:
                self.say("saving", step=step)

        def is_done() -> bool:
            self.keep.hear()
            return self.keep.saved >= step

        self._wait = hand_over
        return is_done, stall

    def _async_best(self, place: Path) -> tuple[Callable[[], bool], float]:
        begun = time.perf_counter()
        response: Any = dcp.async_save(
            self.state(), checkpoint_id=place, async_stager=self.stager, process_group=self.group
        )
        stall = time.perf_counter() - begun
        self._wait = response.staging_completion.result
        return response.upload_completion.done, stall

    def _async_default(self, place: Path) -> tuple[Callable[[], bool], float]:
        begun = time.perf_counter()
        future: Any = dcp.async_save(self.state(), checkpoint_id=place, process_group=self.group)
        return future.done, time.perf_counter() - begun

    def _save(self, place: Path) -> tuple[Callable[[], bool], float]:
        begun = time.perf_counter()
        dcp.save(self.state(), checkpoint_id=place)
        return lambda: True, time.perf_counter() - begun


def rank_life(rank: int, folder: Path, keep: Keep, line: Line, rounds: int) -> None:
    """Go through all ways, turn about, and tell what was measured."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=90))
    run = Run(rank, folder, keep, line.send)
    nbytes = torch.tensor(float(sum(tensor.nbytes for tensor in run.state().values())))
    dist.all_reduce(nbytes)
    told: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):  # The first of each makes room, and is told apart.
        for way in WAYS:
            told[way].append(run.cycle(way, number))
            if rank == 0:
                harness.say(f"round {number}, {way}: " + ", ".join(f"{k} {v:.3f}" for k, v in told[way][-1].items()))
    if rank == 0:
        line.send("result", told=told, nbytes=int(nbytes))
    run.snapshots.close()
    dist.barrier()
    dist.destroy_process_group()


def start(rank: int, folder: Path, keeper: socket.socket, rounds: int) -> tuple[int, Line]:
    """Fork a rank."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        keeper.close()
        return pid, Line(ours)
    code = 1
    try:
        rank_life(rank, folder, Keep(Line(keeper), rank), Line(theirs), rounds)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into the caller's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Keep the keepers, as a controller does, until rank 0 tells what was measured."""
    job = JobSpec(checkpoint=CheckpointSpec(keep=1, compress=False))
    plan = Plan(
        job=job, layout=Layout(data=RANKS), machine="m", cards=tuple(range(RANKS)), micro_batch=1, micro_batches=1,
        stages=(),
    )  # fmt: skip
    (folder / "logs").mkdir()
    keepers = Keepers(folder, plan)
    keepers.begin(plan, attempt=0)
    ranks = [start(rank, folder, keepers.attach(rank), rounds) for rank in range(RANKS)]
    took: list[float] = []
    try:
        while True:
            select.select([*keepers.connections, *(line for _, line in ranks)], [], [], 1.0)
            for _, line in ranks:
                while (message := line.take()) is not None:
                    if message["kind"] == "result":
                        # Every byte that is called saved is there.
                        saves = saves_of(job.checkpoint, folder / "checkpoints")
                        saves.verify(saves.all()[-1][1])
                        return {**message, "took": took}
                    manifest = Manifest(
                        step=message["step"], samples=0, seed=0, model="", data="", layout="", optimizer="adamw"
                    )
                    keepers.expect(message["step"], asdict(manifest), stall=0.0, attempt=0)
                if line.is_closed:
                    raise SystemExit("a rank ended; its words are above")
            for event in keepers.hear():
                if isinstance(event, Unsaved):
                    raise SystemExit(f"not saved: {event.reason}")
                if isinstance(event, Saved):
                    took.append(event.took)
    finally:
        for pid, line in ranks:
            line.close()
            os.waitpid(pid, 0)
        keepers.close()


def main() -> None:
    """Measure and print."""
    flags: argparse.Namespace = harness.parser(__doc__).parse_args()
    rounds = 6 if flags.full else 3
    folder = Path(tempfile.mkdtemp(prefix="supernode-bench-"))
    try:
        found = measure(folder, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    told = found["told"]
    stalls = {way: [one["stall"] for one in told[way][1:]] for way in WAYS}
    paces = {way: [one["during"] / one["after"] for one in told[way][1:]] for way in WAYS}

    def over(way: str) -> float:
        return statistics.median(a / b for a, b in zip(stalls["ours"], stalls[way], strict=True))

    harness.finish(
        {
            "benchmark": "checkpoint_stall", "machine": harness.machine("torch"), "ranks": RANKS,
            "state_bytes": found["nbytes"], "rounds": rounds,
            "stall_seconds": {way: statistics.median(stalls[way]) for way in WAYS},
            "first_stall_seconds": {way: told[way][0]["stall"] for way in WAYS},
            "step_seconds": statistics.median(one["after"] for way in WAYS for one in told[way]),
            "step_during_write_by_way": {way: statistics.median(paces[way]) for way in WAYS if way != "save"},
            "steps_during_write": {way: statistics.median(one["steps"] for one in told[way][1:]) for way in WAYS},
            "seconds_until_on_disk": statistics.median(found["took"]),
            "over_dcp_async_best": over("async_best"), "over_dcp_async_default": over("async_default"),
            "over_dcp_save": over("save"), "step_during_write": statistics.median(paces["ours"]),
        },
        flags,
    )  # fmt: skip


if __name__ == "__main__":
    main()
