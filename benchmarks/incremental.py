"""How many bytes does a save write where little has changed, and how long does a restore take, beside torch's own?

Four trainings run for real, each with its state saved every few steps: of all parameters, of the upper half of the
layers, of low-rank adapters (rank 8) beside frozen weights, and of a large embedding of which a batch touches a few
rows (torch's SparseAdam). A save's bytes are those that reach the disk, its part's table included, against a whole save
of the same state; `torch.distributed.checkpoint.save` always writes it whole.

Then the newest save, which lies over all packs before it, and what torch wrote are loaded in turns, by one process with
one thread each, from the page cache; ours holds every byte against its digest on the way, torch's does not.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import harness
from supernode.checkpoint.boxes import box_of, share_out
from supernode.checkpoint.source import OnDisk, as_bytes, fill
from supernode.schema.manifest import Manifest
from supernode.storing.pack import Before
from supernode.storing.part import stream_bytes
from supernode.storing.saves import Saves
from supernode.storing.spread import Spread, disk_of

WIDTH, LAYERS = 1024, 8
ROWS, COLUMNS = 2**17, 256
RANK = 8
BATCH = 32
TOUCHED = 512
"""Rows that a batch of the sparse kind names, most of them others each time."""
STEPS = 3
"""Between two saves."""


class Adapted(nn.Module):
    """A frozen matrix and a low-rank one beside it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def dense(*, frozen: int = 0, adapted: bool = False) -> nn.Module:
    """Return a stack of layers, the first few of them frozen, or all with adapters beside them."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for number in range(LAYERS):
        layer: nn.Module = nn.Linear(WIDTH, WIDTH)
        if adapted or number < frozen:
            layer.requires_grad_(False)
        layers += [Adapted(layer) if adapted else layer, nn.GELU()]
    return nn.Sequential(*layers)


class Training:
    """A model, its optimizer, and steps on batches that are drawn anew."""

    def __init__(self, model: nn.Module, *, sparse: bool = False) -> None:
        self.model, self.sparse = model, sparse
        moved = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SparseAdam(moved, lr=1e-3) if sparse else torch.optim.AdamW(moved, lr=1e-3)
        )
        self.draw = torch.Generator().manual_seed(2)

    def steps(self, count: int) -> None:
        """Train."""
        for _ in range(count):
            x = (
                torch.randint(ROWS, (TOUCHED,), generator=self.draw)
                if self.sparse
                else torch.randn(BATCH, WIDTH, generator=self.draw)
            )
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        found = {f"model.{name}": tensor.detach() for name, tensor in self.model.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, entries in self.optimizer.state.items():
            for key, value in entries.items():
                found[f"optimizer.{names[parameter]}.{key}"] = (
                    torch.as_tensor(value).detach().clone() if key == "step" else value
                )
        return found


class Saver:
    """Saves of a state on one disk, each on top of the one before."""

    def __init__(self, folder: Path) -> None:
        self.saves = Saves(Spread(disks=(disk_of(folder),)))
        self.before: Before | None = None

    def save(self, step: int, state: dict[str, Tensor]) -> tuple[int, float]:
        """Save; returns bytes written and seconds, from a stream in memory to the acknowledged checkpoint."""
        pieces = share_out([[box_of(name, tensor) for name, tensor in state.items()]])[0]
        stream = memoryview(bytearray(stream_bytes(pieces)))
        for piece in pieces:
            stream[piece.start : piece.start + piece.nbytes] = as_bytes(state[piece.name].contiguous())
        begun = time.perf_counter()
        stored, part = self.saves.store(step, 0, stream, pieces, before=self.before)
        self.saves.commit(
            Manifest(step=step, samples=0, seed=0, model="", data="", layout="1", optimizer="adamw"), [stored]
        )
        seconds = time.perf_counter() - begun
        self.before = Before(part=part, packs=stored.packs)
        self.saves.prune(keep=2, newest=step)
        return stored.nbytes + stored.part[0], seconds


def kind(training: Training, folder: Path, saves: int) -> dict[str, Any]:
    """Train and save; returns bytes and seconds of saves against whole ones."""
    saver = Saver(folder)
    training.steps(1)
    state = training.state()
    total = sum(tensor.nbytes for tensor in state.values())
    first, seconds = saver.save(1, state)
    later = []
    for number in range(2, saves + 2):
        training.steps(STEPS)
        later.append(saver.save(number, training.state()))
    shares = [nbytes / first for nbytes, _ in later]
    ratios = [took / seconds for _, took in later]
    return {
        "state_bytes": total,
        "full_bytes": first,
        "bytes": [nbytes for nbytes, _ in later],
        "bytes_share": statistics.median(shares),
        "full_seconds": seconds,
        "seconds": [took for _, took in later],
        "seconds_share": statistics.median(ratios),
    }


def restores(training: Training, folder: Path, rounds: int) -> dict[str, Any]:
    """Load what a training saved, and what torch saved of the same, in turns."""
    state = training.state()
    saves = Saves(Spread(disks=(disk_of(folder),)))
    newest = saves.all()[-1][1]
    begun = time.perf_counter()
    dcp.save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)
    whole = time.perf_counter() - begun

    def ours(room: dict[str, Tensor]) -> None:
        fill(room, OnDisk(saves, newest))

    def theirs(room: dict[str, Tensor]) -> None:
        dcp.load(dict(room), checkpoint_id=folder / "dcp", no_dist=True)

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    ways: list[tuple[str, Callable[[dict[str, Tensor]], None]]] = [("ours", ours), ("theirs", theirs)]
    for number in range(rounds + 1):
        for name, load in ways if number % 2 else ways[::-1]:
            room = {key: torch.full_like(tensor, 3) for key, tensor in state.items()}
            gc.collect()
            begun = time.perf_counter()
            load(room)
            if number:  # The first fills the page cache.
                times[name].append(time.perf_counter() - begun)
            assert all(torch.equal(room[key], state[key]) for key in state)
    return {
        "dcp_save_seconds": whole,
        "restore_seconds": statistics.median(times["ours"]),
        "dcp_load_seconds": statistics.median(times["theirs"]),
        "over_dcp": statistics.median(a / b for a, b in zip(times["ours"], times["theirs"], strict=True)),
        "packs": len(saves.manifest(newest).packs),
    }


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    trainings: dict[str, Callable[[], Training]] = {
        "full": lambda: Training(dense()),
        "half_frozen": lambda: Training(dense(frozen=LAYERS // 2)),
        "lora": lambda: Training(dense(adapted=True)),
        "sparse_embedding": lambda: Training(nn.Embedding(ROWS, COLUMNS, sparse=True), sparse=True),
    }
    for name, make in trainings.items():
        harness.say(name)
        with harness.scratch() as folder:
            training = make()
            found[name] = kind(training, folder, saves=8 if flags.full else 4)
            found[name]["restore"] = restores(training, folder, rounds=9 if flags.full else 5)
            shutil.rmtree(folder / "dcp")
    result = {
        "restore_over_dcp": max(one["restore"]["over_dcp"] for one in found.values()),
        "lora_bytes_share": found["lora"]["bytes_share"],
        **{f"{name}_bytes_share": one["bytes_share"] for name, one in found.items() if name != "lora"},
        "steps_between_saves": STEPS,
        "kinds": found,
        "machine": harness.machine("torch", "xxhash", "zstandard"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
