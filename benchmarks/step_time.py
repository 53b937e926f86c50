"""How long is our training step beside plain PyTorch DDP and beside other trainers, on the same model and two ranks?

All trainers stay alive and take turns: in each round every one is continued for a few steps and stopped again, and the
ratios are taken within the round, so that a machine that grows slower or busier slows all of them alike. Ours is a real
job from `SuperNode.run`: its steps are journalled, its metrics gathered.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import harness
import supernode
from supernode.control.journal import read
from supernode.schema.event import StepDone
from supernode.schema.model import DecoderShape

HERE = Path(__file__).resolve().parent
RANKS = 2
BATCH = 4  # samples on one rank
SEQUENCE = 256  # tokens in a sample
SHAPE = DecoderShape(layers=4, width=256, heads=8, vocabulary=256, tied=False)
LEARNING_RATE = 1e-3
WARMUP = 5
"""Steps of each trainer before the first round."""
STEPS = 6
"""Steps of each trainer in one round; the one that a stop cuts in two comes on top."""
MOST_STEPS = 5000
LIMIT = 480.0
"""Seconds from the start after which no round begins that would pass them."""
QUIET_SHARE = 0.05
"""Part of all cores that other programs may take for the wall clock to be the fair one."""
CLOCKS = ("wall", "process_cpu")
START_LIMIT = 180.0
"""Seconds that a trainer may take to its first steps, and to a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another trainer: its script, and the packages of its environment (none: it runs in this one)."""

    script: str
    exactly: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


PEERS = {
    "ddp": Peer(script="ddp.py"),
    "accelerate": Peer(script="accelerate_ddp.py", needs=("accelerate==1.15.*",)),
    "torchtitan": Peer(
        script="torchtitan_ddp.py",
        exactly=("torchtitan==0.3.*",),
        needs=(
            "torchdata>=0.8", "torch_checkpointing>=0.1", "datasets>=3.6,<4.8", "safetensors", "tyro", "tensorboard",
            "einops", "spmd_types==0.2.3", "tokenizers>=0.21,<1", "numpy",
        ),
    ),
}  # fmt: skip


@dataclass(slots=True)
class Trainer:
    """A trainer that is alive: where it notes its steps, and the processes that compute."""

    name: str
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    others: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        path = self.folder / "marks-0"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def marks(self, first: int, last: int, *, rank: int = 0) -> list[list[float]]:
        """Return [time, CPU seconds so far, …] at the ends of some steps; a rank that lags has not told all of them."""
        lines = (self.folder / f"marks-{rank}").read_text().split("\n")[:-1]
        return [[float(number) for number in line.split()] for line in lines[first:last]]

    def cpu(self, first: int, last: int) -> float:
        """Return the CPU seconds of a step on a rank: the mean over the ranks, which differ by some percent."""
        told = [self.marks(first, last, rank=rank) for rank in range(len(self.processes))]
        return statistics.mean((marks[-1][1] - marks[0][1]) / (len(marks) - 1) for marks in told)

    def pids(self) -> list[int]:
        """Return the ranks' processes."""
        return self.others or [process.pid for process in self.processes]

    def wait_for(self, steps: int) -> None:
        """Wait until so many steps have ended.

        Raises:
            PeerMissingError: the trainer ended, or takes too long.
        """
        deadline = time.monotonic() + START_LIMIT
        while self.steps < steps:
            time.sleep(0.02)
            if any(process.poll() is not None for process in self.processes):
                words = (self.folder / "log-0").read_text().strip().splitlines() or [""]
                raise harness.PeerMissingError(f"{self.name} ended early: {words[-1]}")
            if time.monotonic() > deadline:
                raise harness.PeerMissingError(f"{self.name} took {self.steps} steps in {START_LIMIT:g} s")

    def signal(self, number: int) -> None:
        """Send a signal to every rank."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End its processes: ours as Ctrl-C does, the others at once."""
        self.signal(signal.SIGCONT)
        for process in self.processes:
            process.send_signal(signal.SIGINT if self.others else signal.SIGKILL)
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def started(name: str, peer: Peer | None, tokens: Path, folder: Path) -> Iterator[Trainer]:
    """Start a trainer, let it warm up, and lend it, stopped."""
    python = Path(sys.executable)
    if peer is not None and (peer.exactly or peer.needs):
        python = harness.peer_python(name, exactly=peer.exactly, needs=peer.needs)
    folder.mkdir()
    orders: dict[str, Any] = {
        "package": str(Path(supernode.__file__).parents[1]), "tokens": str(tokens), "shape": asdict(SHAPE),
        "inner": SHAPE.inner, "parameters": SHAPE.parameters, "sequence": SEQUENCE, "batch": BATCH,
        "steps": MOST_STEPS, "learning_rate": LEARNING_RATE, "answer": str(folder),
    }  # fmt: skip
    if peer is None:
        orders["ranks"] = RANKS
    (folder / "orders.json").write_text(json.dumps(orders))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    script = HERE / "peers" / (peer.script if peer is not None else "supernode_run.py")
    trainer = Trainer(name, folder, [])
    try:
        for rank in range(RANKS if peer is not None else 1):
            own = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if peer is not None else {}
            with (folder / f"log-{rank}").open("w") as log:
                words = [str(python), str(script), str(folder / "orders.json")]
                trainer.processes.append(
                    subprocess.Popen(words, stdout=log, stderr=log, cwd=folder, env=os.environ | own)
                )
        trainer.wait_for(WARMUP)
        if peer is None:
            trainer.others = [int(pid) for pid in (folder / "pids").read_text().split()]
        trainer.signal(signal.SIGSTOP)
        yield trainer
    finally:
        trainer.end()


