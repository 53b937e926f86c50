"""Does a killed run end as if nothing had happened? SIGKILL to ranks, controllers and fork servers, at random moments.

Each run is a `supernode run` of its own; a killed controller is followed at once by `supernode resume`. It must end
with the losses of an undisturbed run of the same layout, bit for bit, and leave no process and no file behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

import harness
from supernode.checkpoint.source import as_bytes, on_disk, tensors_of
from supernode.control.journal import read
from supernode.control.runs import JOURNAL, RunFolder
from supernode.schema.event import Evaluated, RankReady, Saved, StepDone
from supernode.storing.saves import DRAFT, name_of, step_of

STEPS, EVERY = 20, 3
JOB: dict[str, Any] = {
    "name": "kill",
    "model": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "dropout": 0.1},
    "data": {"text": str(Path(json.__file__).parent), "sequence": 64},
    "batch": 16,
    "gradient_accumulation": 2,
    "steps": STEPS,
    "checkpoint": {"every": EVERY, "keep": 2},
    "evaluate": {"every": 7, "batches": 2},
    "threads": 1,
}  # fmt: skip
OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, 64), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 256)
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model(): return Model()

class Windows(torch.utils.data.Dataset):
    def __init__(self, count, start): self.count, self.start = count, start
    def __len__(self): return self.count
    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(self.start + index)
        x = torch.randint(256, (64,), generator=drawn)
        return x, (x * 7 + 3) % 256

def train(): return Windows(512, 0)
def held_out(): return Windows(64, 10_000)
"""
"""A module of the user's own, which is split and cut by its graph."""
EXPERTS = JOB["model"] | {"experts": 4, "experts_per_token": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "t2p2": {"parallelism": {"tensor": 2, "pipeline": 2, "data": 1}},
    "d2": {"parallelism": {"data": 2}},
    "t2p2 zero bubble, sequence, recomputed": {
        "parallelism": {
            "tensor": 2, "pipeline": 2, "data": 1, "schedule": "zero_bubble", "sequence": True,
            "recompute": "selective",
        },
    },
    "d2 fsdp": {"parallelism": {"data": 2, "sharding": "fsdp"}},
    "c2d2 recomputed, one bit": {
        "parallelism": {"context": 2, "data": 2, "recompute": "full"},
        "communication": {"compress": "onebit", "where": "all", "bucket": 65_536},
    },
    "d2 experts, low rank": {
        "model": EXPERTS, "parallelism": {"data": 2, "expert": 2},
        "communication": {"compress": "powersgd", "where": "all", "warmup": 3},
    },
    "own t2p2": {
        "model": "own.py:model", "parallelism": {"tensor": 2, "pipeline": 2, "data": 1},
        "data": {"dataset": "own.py:train", "held_out_dataset": "own.py:held_out"},
    },
    "d2 few bits": {
        "precision": "bfloat16", "parallelism": {"data": 2},
        "optimizer": {"state": "float8", "rounding": "stochastic", "in_backward": True},
    },
    "t2d2 fsdp": {"parallelism": {"tensor": 2, "data": 2, "sharding": "fsdp"}},
    "p2": {"parallelism": {"pipeline": 2, "data": 1}},
}  # fmt: skip
"""What each run has otherwise than `JOB`: between them, all that can be switched on."""
SUPERNODE = str(Path(sys.executable).with_name("supernode"))
MARK = "SUPERNODE_BENCH_MARK"
"""Environment variable that every process of a run inherits, however its parents ended."""
ORPHAN_SECONDS = 5.0
RUN_SECONDS = 120.0
PREPARE_SECONDS = 0.5
"""About how long a controller takes from the run's folder to the launch of its ranks."""
TRIES = 5
"""How often a run is begun anew because it was over before its kill."""


