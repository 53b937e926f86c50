"""Does a run come through whatever can break? Kills, freezes, full disks, torn writes, flipped bits, lost disks.

Each run is a `supernode run` of its own with one fault at a random moment. It must end with the losses and tensors of
an undisturbed run, bit for bit; where what it needs is damaged beyond repair it may refuse, naming the file, and the
remedy that the refusal names must lead there, too. Every checkpoint that is left at the end must be whole.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

import harness
import kill
from kill import TooLateError, until
from supernode.checkpoint.source import OnDisk, as_bytes, tensors_of
from supernode.errors import SupernodeError
from supernode.schema.event import Ended, Evaluated, RankLost, Restored, StepDone
from supernode.schema.lasting import CheckpointSpec
from supernode.storing.saves import Saves, saves_of, step_of

STEPS, EVERY = 20, 3
AT_ONCE = 3
"""Runs at the same time: each mostly waits, for processes to start and for silence to be noticed."""
FROZEN_SECONDS = 1.5
RUN_SECONDS = 90.0
TRIES = 4
KEPT = os.environ.get("SUPERNODE_KEEP", "")
"""A folder to which runs that went wrong are copied, to look into."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "d4": {"data": 4},
    "t2d2 fsdp": {"tensor": 2, "data": 2, "sharding": "fsdp"},
    "t2p2": {"tensor": 2, "pipeline": 2, "data": 1},
    "p2d2": {"pipeline": 2, "data": 2},
}
SETUPS: dict[str, dict[str, int]] = {
    "one disk": {"nodes": 1, "disks": 1},
    "two nodes, two copies": {"nodes": 2, "disks": 2, "copies": 2},
    "four nodes, two of four disks": {"nodes": 4, "disks": 4, "parity": 2},
}
ONE, TWO, FOUR = SETUPS
REMEDY = re.compile(r"--checkpoint[ =](step-\d{8})")
SMALL_MEGABYTES = 4.0
"""A disk with room for some six checkpoints of the model, until it is filled."""


class Attempt(kill.Attempt):
    """A run whose nodes and disks can be broken one by one."""

    def __init__(self, folder: Path, layout: str, setup: str, *, megabytes: float = 0.0) -> None:
        self.folder, self.run, self.mark = folder, folder / "run", uuid.uuid4().hex
        self.temporary, place = folder / "tmp", folder / "disks"
        for made in (self.temporary, place):
            made.mkdir(parents=True)
        self.mounted = place if megabytes else None
        if self.mounted is not None:
            _mount(place, megabytes)
        said = SETUPS[setup]
        self.nodes, self.disks = said["nodes"], [place / str(number) for number in range(said["disks"])]
        self.checkpoint = {
            "every": EVERY, "keep": 2, "disks": [str(disk) for disk in self.disks],
            **{key: said[key] for key in ("copies", "parity") if key in said},
        }  # fmt: skip
        job = kill.JOB | {
            "model": kill.JOB["model"] | {"width": 32}, "data": kill.JOB["data"] | {"sequence": 32}, "batch": 8,
            "steps": STEPS, "parallelism": LAYOUTS[layout], "checkpoint": self.checkpoint,
            "recovery": {"nodes": said["nodes"], "frozen": FROZEN_SECONDS, "fence_after": 0},
        }  # fmt: skip
        (folder / "job.yaml").write_text(json.dumps(job))
        self.begin()

    def resume(self, *words: str) -> None:
        """Go on with the run in a new controller; one that had not begun is started once more."""
        if self.events():
            self.controller = self._start("resume", str(self.run), *words)
        else:
            self.begin()

    @property
    def saves(self) -> Saves:
        """The run's checkpoints."""
        spec = CheckpointSpec(**(self.checkpoint | {"disks": tuple(self.checkpoint["disks"])}))
        return saves_of(spec, self.run / "checkpoints")

    def keepers(self) -> list[int]:
        """Return the keepers' process numbers, by node."""
        return [pid for pid in _children(self.controller.pid) if _is(pid, b"supernode.keeping.keeper")]

    def ranks(self) -> list[int]:
        """Return the ranks' process numbers in the order of their births; none before they are forked."""
        servers = [pid for pid in _children(self.controller.pid) if _is(pid, b"supernode.backends.forkserver")]
        return _children(servers[0]) if servers else []

    def stop_all(self) -> None:
        """Kill every process of the run, as a loss of power does to processes.

        Raises:
            TooLateError: it had ended by then.
        """
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.controller.wait() >= 0 or any(isinstance(event, Ended) for event in self.events()):
            raise TooLateError
        deadline = time.monotonic() + 10
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.05)

    def newest_files(self, *, disk: int | None = None) -> list[Path]:
        """Return the files of the newest checkpoint: manifest, parts, and packs of its step."""
        disks = self.disks if disk is None else [self.disks[disk]]
        steps = [step for step, _ in self.saves.all()]
        found = []
        for place in disks:
            folder = place / f"step-{max(steps):08d}"
            found += [path for path in folder.glob("*") if path.is_file()]
            found += list((place / "packs").glob(f"{max(steps):08d}-*"))
        return sorted(found)

    def tensors(self) -> dict[str, str]:
        """Return the digest of every tensor of the last checkpoint."""
        saves = self.saves
        return {
            name: xxhash.xxh3_128_hexdigest(as_bytes(tensor.contiguous()))
            for name, tensor in tensors_of(OnDisk(saves, saves.all()[-1][1]))
        }

    def clean(self) -> None:
        """End what is left of the run, and let go of its disk."""
        self.kill_all()
        if self.mounted is not None:
            ctypes.CDLL(None).umount2(str(self.mounted).encode(), 2)


