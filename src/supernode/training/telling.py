"""Why did a rank stop? An error in words for the controller: the user's, the memory's, ours, or another rank's end."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch.distributed as dist

from supernode.errors import CheckpointError, SupernodeError
from supernode.parallel.usercode import blame
from supernode.schema.plan import Plan
from supernode.training.channel import Channel
from supernode.units import show_bytes
from supernode.ways.hosts import PEER_GONE

_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|bad_alloc", re.IGNORECASE)


class MemoryLostError(CheckpointError):
    """The state that the nodes should have in memory is not there or not what was kept; the disk has an older one."""


def tell(error: BaseException, plan: Plan, rank: int, folder: Path, channel: Channel) -> int | None:
    """Tell the controller why the rank stopped; returns its exit code, or None where it only lost the others.

    Args:
        folder: of the run.
    """
    if channel.is_told_soon():
        return None  # The others' end came first, whatever the error says.
    if isinstance(error, MemoryLostError):
        channel.send("memory_lost", message=error.message)
        return None
    if isinstance(error, SupernodeError):
        channel.send("failed", error=type(error).__name__, message=error.message, hint=error.hint)
        return error.exit_code
    traceback.print_exception(error)
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].split(' This is typically')[0]}"
    job = plan.job
    theirs = blame(error, (job.module, job.data.dataset, job.data.held_out_dataset, job.data.loss))
    if theirs and not PEER_GONE.search(theirs):
        channel.send("failed", error="ModelError", message=f"your code raised {theirs}", hint="correct that line.")
    elif (short := _no_memory(error)) is not None:
        channel.send("failed", error="CapacityError", **out_of_memory(plan, rank, str(short)))
    elif (lost := _peer_gone(error)) is not None:
        channel.send("peer_lost", message=lost)
        return None
    else:
        channel.send(
            "failed", error="RunError", message=f"rank {rank} stopped: {text}",
            hint=f"see {folder}/logs/rank-{rank}.log for where.",
        )  # fmt: skip
    return 1


def _peer_gone(error: BaseException | None) -> str | None:
    """Return what says that another rank is gone: the error or, the pipeline's runtime wrapping it, a cause of it."""
    while error is not None:
        is_network = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, ConnectionError))
        if is_network or (isinstance(error, RuntimeError) and PEER_GONE.search(str(error))):
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].split(' This is typically')[0]}"
        error = error.__cause__
    return None


def _no_memory(error: BaseException | None) -> BaseException | None:
    """Return what says that memory is at its end: the error or, the pipeline's runtime wrapping it, a cause of it."""
    while error is not None and not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
        error = error.__cause__
    return error


def out_of_memory(plan: Plan, rank: int, text: str) -> dict[str, str]:
    """Return the message and the first remedy that costs least speed."""
    layout = plan.layout
    asked = re.search(r"allocate (\d+) bytes", text)
    more = f", when it asked for {show_bytes(int(asked[1]))} more" if asked else ""
    is_text = not plan.job.data.dataset
    size = f"{plan.micro_batch} × {plan.job.data.sequence // layout.context} tokens" if is_text else (
        f"{plan.micro_batch} samples"
    )  # fmt: skip
    if plan.micro_batch > 1:
        remedy = f"set `gradient_accumulation` to {2 * plan.job.gradient_accumulation}"
    elif layout.recompute != "full":
        remedy = "set `parallelism.recompute` to full"
    elif plan.job.shape is not None:
        remedy = f"set `parallelism.context` to {2 * layout.context}"
    else:
        remedy = "set `parallelism.pipeline` higher"
    return {
        "message": f"rank {rank} has no memory left for a micro-batch of {size}{more}",
        "hint": f"{remedy}, or give ranks more memory (`ulimit -d` says what a process may have).",
    }
