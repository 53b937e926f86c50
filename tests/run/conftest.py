"""What the tests of whole runs share: one fork server, small jobs, and runs that nothing disturbed to compare with."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from supernode.backends.fork_client import ForkServer
from supernode.checkpoint.source import on_disk, tensors_of
from supernode.control import training
from supernode.control.journal import read
from supernode.control.supernode import SuperNode, as_job
from supernode.hardware.discover import discover
from supernode.schema.event import Event, Rejected, StepDone
from supernode.schema.report import Report, RunState
from supernode.storing.saves import name_of, step_of

STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"data": 1},
    "t2": {"tensor": 2, "data": 1},
    "t2p2d2": {"tensor": 2, "pipeline": 2, "data": 2},
    "t2p2d2-fsdp": {"tensor": 2, "pipeline": 2, "data": 2, "sharding": "fsdp"},
}
Watch = Callable[[Event, RunState], None]


class KeptServer(ForkServer):
    """A fork server that outlives the runs that use it, so that torch is imported once for all of them."""

    def close(self) -> None:
        """End every rank, and forget what was still to be said of them."""
        self.connection.settimeout(20)
        self.send({"kind": "kill_all", "token": -1})
        heard = self.pending
        while b'"token": -1' not in heard:
            heard += self.connection.recv(65_536)
        self.pending = b""
        self.connection.settimeout(None)

    def end(self) -> None:
        """End the server itself."""
        super().close()

    @property
    def children(self) -> list[int]:
        """Process numbers of the living ranks, by rank."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]


@dataclass
class Workshop:
    """Where runs are made: a folder, a machine of eight cards, a server."""

    folder: Path
    server: KeptServer
    node: SuperNode
    done: dict[str, Path] = field(default_factory=dict)

    def job(self, layout: str | Mapping[str, Any] = "1", **changes: Any) -> dict[str, Any]:
        """Return a job of a few steps: five layers, four micro-batches, a short batch at the end of each epoch."""
        degrees = LAYOUTS[layout] if isinstance(layout, str) else layout
        return {
            "name": "small",
            "model": {"layers": 5, "width": 32, "heads": 4},
            "data": {"text": str(self.folder / "text.txt"), "sequence": 16},
            "batch": 8,
            "gradient_accumulation": 4,
            "steps": STEPS,
            "threads": 1,
            "parallelism": degrees,
            "optimizer": {"learning_rate": 3e-3, "warmup": 2, "clip": 0.5},
            "checkpoint": {"every": 2, "keep": 2},
            "evaluate": {"batches": 2},
        } | changes

    def run(self, job: Mapping[str, Any], folder: Path, *, watch: Watch | None = None) -> Report:
        """Run a job to its end."""
        return training.start(self.node.pool, as_job(job), folder=folder, watch=watch, server=self.server)

    def resume(self, folder: Path, *, watch: Watch | None = None, cards: int | None = None, **keys: Any) -> Report:
        """Go on with a run."""
        keys = {"overrides": {}} | keys
        return training.resume(self.node.pool, folder, cards=cards, watch=watch, server=self.server, **keys)

    def undisturbed(self, layout: str) -> Path:
        """Return the folder of a run of that layout that met nothing on its way; made when first asked for."""
        if layout not in self.done:
            folder = self.folder / f"undisturbed-{layout}"
            assert self.run(self.job(layout), folder).outcome == "finished"
            self.done[layout] = folder
        return self.done[layout]

    def kill(self, rank: int, *, signal: int) -> None:
        """Send a signal to a rank, as nobody would warn it."""
        os.kill(self.server.children[rank], signal)

    @staticmethod
    def keepers() -> list[int]:
        """Return the process numbers of the keepers of the run under way, by node."""
        own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return [int(pid) for pid in own if b"supernode.keeping.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def kill_nodes(self, *nodes: int) -> None:
        """Kill the keepers of nodes; all ranks are to be killed apart."""
        for node in nodes:
            os.kill(self.keepers()[node], signal.SIGKILL)

    @staticmethod
    def losses(folder: Path) -> dict[int, float]:
        """Return the loss of every step that a run's journal knows; each step's last."""
        return {event.step: event.loss for _, event in read(folder / "journal.db") if isinstance(event, StepDone)}

    @staticmethod
    def steps_taken(folder: Path) -> list[int]:
        """Return the steps in the order in which they were done."""
        return [event.step for _, event in read(folder / "journal.db") if isinstance(event, StepDone)]

    @staticmethod
    def rejections(folder: Path) -> list[str]:
        """Return the checkpoints that were refused on the way."""
        return [event.checkpoint for _, event in read(folder / "journal.db") if isinstance(event, Rejected)]

    @staticmethod
    def tensors(folder: Path, step: int = STEPS) -> dict[str, Tensor]:
        """Return everything that a run's checkpoint of a step holds, whole."""
        return dict(tensors_of(on_disk(folder / "checkpoints" / name_of(step))))

    def assert_same(self, one: Path, other: Path) -> None:
        """Check that two runs went the same way, to the last bit of losses, weights, moments and buffers."""
        assert self.losses(one) == self.losses(other)
        first, second = self.tensors(one), self.tensors(other)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name

    def assert_close(self, one: Path, other: Path, *, tolerance: float = 1e-4) -> None:
        """Check that two runs went the same way within the arithmetic of float32 summed in another order.

        Weights are compared over the size of their tensor: one element near zero may differ by more than itself.
        """
        first, second = self.losses(one), self.losses(other)
        assert first.keys() == second.keys()
        for step, loss in first.items():
            assert second[step] == pytest.approx(loss, rel=tolerance), f"step {step}"
        for name, tensor in self.tensors(one).items():
            if name.startswith("model."):
                gap = (self.tensors(other)[name] - tensor).norm() / tensor.norm()
                assert float(gap) < tolerance, name

    @staticmethod
    def assert_tidy(folder: Path) -> None:
        """Check that nothing but what belongs there is left of a run that has ended."""
        names = {entry.name for entry in folder.iterdir()}
        belongs = {"job.json", "journal.db", "data", "checkpoints", "logs", "report.html", "report.json"}
        assert names <= belongs, names - belongs
        assert all(entry.name == "packs" or step_of(entry.name) >= 0 for entry in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("runs with spaces")
    words, draw = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"], random.Random(0)
    # 46 samples to train on: five batches of eight and a short one of six.
    (folder / "text.txt").write_text(" ".join(draw.choice(words) for _ in range(400))[: 46 * 16 + 20])
    server = KeptServer()
    machine = discover(cards=8, measure=False)
    yield Workshop(folder, server, SuperNode(machine=machine))
    server.end()
