"""What does this computer give a rank? Times products, memory, whole steps and collectives, inside real ranks.

The ranks wait for orders, one JSON object a line, and answer each with seconds; so all of them do the same at once.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from supernode.data.sampler import Sampler
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import meet
from supernode.parallel.tensor import SplitCrossEntropy, cross_entropy
from supernode.schema import plain
from supernode.schema.plan import Plan
from supernode.training.data import Feed, TokenWindows
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Stepper

LEAST = 1e-6
"""Seconds that an exchange takes at least, where others made the computing alone take longer."""
SILENCE = 60.0
"""Seconds that a measured collective may wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank sits while it is measured. `folder`: where the ranks of one order meet."""

    rank: int
    ranks: int
    folder: Path


def serve(connection: socket.socket, *, rank: int, ranks: int, folder: Path) -> int:
    """Carry out orders until the line closes; returns the exit code."""
    torch.set_num_threads(1)
    connection.setblocking(True)
    with connection.makefile("rwb") as line:
        for number, text in enumerate(line):
            order: dict[str, Any] = json.loads(text)
            seat = Seat(rank=rank, ranks=ranks, folder=folder / str(number))
            try:
                answer: dict[str, Any] = {"seconds": ORDERS[order.pop("kind")](seat, **order)}
            except Exception as error:  # noqa: BLE001 - told to whoever measures, who ends every rank
                answer = {"error": f"{type(error).__name__}: {error}"}
            line.write(json.dumps(answer).encode() + b"\n")
            line.flush()
    return 0


def _times(
    act: Callable[[], object], *, repeats: int, at_once: int = 1, device: str = "cpu",
    clock: Callable[[], float] | None = None,
) -> list[float]:  # fmt: skip
    """Return the seconds of each of `repeats` turns, a turn being `at_once` calls; the first call is not counted.

    Args:
        clock: by default the CPU's own for what one process does alone, which is not there while others have the core.
    """
    clock = clock or (time.process_time if device == "cpu" else time.perf_counter)
    act()
    found = []
    for _ in range(repeats):
        _finish(device)
        start = clock()
        for _ in range(at_once):
            act()
        _finish(device)
        found.append((clock() - start) / at_once)
    return found


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _device(name: str, seat: Seat) -> str:
    return name if name == "cpu" else f"{name}:{seat.rank}"


def _product(
    seat: Seat, *, rows: int, depth: int, columns: int, repeats: int, precision: str, device: str
) -> list[float]:
    """Time the product of (rows × depth) and (depth × columns)."""
    place, dtype = _device(device, seat), getattr(torch, precision)
    left, right = (torch.ones(shape, device=place, dtype=dtype) for shape in ((rows, depth), (depth, columns)))
    out = torch.empty(rows, columns, device=place, dtype=dtype)
    at_once = max(1, int(2e7 / (rows * depth * columns))) if device == "cpu" else 10
    return _times(lambda: torch.mm(left, right, out=out), repeats=repeats, at_once=at_once, device=device)


def _copy(seat: Seat, *, nbytes: int, repeats: int, device: str) -> list[float]:
    """Time a copy of `nbytes`, which reads and writes so many."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=_device(device, seat))
    target = torch.zeros_like(source)
    at_once = max(1, int(1e7 / nbytes)) if device == "cpu" else 10
    return _times(lambda: target.copy_(source), repeats=repeats, at_once=at_once, device=device)


def _steps(seat: Seat, *, plan: str, steps: int) -> list[float]:
    """Time whole steps of a plan as the trainer takes them, run by every rank or by every group of ranks for itself.

    A rank alone waits for nobody, so its CPU's own clock tells what a step takes, whatever else runs on the computer.
    """
    made = plain.read(Plan, plan)
    group, place_in_group = divmod(seat.rank, made.layout.ranks)
    clock = time.process_time if made.layout.ranks == 1 else time.perf_counter
    folder = seat.folder / str(group)
    folder.mkdir(parents=True, exist_ok=True)
    place = meet(made.layout, place_in_group, folder=folder, rendezvous="", silence=SILENCE)
    try:
        parts = assemble(made, place)
        feed = _feed(made, place.data)
        optimizer = build_optimizer(made.job.optimizer, [p for _, p in parts.parameters()])
        loss = cross_entropy
        if made.layout.tensor > 1:
            loss = SplitCrossEntropy(place.group("tensor"), made.vocabulary)
        stepper = Stepper(made, place, parts, feed, optimizer, loss)
        found = []
        for step in range(steps + 2):  # The first two allocate, and import what a first update needs.
            start = clock()
            stepper.train(step)
            found.append(clock() - start)
    finally:
        dist.destroy_process_group()
    return found[2:]