def _children(pid: int) -> list[int]:
    return kill._children(pid)


def _is(pid: int, module: bytes) -> bool:
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _mount(place: Path, megabytes: float) -> None:
    size = f"size={int(megabytes * 1024)}k".encode()
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, size):
        raise SystemExit(f"a small disk needs root: {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that breaks.

    Attributes:
        strike: breaks it, at a moment of its own choice; returns what it did.
        setups: that it can happen in.
        runs: of a hundred.
        refusal: a clear refusal is an answer to it.
        megabytes: of the disk; 0 for a large one.
    """

    strike: Callable[[Attempt, random.Random], str]
    setups: tuple[str, ...]
    runs: int
    refusal: bool = False
    megabytes: float = 0.0


def moment(attempt: Attempt, dice: random.Random, *, first: int = 1, last: int = STEPS - 2) -> int:
    """Wait for a random moment after a random step; returns the step."""
    step = dice.randint(first, last)
    until(lambda: attempt.step() >= step, attempt, poll=0.01)
    time.sleep(dice.uniform(0, 0.15))
    return step


def saved(attempt: Attempt, count: int) -> None:
    """Wait until so many checkpoints were acknowledged and are there."""
    until(lambda: len(attempt.saves.all()) >= count, attempt, poll=0.02)


def send(pids: list[int], what: signal.Signals) -> None:
    """Send a signal to processes, one of which at least must live."""
    living = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)
            living += 1
    if not living:
        raise TooLateError


def kill_ranks(count: int, what: signal.Signals) -> Callable[[Attempt, random.Random], str]:
    """Return a fault: a signal to some ranks at once."""

    def strike(attempt: Attempt, dice: random.Random) -> str:
        step, ranks = moment(attempt, dice), attempt.ranks()
        if len(ranks) < count:
            raise TooLateError
        send(dice.sample(ranks, count), what)
        return f"{what.name} to {count} rank(s) after step {step}"

    return strike


def kill_keeper(attempt: Attempt, dice: random.Random) -> str:
    step = moment(attempt, dice)
    send([dice.choice(attempt.keepers() or [0])], signal.SIGKILL)
    return f"a keeper killed after step {step}"


def kill_node(attempt: Attempt, dice: random.Random) -> str:
    step = moment(attempt, dice)
    keepers, ranks = attempt.keepers(), attempt.ranks()
    if len(keepers) != attempt.nodes or len(ranks) != 4:
        raise TooLateError
    node, each = dice.randrange(attempt.nodes), 4 // attempt.nodes
    send([keepers[node], *ranks[node * each : (node + 1) * each]], signal.SIGKILL)
    return f"node {node} killed after step {step}"


def kill_everyone(attempt: Attempt, dice: random.Random) -> str:
    step = moment(attempt, dice)
    send([*attempt.keepers(), *attempt.ranks()], signal.SIGKILL)
    return f"all keepers and ranks killed after step {step}"


def kill_controller(attempt: Attempt, dice: random.Random) -> str:
    step = moment(attempt, dice)
    if attempt.controller.poll() is not None:
        raise TooLateError
    attempt.controller.kill()
    attempt.controller.wait()
    attempt.resume()
    return f"controller killed after step {step}"


def fill_disk(attempt: Attempt, dice: random.Random) -> str:
    step = moment(attempt, dice, last=STEPS - 8)
    assert attempt.mounted is not None
    balloon = attempt.mounted / "balloon"
    descriptor = os.open(balloon, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(descriptor, bytes(4096))
    os.close(descriptor)
    until(lambda: attempt.step() >= step + 5, attempt, poll=0.02)
    balloon.unlink()
    return f"disk full from step {step} on, for five steps"


def damage(how: str, *, everywhere: bool) -> Callable[[Attempt, random.Random], str]:
    """Return a fault: the power goes, and a file of the newest checkpoint is not what was written."""

    def strike(attempt: Attempt, dice: random.Random) -> str:
        saved(attempt, 2)
        step = moment(attempt, dice)
        attempt.stop_all()
        disk = None if everywhere else dice.randrange(len(attempt.disks))
        files = attempt.newest_files(disk=disk)
        path = dice.choice(files)
        data = bytearray(path.read_bytes())
        if how == "torn":
            data = data[: dice.randrange(len(data))]
        elif how == "flipped":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(data)
        attempt.resume()
        return f"power lost after step {step}, {path.parent.name}/{path.name} {how}"

    return strike


def lose_disks(attempt: Attempt, dice: random.Random) -> str:
    saved(attempt, 1)
    step = moment(attempt, dice)
    attempt.stop_all()
    losses = 1 if "copies" in attempt.checkpoint else 2
    lost = sorted(dice.sample(range(len(attempt.disks)), losses))
    for disk in lost:
        shutil.rmtree(attempt.disks[disk], ignore_errors=True)
    attempt.resume()
    return f"power lost after step {step}, disks {lost} gone"


def flip_memory(attempt: Attempt, dice: random.Random) -> str:
    """Flip bits all over a keeper's memory, then kill a rank that would need it."""
    step = moment(attempt, dice, first=EVERY + 1)
    keepers, ranks = attempt.keepers(), attempt.ranks()
    if not keepers or not ranks:
        raise TooLateError
    flipped = 0
    for pid in keepers:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if "supernode-slot" in os.readlink(entry):
                    with entry.open("r+b") as memory:
                        memory.seek(dice.randrange(0, max(1, os.fstat(memory.fileno()).st_size - 16_384)))
                        where, held = memory.tell(), memory.read(16_384)
                        memory.seek(where)
                        memory.write(bytes(byte ^ 1 for byte in held))
                        flipped += 1
    if not flipped:
        raise TooLateError
    send([dice.choice(ranks)], signal.SIGKILL)
    return f"{flipped} slots of memory changed and a rank killed after step {step}"


FAULTS: dict[str, Fault] = {
    "rank killed": Fault(strike=kill_ranks(1, signal.SIGKILL), setups=(ONE, TWO, FOUR), runs=18),
    "rank frozen": Fault(strike=kill_ranks(1, signal.SIGSTOP), setups=(ONE, TWO, FOUR), runs=10),
    "two ranks killed": Fault(strike=kill_ranks(2, signal.SIGKILL), setups=(ONE, TWO), runs=6),
    "keeper killed": Fault(strike=kill_keeper, setups=(ONE, TWO, FOUR), runs=6),
    "node killed": Fault(strike=kill_node, setups=(TWO, FOUR), runs=10),
    "all nodes killed": Fault(strike=kill_everyone, setups=(ONE, TWO, FOUR), runs=6),
    "controller killed": Fault(strike=kill_controller, setups=(ONE, TWO, FOUR), runs=8),
    "disk full": Fault(strike=fill_disk, setups=(ONE,), runs=6, megabytes=SMALL_MEGABYTES),
    "write torn": Fault(strike=damage("torn", everywhere=True), setups=(ONE,), runs=5, refusal=True),
    "bit flipped": Fault(strike=damage("flipped", everywhere=True), setups=(ONE,), runs=5, refusal=True),
    "file gone": Fault(strike=damage("gone", everywhere=True), setups=(ONE,), runs=4, refusal=True),
    "replica damaged": Fault(strike=damage("flipped", everywhere=False), setups=(TWO, FOUR), runs=5),
    "disks lost": Fault(strike=lose_disks, setups=(TWO, FOUR), runs=7),
    "memory flipped": Fault(strike=flip_memory, setups=(ONE, TWO), runs=6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a run came to."""

    losses: dict[int, float]
    held_out: dict[int, float]
    tensors: dict[str, str]


def ending(attempt: Attempt) -> Ending:
    """Return what a run came to; raises where a step was told twice with two losses."""
    losses: dict[int, float] = {}
    for event in attempt.events():
        if isinstance(event, StepDone) and losses.setdefault(event.step, event.loss) != event.loss:
            raise AssertionError(f"step {event.step} had loss {losses[event.step]!r}, then {event.loss!r}")
    held_out = {event.step: event.loss for event in attempt.events() if isinstance(event, Evaluated)}
    return Ending(losses=losses, held_out=held_out, tensors=attempt.tensors())


def undisturbed(folder: Path, layout: str) -> Ending:
    """Run a layout in peace."""
    attempt = Attempt(folder, layout, ONE)
    try:
        assert attempt.wait() == 0, (folder / "output.log").read_text()
        return ending(attempt)
    finally:
        attempt.clean()


def disturbed(
    folder: Path, layout: str, name: str, setup: str, reference: Ending, dice: random.Random
) -> dict[str, Any]:
    """Run a layout, break something, and say what came of it."""
    fault = FAULTS[name]
    attempt = Attempt(folder, layout, setup, megabytes=fault.megabytes)
    begun = time.monotonic()
    what, refusals = "", []
    try:
        what = fault.strike(attempt, dice)
        code = attempt.controller.wait(RUN_SECONDS)
        while code == 2 and fault.refusal and len(refusals) < 2:
            words = (folder / "output.log").read_text()
            remedy = REMEDY.findall(words)
            named = re.search(r"part-\d+|packs/\S+|manifest", words)
            if not remedy or named is None:
                break
            refusals.append(f"{named[0]}: {remedy[-1]}")
            attempt.resume("--checkpoint", remedy[-1])
            code = attempt.controller.wait(RUN_SECONDS)
        row: dict[str, Any] = {
            "fault": name, "what": what, "layout": layout, "setup": setup, "exit_code": code, "refusals": refusals,
            "seconds": round(time.monotonic() - begun, 1),
        }  # fmt: skip
        row |= _judged(attempt, reference, code)
    except subprocess.TimeoutExpired:
        row = {"fault": name, "what": what, "layout": layout, "setup": setup, "refusals": refusals, "right": False}
        row["why"] = f"it hangs; its newest events: {attempt.events()[-3:]!r:.300}"
    finally:
        attempt.clean()
    if row["right"]:
        shutil.rmtree(folder, ignore_errors=True)
    elif KEPT:
        shutil.copytree(folder, Path(KEPT) / folder.name, dirs_exist_ok=True)
    return row


def _judged(attempt: Attempt, reference: Ending, code: int) -> dict[str, Any]:
    deadline = time.monotonic() + kill.ORPHAN_SECONDS
    while attempt.living() and time.monotonic() < deadline:
        time.sleep(0.05)
    log = (attempt.folder / "output.log").read_text()
    facts: dict[str, Any] = {
        "orphans": len(attempt.living()),
        "losses_found": sum(isinstance(event, RankLost) for event in attempt.events()),
        "sources": dict(Counter(event.source for event in attempt.events() if isinstance(event, Restored))),
        "traceback": "Traceback" in log,
    }
    if code:
        return facts | {"right": False, "why": " / ".join(log.strip().splitlines()[-2:])}
    try:
        found = ending(attempt)
        for step, name in attempt.saves.all():
            assert step_of(name) == step
            attempt.saves.verify(name)
    except (AssertionError, SupernodeError) as error:
        return facts | {"right": False, "why": str(error)}
    same = (found.losses, found.held_out) == (reference.losses, reference.held_out)
    same_tensors = found.tensors == reference.tensors
    why = (
        ""
        if same and same_tensors
        else f"losses {'alike' if same else 'differ'}, tensors {'alike' if same_tensors else 'differ'}"
    )
    return facts | {"right": same and same_tensors and not facts["orphans"] and not facts["traceback"], "why": why}


def attempted(folder: Path, number: int, name: str, references: dict[str, Ending], seed: int) -> dict[str, Any]:
    """Run one fault, again where the run was over before it came."""
    for turn in range(TRIES):
        dice = random.Random(f"{seed}-{number}-{turn}")
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        setup = dice.choice(FAULTS[name].setups)
        try:
            return disturbed(folder / f"{number}-{turn}", layout, name, setup, references[layout], dice)
        except TooLateError:
            continue
        except (OSError, AssertionError, SupernodeError) as error:
            return {"fault": name, "right": False, "why": f"{type(error).__name__}: {error}", "refusals": []}
    why = f"the run was over before the fault, {TRIES} times"
    return {"fault": name, "right": False, "why": why, "refusals": []}


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--runs", type=int, default=100, help="runs to disturb (default 100 or a little more)")
    parser.add_argument("--only", default="", help="the faults whose names begin so")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default 0)")
    flags = parser.parse_args()
    names = [name for name, fault in FAULTS.items() if name.startswith(flags.only) for _ in range(fault.runs)]
    random.Random(flags.seed).shuffle(names)
    with harness.scratch() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        made = pool.map(lambda layout: undisturbed(folder / f"in-peace-{layout.replace(' ', '-')}", layout), LAYOUTS)
        references = dict(zip(LAYOUTS, made, strict=True))
        futures = [
            pool.submit(attempted, folder, number, name, references, flags.seed)
            for number, name in enumerate(names[: flags.runs] if flags.runs < len(names) else names)
        ]
        rows = []
        for number, future in enumerate(as_completed(futures), start=1):
            row = future.result()
            rows.append(row)
            verdict = "right" if row["right"] else f"WRONG {row['why']}"
            refused = f" (refused: {'; '.join(row['refusals'])})" if row.get("refusals") else ""
            harness.say(
                f"{number:3} {row.get('what', row['fault']):75.75} {row.get('layout', ''):10} {verdict}{refused}"
            )
    result = {
        "runs": len(rows),
        "wrong": sum(not row["right"] for row in rows),
        "identical": sum(row["right"] and not row["refusals"] for row in rows),
        "refused_and_remedied": sum(row["right"] and bool(row["refusals"]) for row in rows),
        "by_fault": dict(Counter(row["fault"] for row in rows)),
        "seconds_by_fault": {
            name: round(sum(row.get("seconds", 0) for row in rows if row["fault"] == name), 1) for name in FAULTS
        },
        "seed": flags.seed,
        "table": rows,
        "machine": harness.machine("torch"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
