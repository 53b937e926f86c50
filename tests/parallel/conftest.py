"""What the tests of training share: a few processes on this computer that talk over gloo."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # The first optimizer step would import it, for seconds.
import torch.distributed as dist

Together = Callable[..., list[Any]]


@pytest.fixture
def together(tmp_path: Path) -> Together:
    """Return a function that runs another on every rank of a group at once and returns what each rank returned."""

    def run(function: Callable[[int], Any], *, ranks: int = 2) -> list[Any]:
        children = []
        # What ranks of an earlier call left in their store would lead these astray.
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=tmp_path))
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _become(rank, ranks, function, folder)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert codes == [0] * ranks, "a rank failed; its words are above"
        results = [(folder / f"result-{rank}").read_bytes() for rank in range(ranks)]
        return [pickle.loads(result) for result in results]  # noqa: S301 - written by the forks above

    return run


def _become(rank: int, ranks: int, function: Callable[[int], Any], folder: Path) -> None:
    """Turn this fork into a rank; never returns."""
    code = 1
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
        (folder / f"result-{rank}").write_bytes(pickle.dumps(function(rank)))
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into pytest
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
