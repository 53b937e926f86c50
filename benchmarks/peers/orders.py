"""What a peer's rank is told, the tokens that it reads, and the clock that it reports: the same for every peer."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """One measurement.

    Attributes:
        package: folder that `supernode` is imported from.
        tokens: `.npy` file of token numbers.
        shape: fields of the decoder's shape.
        batch: samples in one step on one rank.
        steps: more than will be taken; the benchmark ends the ranks.
        answer: folder for the ranks' figures.
    """

    package: str
    tokens: str
    shape: dict[str, Any]
    inner: int
    parameters: int
    sequence: int
    batch: int
    steps: int
    learning_rate: float
    answer: str


def take() -> Orders:
    """Read the orders named by the first argument, and set this rank up as they want it."""
    orders = Orders(**json.loads(Path(sys.argv[1]).read_text()))
    sys.path.append(orders.package)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return orders


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of the token file with their targets, as the product cuts them."""

    def __init__(self, orders: Orders) -> None:
        self.tokens, self.sequence = np.load(orders.tokens, mmap_mode="r"), orders.sequence

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.sequence
        window = torch.from_numpy(self.tokens[start : start + self.sequence + 1].astype(np.int64))
        return window[:-1], window[1:]


class Clock:
    """A line for each step that ended: the time, and the CPU seconds so far of all threads of this rank.

    The benchmark reads along and stops and continues the ranks as it likes, so each line is written at once.
    """

    def __init__(self, orders: Orders, package: str) -> None:
        folder, rank = Path(orders.answer), os.environ["RANK"]
        (folder / f"version-{rank}").write_text(version(package))
        self._marks = (folder / f"marks-{rank}").open("w", buffering=1)

    def step_ended(self) -> None:
        """Note that a step ended."""
        self._marks.write(f"{time.perf_counter()!r} {time.process_time()!r}\n")
