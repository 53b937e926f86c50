"""How long from a kill to the next finished step? A rank, a node or all of them die, beside a restart from torch's DCP.

Ours is one `supernode run` on two stand-in nodes: what dies is killed, and the journal tells when it was found, when
ranks had met, when they had their state, and when a step was done. The peer is the same model under
DistributedDataParallel, saved by `torch.distributed.checkpoint` as often, its ranks started again as `torchrun` does:
all of them, by a launcher that looks every 0.1 s, here with a store of its own each time, without which restarts fail
more often than not. Both take turns. Of every time one usual step is taken off, and steps that are done again are
counted besides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import harness
from supernode.control.journal import read
from supernode.control.runs import JOURNAL
from supernode.schema.event import Event, Kept, RankLost, RankReady, Restored, Saved, StepDone

RANKS, NODES, EVERY = 4, 2, 10
SHAPE: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4}
SEQUENCE, BATCH = 64, 8
JOB: dict[str, Any] = {
    "name": "recovery",
    "model": SHAPE,
    "data": {"text": str(Path(json.__file__).parent), "sequence": SEQUENCE},
    "batch": BATCH,
    "parallelism": {"data": RANKS},
    "steps": 100_000,
    "checkpoint": {"every": EVERY, "memory_every": 1},
    "recovery": {"nodes": NODES, "fence_after": 0, "most_restarts": 1000},
    "evaluate": {"batches": 1},
    "threads": 1,
}  # fmt: skip
"""A job without an end: what is timed is how it goes on."""
SUPERNODE = str(Path(sys.executable).with_name("supernode"))
MONITOR_SECONDS = 0.1  # torchrun's `--monitor-interval`
LIMIT_SECONDS = 120.0
LOOK_SECONDS = 0.25
"""Between looks at what has been told, each of which takes processor time from the ranks; times are as told."""
KINDS = ("rank", "node", "all")


class Ours:
    """A run of ours, and what is killed of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.run = folder / "run"
        (folder / "job.yaml").write_text(json.dumps(JOB))
        with (folder / "output.log").open("wb") as log:
            self.controller = subprocess.Popen(
                [SUPERNODE, "run", str(folder / "job.yaml"), "--folder", str(self.run), "--json"], stdout=log,
                stderr=log, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._log = folder / "output.log"

    def events(self) -> list[tuple[float, Event]]:
        """Return the journal so far."""
        path = self.run / JOURNAL
        return list(read(path)) if path.exists() and path.stat().st_size else []

    def wait(self, happened: Any) -> Any:
        """Return what `happened` finds in the journal once it finds something."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            if self.controller.poll() is not None:
                raise SystemExit(f"the run ended: {self._log.read_text()[-400:]}")
            if found := happened(self.events()):
                return found
            time.sleep(LOOK_SECONDS)
        raise SystemExit(f"the run did not go on within {LIMIT_SECONDS:g} s: {self._log.read_text()[-400:]}")

    def pids(self) -> tuple[list[int], list[int]]:
        """Return the process numbers of ranks and of keepers, each in the order of their numbers."""
        ranks, keepers = [], []
        for child in _children(self.controller.pid):
            words = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"supernode.keeping.keeper" in words:
                keepers.append(child)
            elif b"supernode.backends.forkserver" in words:
                ranks = _children(child)
        return ranks, sorted(keepers)

    def kill(self, kind: str) -> dict[str, Any]:
        """Kill a rank, a node or all; returns the seconds until the next finished step, and of what."""
        last = max(event.incarnation for _, event in self.events() if isinstance(event, StepDone))
        begun = self.wait(lambda events: _steps(events, last, 3 + EVERY // 2))
        ranks, keepers = self.pids()
        victims = {"rank": ranks[1:2], "node": [*ranks[2:], keepers[1]], "all": [*ranks, *keepers]}[kind]
        told = max(event.step for _, event in begun if isinstance(event, StepDone))
        killed = time.time()
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        events = self.wait(lambda events: _steps(events, last, 1, later=True))
        now = min(e.incarnation for _, e in events if isinstance(e, StepDone) and e.incarnation > last)
        told = max([told, *(e.step for _, e in events if isinstance(e, StepDone) and e.incarnation == last)])
        lost = next(t for t, e in events if isinstance(e, RankLost) and e.incarnation == last)
        ready = [(t, e) for t, e in events if isinstance(e, RankReady) and e.incarnation == now]
        restored = next(e for _, e in events if isinstance(e, Restored) and e.incarnation == now)
        done = next(t for t, e in events if isinstance(e, StepDone) and e.incarnation == now)
        loaded = max(t for t, _ in ready)
        met = max(t - e.seconds + e.met_seconds for t, e in ready)
        return {
            "kind": kind, "source": restored.source, "seconds": done - killed - self.step(events),
            "detect": lost - killed, "start": met - lost, "load": loaded - met, "first_step": done - loaded,
            "steps_again": told - restored.step, "launches": now - last,
        }  # fmt: skip

    def step(self, events: list[tuple[float, Event]]) -> float:
        """Return the seconds of a usual step."""
        return statistics.median(event.seconds for _, event in events if isinstance(event, StepDone))

    def close(self) -> None:
        """End the run."""
        self.controller.kill()
        self.controller.wait()


def _steps(
    events: list[tuple[float, Event]], incarnation: int, count: int, *, later: bool = False
) -> list[tuple[float, Event]] | None:
    """Return the events once an incarnation, or a later one, has taken so many steps, and something is saved."""
    taken = [e.incarnation for _, e in events if isinstance(e, StepDone)]
    enough = sum(one > incarnation if later else one == incarnation for one in taken) >= count
    is_kept = any(isinstance(e, Kept) for _, e in events) and any(isinstance(e, Saved) for _, e in events)
    return events if enough and (later or is_kept) else None


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return []


class Peer:
    """Ranks of plain torch, and the launcher that starts them again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._launch, self._ranks = folder, 0, []  # type: ignore[var-annotated]
        folder.mkdir()
        self._start()

    def _start(self) -> None:
        self._launch += 1
        (self._folder / f"store-{self._launch}").mkdir()
        with (self._folder / "output.log").open("ab") as log:
            self._ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, "--peer", str(self._folder), str(rank), str(self._launch)],
                    stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )
                for rank in range(RANKS)
            ]  # fmt: skip

    def told(self, launch: int) -> list[dict[str, Any]]:
        """Return what the first rank of a launch has said so far."""
        path = self._folder / f"told-{launch}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def _wait(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            steps = [told for told in self.told(self._launch) if told["what"] == "step"]
            if len(steps) >= count:
                return steps
            time.sleep(LOOK_SECONDS)
        raise SystemExit(f"the peer did not go on: {(self._folder / 'output.log').read_text()[-400:]}")

    def kill(self) -> dict[str, Any]:
        """Kill a rank, and start all again as torchrun does; returns the seconds until the next finished step."""
        before = self._wait(EVERY + 3)
        usual = statistics.median(told["seconds"] for told in before)
        killed = time.time()
        self._ranks[1].kill()
        while all(rank.poll() is None for rank in self._ranks):
            time.sleep(MONITOR_SECONDS)
        found = time.time()
        told = max(one["step"] for one in self.told(self._launch) if one["what"] == "step")
        self.stop()
        self._start()
        first = self._wait(1)[0]
        said = {one["what"]: one["time"] for one in reversed(self.told(self._launch))}
        return {
            "kind": "dcp_restart", "seconds": first["time"] - killed - usual, "detect": found - killed,
            "start": said["met"] - found, "load": said["loaded"] - said["met"],
            "first_step": first["time"] - said["loaded"], "steps_again": told - first["step"] + 1,
        }  # fmt: skip

    def stop(self) -> None:
        """End the ranks that are left."""
        for rank in self._ranks:
            rank.terminate()
        for rank in self._ranks:
            rank.wait()