class TooLateError(Exception):
    """The run ended before the kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a run came to, without the times: all of it must be equal to the bit."""

    losses: dict[int, float]
    held_out: dict[int, float]
    files: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The undisturbed run of a layout, and its usual times in seconds, from which moments are drawn."""

    ending: Ending
    launch: float
    step: float
    save: float


class Attempt:
    """One run in its folder, the processes that bear its mark, and what happened to it."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.folder, self.run, self.mark = folder, folder / "run", uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        (folder / "own.py").write_text(OWN)
        (folder / "job.yaml").write_text(json.dumps(JOB | LAYOUTS[layout]))
        self.begin()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "output.log").open("ab") as log:
            return subprocess.Popen(
                [SUPERNODE, *words, "--json"], stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
                env=os.environ | {MARK: self.mark, "TMPDIR": str(self.temporary)},
            )  # fmt: skip

    def begin(self) -> None:
        """Start the run."""
        self.controller = self._start("run", str(self.folder / "job.yaml"), "--folder", str(self.run))

    def resume(self) -> None:
        """Go on with the run in a new controller; one that had not begun is started once more."""
        if self.events():
            self.controller = self._start("resume", str(self.run))
        else:
            self.begin()

    def wait(self) -> int:
        """Return the controller's exit code."""
        return self.controller.wait(RUN_SECONDS)

    def ranks(self) -> list[int]:
        """Return the ranks' process numbers in rank order; none before they are forked."""
        for server in _children(self.controller.pid):
            return _children(server)
        return []

    def draft_step(self) -> int:
        """Return the step whose checkpoint is being written, or -1."""
        folder = self.run / "checkpoints"
        names = os.listdir(folder) if folder.is_dir() else []
        return max((step_of(name.removeprefix(DRAFT)) for name in names if name.startswith(DRAFT)), default=-1)

    def step(self) -> int:
        """Return the newest step of the journal."""
        return max((event.step for event in self.events() if isinstance(event, StepDone)), default=0)

    def events(self) -> list[Any]:
        """Return the journal's events so far."""
        path = self.run / JOURNAL
        return [event for _, event in read(path)] if path.exists() and path.stat().st_size else []

    def living(self) -> set[int]:
        """Return the numbers of all processes that bear the run's mark, zombies aside."""
        wanted = f"{MARK}={self.mark}".encode()
        return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _bears(entry, wanted)}

    def kill_all(self) -> None:
        """End what is left of the run."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.controller.wait()

    def ending(self) -> Ending:
        """Return what the run came to; raises where a step was told twice with two losses."""
        losses: dict[int, float] = {}
        events = self.events()
        for event in events:
            if isinstance(event, StepDone) and losses.setdefault(event.step, event.loss) != event.loss:
                raise AssertionError(f"step {event.step} had loss {losses[event.step]!r}, then {event.loss!r}")
        held_out = {event.step: event.loss for event in events if isinstance(event, Evaluated)}
        last = on_disk(self.run / "checkpoints" / name_of(max(losses)))
        files = {name: xxhash.xxh3_128_hexdigest(as_bytes(tensor)) for name, tensor in tensors_of(last)}
        return Ending(losses=losses, held_out=held_out, files=files)

    def leftovers(self) -> list[str]:
        """Return the files that a finished run has no business leaving, and `lock` where its folder is still held."""
        expected = {"job.json", JOURNAL, "report.html", "report.json", "data", "checkpoints", "logs"}
        found = [entry.name for entry in self.run.iterdir() if entry.name not in expected]
        tokens = self.run / "data"  # Not there where the data set is the user's own.
        listed = tokens.iterdir() if tokens.exists() else ()
        found += [f"data/{entry.name}" for entry in listed if entry.name.startswith(".")]
        kept = [entry.name for entry in (self.run / "checkpoints").iterdir()]
        steps = sorted(name for name in kept if step_of(name) >= 0)
        found += [f"checkpoints/{name}" for name in kept if step_of(name) < 0 and name != "packs"]
        found += [f"checkpoints/{name} beyond `keep`" for name in steps[: -JOB["checkpoint"]["keep"]]]
        needed = {pack for name in steps for pack in on_disk(self.run / "checkpoints" / name).manifest.packs}
        packs = {f"packs/{name}" for name in os.listdir(self.run / "checkpoints" / "packs")}
        found += [f"checkpoints/{name} that nothing needs" for name in packs - needed]
        # torch makes its cache folder wherever it runs, one a user.
        found += [f"tmp/{entry.name}" for entry in self.temporary.iterdir() if "torchinductor" not in entry.name]
        return found + (["lock"] if RunFolder(self.run).is_held else [])


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _bears(process: Path, mark: bytes) -> bool:
    try:
        # The kernel shows a zombie's environment as empty.
        return mark in (process / "environ").read_bytes().split(b"\0")
    except (OSError, ProcessLookupError):
        return False


def until(happened: Callable[[], bool], attempt: Attempt, *, poll: float) -> None:
    """Wait for something to happen in a run.

    Raises:
        TooLateError: the run ended first.
    """
    begun = time.monotonic()
    while not happened():
        if attempt.controller.poll() is not None:
            raise TooLateError
        assert time.monotonic() - begun < RUN_SECONDS, "the run hangs"
        time.sleep(poll)


def wait_for_moment(attempt: Attempt, moment: str, reference: Reference, dice: random.Random) -> str:
    """Wait for a random moment of a kind; returns where that was."""
    if moment == "preparing":
        until((attempt.run / "job.json").exists, attempt, poll=0.002)
        time.sleep(dice.uniform(0, PREPARE_SECONDS))
        return "preparing"
    if moment == "launching":
        until(lambda: bool(attempt.ranks()), attempt, poll=0.002)
        time.sleep(dice.uniform(0, reference.launch))
        return "launching"
    first = dice.randrange(1, STEPS)
    if moment == "step":
        until(lambda: attempt.step() >= first, attempt, poll=0.005)
        time.sleep(dice.uniform(0, reference.step))
        return f"after step {first}"
    until(lambda: attempt.draft_step() >= first, attempt, poll=0.0005)
    time.sleep(dice.uniform(0, reference.save / 2))
    return "saving"


def strike(attempt: Attempt, victim: str, dice: random.Random) -> str:
    """Kill a random rank, the controller, or the server that ranks are forked from; returns which."""
    if victim == "controller":
        if attempt.controller.poll() is not None:
            raise TooLateError
        attempt.controller.kill()
        return victim
    if victim == "server":
        servers = _children(attempt.controller.pid)
        if not attempt.ranks():
            raise TooLateError
        os.kill(servers[0], signal.SIGKILL)
        return victim
    pids = attempt.ranks()
    if not pids:
        raise TooLateError
    rank = dice.randrange(len(pids))
    try:
        os.kill(pids[rank], signal.SIGKILL)
    except ProcessLookupError as error:
        raise TooLateError from error
    return f"rank {rank} of {len(pids)}"


def undisturbed(folder: Path, layout: str) -> Reference:
    """Run a layout in peace."""
    attempt = Attempt(folder, layout)
    assert attempt.wait() == 0, (folder / "output.log").read_text()
    events = attempt.events()
    return Reference(
        ending=attempt.ending(),
        launch=max(event.seconds for event in events if isinstance(event, RankReady)),
        step=statistics.median(event.seconds for event in events if isinstance(event, StepDone)),
        save=statistics.median(event.seconds for event in events if isinstance(event, Saved)),
    )


def disturbed(
    folder: Path, layout: str, victim: str, moment: str, reference: Reference, dice: random.Random
) -> dict[str, Any]:
    """Run a layout, kill its victim once (and maybe another rank later), and say what came of it."""
    attempt = Attempt(folder, layout)
    try:
        kills = []
        for turn in range(2 if victim == "rank" and dice.random() < 0.25 else 1):
            try:
                where = wait_for_moment(attempt, moment if turn == 0 else "step", reference, dice)
                draft = attempt.draft_step()
                who = strike(attempt, victim, dice)
            except TooLateError:
                if turn == 0:
                    raise
                break
            if draft >= 0:
                where = f"writing step {draft}"
            kills.append(f"{who}, {where}")
        orphans, seen = 0, len(attempt.living())
        if victim == "controller":
            attempt.wait()
            theirs = attempt.living()
            attempt.resume()
            time.sleep(ORPHAN_SECONDS)
            orphans += len(theirs & attempt.living())
        code = attempt.wait()
        deadline = time.monotonic() + ORPHAN_SECONDS
        while attempt.living() and time.monotonic() < deadline:
            time.sleep(0.1)
        orphans += len(attempt.living())
        row: dict[str, Any] = {
            "layout": layout,
            "kills": kills,
            "exit_code": code,
            "processes": seen,
            "orphans": orphans,
        }
        return row | _judged(attempt, reference, code)
    finally:
        attempt.kill_all()


def _judged(attempt: Attempt, reference: Reference, code: int) -> dict[str, Any]:
    if code:
        words = (attempt.folder / "output.log").read_text().strip().splitlines()[-2:]
        return {"identical": False, "same_weights": False, "leftovers": [], "why": " / ".join(words)}
    try:
        ending = attempt.ending()
    except AssertionError as error:
        return {"identical": False, "same_weights": False, "leftovers": attempt.leftovers(), "why": str(error)}
    curves = (ending.losses, ending.held_out) == (reference.ending.losses, reference.ending.held_out)
    return {
        "identical": curves and sorted(ending.losses) == list(range(1, STEPS + 1)),
        "same_weights": ending.files == reference.ending.files,
        "leftovers": attempt.leftovers(),
    }


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs to disturb (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default 0)")
    flags = parser.parse_args()
    dice = random.Random(flags.seed)
    rows: list[dict[str, Any]] = []
    with harness.scratch() as folder:
        references: dict[str, Reference] = {}
        for number in range(flags.runs):
            layout = list(LAYOUTS)[number % len(LAYOUTS)]
            if layout not in references:
                references[layout] = undisturbed(
                    folder / f"undisturbed-{layout.replace(' ', '-').replace(',', '')}", layout
                )
            victim = "controller" if number % 4 == 3 else "server" if number % 8 == 6 else "rank"
            weights = {
                "saving": 5,
                "step": 4,
                "launching": victim != "server",
                "preparing": 2 * (victim == "controller"),
            }
            moment = dice.choices(list(weights), list(weights.values()))[0]
            begun = time.monotonic()
            for turn in range(TRIES):
                try:
                    row = disturbed(folder / f"{number}-{turn}", layout, victim, moment, references[layout], dice)
                    break
                except TooLateError:
                    continue
            else:
                raise SystemExit(f"run {number} was over before its kill, {TRIES} times")
            rows.append(row | {"seconds": round(time.monotonic() - begun, 1)})
            verdict = "identical" if row["identical"] else f"DIFFERS {row.get('why', '')}"
            harness.say(f"{number:3} {layout:40} {'; '.join(row['kills']):45} {verdict} {row['leftovers'] or ''}")
    result = {
        "runs": len(rows),
        "identical": sum(row["identical"] for row in rows),
        "identical_share": sum(row["identical"] for row in rows) / len(rows),
        "same_weights": sum(row["same_weights"] for row in rows),
        "orphans": sum(row["orphans"] for row in rows),
        "leftovers": sum(len(row["leftovers"]) for row in rows),
        "killed_controllers": sum("controller" in row["kills"][0] for row in rows),
        "killed_while_writing": sum("writing" in kill for row in rows for kill in row["kills"]),
        "seed": flags.seed,
        "table": rows,
        "machine": harness.machine("torch"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