def take_turn(trainer: Trainer) -> dict[str, float]:
    """Continue a trainer for `STEPS` whole steps and stop it again; returns what a step took."""
    before, busy = trainer.steps, _busy_seconds()
    spent, begun = sum(map(_cpu_seconds, trainer.pids())), time.perf_counter()
    trainer.signal(signal.SIGCONT)
    try:
        trainer.wait_for(before + 1 + STEPS)
    finally:
        trainer.signal(signal.SIGSTOP)
    elapsed, spent = time.perf_counter() - begun, sum(map(_cpu_seconds, trainer.pids())) - spent
    # The first of these marks ends the step that the last stop cut in two.
    kept = trainer.marks(before, before + 1 + STEPS)
    return {
        "wall": statistics.median(after[0] - early[0] for early, after in pairwise(kept)),
        "process_cpu": trainer.cpu(before, before + 1 + STEPS),
        "others_share": max(0.0, _busy_seconds() - busy - spent) / (elapsed * (os.cpu_count() or 1)),
        "first": before + 1,
    }


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of another process with all its threads."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), as Linux encodes it


def _busy_seconds() -> float:
    """Return the seconds that all cores have worked."""
    columns = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, columns)
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


Round = dict[str, dict[str, float]]


def measure(rounds: int, limit: float, folder: Path) -> tuple[list[Round], dict[str, str], dict[str, str], float]:
    """Return the rounds, the peers' versions, why a peer is missing, and our median step as its own rank tells it."""
    begun, longest = time.monotonic(), 0.0
    tokens = folder / "tokens.npy"  # Enough for every step; their values do not change the work.
    size = RANKS * BATCH * SEQUENCE * MOST_STEPS + 1
    np.save(tokens, np.random.default_rng(0).integers(0, SHAPE.vocabulary, size, dtype=np.uint16))
    done: list[Round] = []
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        alive = [stack.enter_context(started("ours", None, tokens, folder / "ours"))]
        for name, peer in PEERS.items():
            try:
                alive.append(stack.enter_context(started(name, peer, tokens, folder / name)))
                versions[name] = (folder / name / "version-0").read_text()
            except harness.PeerMissingError as reason:
                missing[name] = str(reason)
        while not done or (len(done) < rounds and time.monotonic() - begun + longest < limit):
            round_begun, turn = time.monotonic(), len(done) % len(alive)
            done.append({trainer.name: take_turn(trainer) for trainer in alive[turn:] + alive[:turn]})
            longest = max(longest, time.monotonic() - round_begun)
            words = (f"{t.name} {done[-1][t.name]['process_cpu'] * 1000:.0f}" for t in alive)
            share = statistics.mean(turn["others_share"] for turn in done[-1].values())
            harness.say(f"round {len(done):2}, CPU ms a step: {', '.join(words)}; others take {share:.0%}")
    steps = [event.seconds for _, event in read(folder / "ours" / "run" / "journal.db") if isinstance(event, StepDone)]
    firsts = [int(turn["ours"]["first"]) for turn in done]
    journalled = statistics.median(seconds for first in firsts for seconds in steps[first : first + STEPS])
    return done, versions, missing, journalled


def compare(rounds: list[Round], clock: str) -> dict[str, float]:
    """Return ours over each peer: the ratio within each round, then the median over the rounds."""
    peers = rounds[0].keys() - {"ours"}
    ratios = {name: [turn["ours"][clock] / turn[name][clock] for turn in rounds] for name in sorted(peers)}
    return {name: round(statistics.median(values), 4) for name, values in ratios.items()}


def summary(rounds: list[Round], name: str) -> dict[str, float]:
    """Return a trainer's median milliseconds a step by each clock."""
    return {clock: round(1000 * statistics.median(turn[name][clock] for turn in rounds), 2) for clock in CLOCKS}


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    with harness.scratch() as folder:
        limit = float("inf") if flags.full else LIMIT
        rounds, versions, missing, journalled = measure(100 if flags.full else 40, limit, folder)
    others = statistics.median(turn["others_share"] for trials in rounds for turn in trials.values())
    clock = "wall" if others <= QUIET_SHARE else "process_cpu"
    ratios = {name: compare(rounds, name) for name in CLOCKS}
    rivals = [ratio for name, ratio in ratios[clock].items() if name != "ddp"]
    result = {
        "over_ddp": ratios[clock].get("ddp"),
        "over_best_trainer": max(rivals, default=None),
        "clock": clock,
        "why_this_clock": "wall time is what a user waits, and is read when other programs take at most"
        f" {QUIET_SHARE:.0%} of the cores during a trainer's turn (median over the turns); above that, CPU time of a"
        " rank with all its threads, which waiting for a core does not change",
        "others_share": round(others, 3),
        "ratios": ratios,
        "ms_a_step": {name: summary(rounds, name) for name in ("ours", *versions)},
        "ours_by_its_own_rank_ms": round(1000 * journalled, 2),
        "what_is_timed": "from the end of one step to the end of the next, data included; ours as the controller hears"
        " of it, with the journal written, and with the controller's CPU time added to that of the ranks",
        "peers": versions | dict.fromkeys(missing),
        "missing": missing,
        "setting": {
            "shape": asdict(replace(SHAPE, hidden=SHAPE.inner)), "parameters": SHAPE.parameters, "sequence": SEQUENCE,
            "batch": RANKS * BATCH, "ranks": RANKS, "threads": 1, "warmup": WARMUP, "steps_a_round": STEPS,
        },
        "rounds": [
            {name: {key: round(value, 5) for key, value in turn.items()} for name, turn in trials.items()}
            for trials in rounds
        ],
        "machine": harness.machine("torch", "numpy"),
    }  # fmt: skip
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