def peer(folder: Path, rank: int, launch: int) -> None:
    """Train as a rank of plain torch."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    from supernode.models.decoder import Decoder
    from supernode.schema.model import DecoderShape

    torch.set_num_threads(1)
    out = (folder / f"told-{launch}.jsonl").open("a", buffering=1) if rank == 0 else None

    def tell(**values: Any) -> None:
        if out is not None:
            out.write(json.dumps(values | {"time": time.time()}) + "\n")

    store = dist.FileStore(str(folder / f"store-{launch}" / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    dist.barrier()
    tell(what="met")
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder(DecoderShape(**SHAPE, vocabulary=256)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    saved = sorted(path for path in folder.glob("step-*") if (path / ".metadata").exists())
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.zeros((), dtype=torch.int64)}
        dcp.load(state, checkpoint_id=str(saved[-1]))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = int(state["step"])
    dist.barrier()
    tell(what="loaded")
    drawn = torch.Generator().manual_seed(rank)
    while True:
        begun = time.perf_counter()
        tokens = torch.randint(256, (BATCH // RANKS, SEQUENCE + 1), generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        step += 1
        tell(what="step", step=step, seconds=time.perf_counter() - begun)
        if step % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": torch.tensor(step)}
            dcp.save(state, checkpoint_id=str(folder / f"step-{step:08d}"))


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="kills of each kind (default 3)")
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.peer:
        peer(Path(flags.peer[0]), int(flags.peer[1]), int(flags.peer[2]))
        return
    dice, rows = random.Random(0), []
    with harness.scratch() as folder:
        # One after the other: both at once would share the cores.
        for number in range(flags.rounds):
            ours = Ours(folder / f"ours-{number}")
            try:
                for kind in dice.sample(KINDS, len(KINDS)):
                    ours.wait(lambda events: any(isinstance(e, StepDone) for _, e in events))
                    rows.append(ours.kill(kind))
                    _say(rows[-1])
            finally:
                ours.close()
            theirs = Peer(folder / f"peer-{number}")
            try:
                rows.append(theirs.kill())
                _say(rows[-1])
            finally:
                theirs.stop()
    harness.finish(summed_up(rows) | {"machine": harness.machine("torch")}, flags)


def _say(row: dict[str, Any]) -> None:
    parts = ", ".join(f"{part} {row[part]:.2f}" for part in ("detect", "start", "load", "first_step"))
    source = f" from {row['source']}" if "source" in row else ""
    harness.say(f"{row['kind']:12} {row['seconds']:.2f} s beyond a step ({parts}), {row['steps_again']} again{source}")


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians by kind, and what they come to."""
    by_kind: dict[str, dict[str, Any]] = {}
    for kind in (*KINDS, "dcp_restart"):
        own = [row for row in rows if row["kind"] == kind]
        numbers = [key for key, value in own[0].items() if not isinstance(value, str)]
        by_kind[kind] = {key: round(statistics.median(row[key] for row in own), 3) for key in numbers}
        by_kind[kind] |= {"sources": sorted({row["source"] for row in own if "source" in row})}
    peers = by_kind["dcp_restart"]["seconds"]
    return {
        "rank_seconds": by_kind["rank"]["seconds"],
        "node_seconds": by_kind["node"]["seconds"],
        "all_seconds": by_kind["all"]["seconds"],
        "dcp_restart_seconds": peers,
        "over_dcp_restart": round(by_kind["rank"]["seconds"] / peers, 3),
        "node_over_dcp_restart": round(by_kind["node"]["seconds"] / peers, 3),
        "all_over_dcp_restart": round(by_kind["all"]["seconds"] / peers, 3),
        "parts": by_kind,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