def _feed(plan: Plan, data: int) -> Feed:
    """Return tokens drawn by lot: their values do not change the work."""
    job = plan.job
    tokens = np.random.default_rng(0).integers(0, plan.vocabulary, 64 * job.batch * job.data.sequence + 1)
    train = TokenWindows(tokens.astype(np.uint16), job.data.sequence)
    return Feed(
        plan=plan, data=data, train=train, held_out=None, sampler=Sampler(len(train), job.batch, 0, True),
        loss=cross_entropy, count=torch.numel, pads=True,
    )  # fmt: skip


def _exchange(
    seat: Seat, *, collective: str, group: int, sizes: list[int], repeats: int, device: str
) -> list[list[float]]:
    """Time a collective of every `group` neighbours in rank, all groups at once; a send is timed one way.

    Ranks that are left over compute meanwhile, and tell nothing.

    On CPUs the ranks compute between exchanges, as they do in training: caches are then cold, the threads that carry
    messages asleep, and some ranks later than others. What the computing takes alone, all ranks at once, is taken off.

    Args:
        sizes: bytes of the whole buffer: what each holds in an all-reduce, the result of an all-gather.

    Returns:
        For each size, the seconds of each turn.
    """
    seat.folder.mkdir(parents=True, exist_ok=True)
    store = FileStore(str(seat.folder / "store"), seat.ranks)
    if device != "cpu":
        torch.cuda.set_device(seat.rank)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=seat.rank, world_size=seat.ranks)
    try:
        firsts = range(0, seat.ranks - group + 1, group)
        groups = [dist.new_group(list(range(first, first + group))) for first in firsts]
        mine = groups[seat.rank // group] if seat.rank // group < len(groups) else None
        found = []
        for nbytes in sizes:
            whole = torch.ones(max(group, nbytes // 4), device=_device(device, seat))
            part = whole.chunk(group)[0].clone()
            act = COLLECTIVES[collective](whole[: len(part) * group], part, mine) if mine else lambda: None
            between = _between(whole) if device == "cpu" else lambda: None
            at_once = max(3, min(10, 2**22 // nbytes))

            def both(between: Callable[[], object] = between, act: Callable[[], object] = act) -> None:
                between()
                act()

            clock, turns = time.perf_counter, []
            for _ in range(repeats):
                dist.barrier()
                (alone,) = _times(between, repeats=1, at_once=at_once, device=device, clock=clock)
                dist.barrier()
                (together,) = _times(both, repeats=1, at_once=at_once, device=device, clock=clock)
                turns.append(max(together - alone, LEAST))
            turns = [seconds / 2 for seconds in turns] if collective == "send" else turns
            found.append(turns if mine else [])
    finally:
        dist.destroy_process_group()
    return found


def _between(whole: Tensor) -> Callable[[], object]:
    """Return a millisecond or two of computing that makes the buffer anew."""
    left, right = torch.ones(512, 256), torch.ones(256, 704)

    def act() -> None:
        torch.mm(left, right)
        whole.fill_(1.0)

    return act


def _round_trip(whole: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return what sends a buffer to the neighbour and has it back, as pipeline stages send: in batches of one."""
    place, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    peer, order = ranks[place ^ 1], (dist.isend, dist.irecv)

    def act() -> None:
        for move in order if place % 2 == 0 else order[::-1]:
            for work in dist.batch_isend_irecv([dist.P2POp(move, whole, peer, group)]):
                work.wait()

    return act


COLLECTIVES: dict[str, Callable[[Tensor, Tensor, dist.ProcessGroup], Callable[[], object]]] = {
    "all_reduce": lambda whole, _, group: lambda: dist.all_reduce(whole, group=group),
    "all_gather": lambda whole, part, group: lambda: dist.all_gather_single(whole, part, group=group),
    "reduce_scatter": lambda whole, part, group: lambda: dist.reduce_scatter_single(part, whole, group=group),
    "send": lambda whole, _, group: _round_trip(whole, group),
}
ORDERS: dict[str, Callable[..., list[float] | list[list[float]]]] = {
    "product": _product, "copy": _copy, "steps": _steps, "exchange": _exchange,
}  # fmt: skip
