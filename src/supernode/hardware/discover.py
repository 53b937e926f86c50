"""What is this computer? Its CPU cores, or by choice its GPUs, as a machine of cards."""

from __future__ import annotations

import math
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from supernode.errors import SpecError
from supernode.hardware import load
from supernode.hardware.calibration import Calibration, Host, default_path, read_calibration, this_host
from supernode.hardware.gpus import gpus, with_gpu_figures
from supernode.hardware.machine import Machine, Tier
from supernode.hardware.parts import Card
from supernode.schema.spread import MOST_CARDS

USABLE_MEMORY = 0.9  # the rest is the operating system's and the driver processes'
BFLOAT16_SLOWDOWN = 80  # catalog/cards.yaml, CPU-core: without matrix instructions for it each product is converted
MATMUL_SIZE = 256
TRIES = 40  # short ones: on a busy computer the shortest is the one that nothing interrupted
MESSAGE_SECONDS = 0.2e-3  # half of a 1 KB all-reduce between two idle gloo ranks on loopback, 0.4 ms
COPY_BYTES = 32 * 2**20
SEND_BYTES = 8 * 2**20
CGROUP = Path("/sys/fs/cgroup")
CALIBRATE = {"cpu": "supernode calibrate", "cuda": "supernode calibrate --device cuda"}
DEVICES = tuple(CALIBRATE)


def discover(
    cards: int | None = None, *, device: str = "cpu", measure: bool = True, calibration: Path | None = None
) -> Machine:
    """Return this computer as a machine named `local`.

    Its cards are CPU cores, which training runs on; with more cards than cores, a card is part of a core. What
    `supernode calibrate` measured on this very computer and kind of device is taken where there is such a file; else
    FLOP/s and bandwidths are estimates of a moment.

    Args:
        cards: how many; None takes all cores, or all GPUs.
        device: `cpu`, or `cuda` for the GPUs that NVML shows.
        measure: take the calibration, else FLOP/s and bandwidth of CPU cores by measuring for about 0.1 s; if not, all
            is the catalogue's.
        calibration: its file; None for the one that `supernode calibrate` writes by default, if it is there.

    Raises:
        SpecError: `cards` is below 1 or more than there may be, an unknown device, no such GPUs, or the calibration's
            file is damaged.
    """
    if cards is not None and (isinstance(cards, bool) or not isinstance(cards, int) or not 1 <= cards <= MOST_CARDS):
        raise SpecError(f"`cards` is {cards!r}", hint=f"choose 1 to {MOST_CARDS:,}, or leave it out.")
    if device not in DEVICES:
        raise SpecError(f"`device` is {device!r}", hint=f"choose {' or '.join(DEVICES)}.")
    return _of_gpus(cards, measure, calibration) if device == "cuda" else _of_cores(cards, measure, calibration)


def _of_cores(cards: int | None, measure: bool, calibration: Path | None) -> Machine:
    cores = usable_cores()
    count = cards or cores
    found, notes = _calibration(calibration, "cpu", this_host(cores)) if measure else (None, ())
    card = _core(cores, count, measure=measure and found is None)
    if found is not None:
        card = _calibrated_core(card, found, count, cores)
    machine = _local(card, count, cores=cores, host_memory=_host_memory())
    return replace(machine, calibration=found, notes=notes)


def _of_gpus(cards: int | None, measure: bool, calibration: Path | None) -> Machine:
    known = gpus()
    count = cards or len(known)
    if not 1 <= count <= len(known):
        raise SpecError(
            f"{count or 'no'} GPUs are wanted, and NVML shows {len(known)}",
            hint=f"choose `cards` up to {len(known)}." if known else "leave out `device`, or install `nvidia-ml-py`.",
        )
    machine, host = (
        _local(known[0], count, cores=0, host_memory=_host_memory()),
        this_host(usable_cores(), tuple(gpu.name for gpu in known)),
    )
    found, notes = _calibration(calibration, "cuda", host) if measure else (None, ())
    return replace(with_gpu_figures(machine, found) if found else machine, notes=notes)


def _calibration(file: Path | None, device: str, host: Host) -> tuple[Calibration | None, tuple[str, ...]]:
    """Return this computer's calibration, if there is one that still holds, and what to tell people of it."""
    path, command = file or default_path(device), CALIBRATE[device]
    if file is None and not path.exists():
        return None, (f"times on this computer are quick estimates; `{command}` measures what ranks get.",)
    found = read_calibration(path)
    difference = found.host.difference(host)
    if found.device != device:
        difference = f"device {found.device!r}, not {device!r}"
    if difference:
        return None, (f"{path} was measured elsewhere ({difference}), so times are estimates; `{command}`.",)
    return found, (f"times on this computer rest on the calibration of {found.date} in {path}.",)


def _calibrated_core(card: Card, found: Calibration, cards: int, cores: int) -> Card:
    rates, part = found.compute_for(cards), cores / max(cores, cards)
    sends = [curve for curve in found.curves_for(cards) if curve.kind == "send"]
    return replace(
        card,
        memory_bandwidth=rates.memory * part,
        flops={"float32": rates.products * part, "bfloat16": rates.products_half * part},
        scale_up_bandwidth=sends[0].nbytes[-1] / sends[0].seconds[-1] if sends else card.scale_up_bandwidth,
        scale_up_latency=sends[0].seconds[0] if sends else card.scale_up_latency,
        efficiency=1.0,
        source=f"measured on this computer by `supernode calibrate`, {found.date}",
    )


def usable_cores() -> int:
    """Return the CPU cores that this process may use: its affinity, cut to the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, *(cpu_quota(group) for group in _groups()))))


def cpu_quota(group: Path) -> float:
    """Return how many cores a control group may use (version 2, then 1); infinity without a limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (group / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    return math.inf if quota in ("max", "-1") else max(1.0, int(quota) / int(period))


def memory_limit(group: Path) -> float:
    """Return the bytes that a control group may use (version 2, then 1); infinity without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (group / name).read_text().strip()
        except OSError:
            continue
        return math.inf if text == "max" else float(text)
    return math.inf


def _host_memory() -> int:
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        physical = load.card("CPU-core").memory * usable_cores()
    return int(min(physical, *(memory_limit(group) for group in _groups())))


def _groups() -> list[Path]:
    """Return the folders of this process's control group and of those around it."""
    try:
        told = Path("/proc/self/cgroup").read_text()
    except OSError:
        return [CGROUP]
    own = next((line.removeprefix("0::").lstrip("/") for line in told.splitlines() if line.startswith("0::")), "")
    folder = CGROUP / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(CGROUP))]


def _local(card: Card, cards: int, *, cores: int, host_memory: int) -> Machine:
    # Ranks that share a core also wait for their turn on it.
    latency = MESSAGE_SECONDS * max(1.0, cards / cores) if cores else card.scale_up_latency
    tier = Tier(name="host", cards=cards, bandwidth=card.scale_up_bandwidth, latency=latency)
    return Machine(
        name="local",
        card=card,
        card_count=cards,
        node_cards=cards,
        topology="switched",
        tiers=(tier,),
        cooling=load.cooling("air"),
        supply=load.supply("PSU-3300"),
        supplies=1,
        host_memory=host_memory,
        cores=cores,
    )


def _core(cores: int, cards: int, *, measure: bool) -> Card:
    """Return one of `cards` cards that share the cores."""
    known = load.card("CPU-core")
    part = cores / max(cores, cards)
    flops, copied, sent = known.flops["float32"], known.memory_bandwidth, known.scale_up_bandwidth
    source = known.source
    if measure:
        flops, copied, sent = _matmul_flops(), _copy_bandwidth(), _loopback_bandwidth()
        source = "measured on this computer: numpy matrix product and copy on one thread, loopback between two"
    return replace(
        known,
        vendor=platform.machine() or known.vendor,
        memory=max(1, int(_host_memory() / cards * USABLE_MEMORY)),
        memory_bandwidth=copied * part,
        flops={"float32": flops * part, "bfloat16": flops * part / BFLOAT16_SLOWDOWN},
        scale_up_bandwidth=sent * part,
        power=known.power * part,
        idle_power=known.idle_power * part,
        price=None,
        efficiency=1.0 if measure else known.efficiency,
        source=source,
        estimates=("flops", "power", "idle_power"),
    )


def _best_seconds(act: Callable[[], object], *, tries: int) -> float:
    """Return the shortest time; the others were disturbed."""
    best = math.inf
    for _ in range(tries):
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)


def _matmul_flops() -> float:
    """Return the FLOP/s of one core in a float32 product."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    left = np.ones((MATMUL_SIZE, MATMUL_SIZE), dtype=np.float32)
    right, out = left.copy(), np.empty_like(left)
    with threadpool_limits(1):
        return 2 * MATMUL_SIZE**3 / _best_seconds(lambda: np.matmul(left, right, out=out), tries=TRIES)


def _copy_bandwidth() -> float:
    """Return bytes/s of a copy, read and written bytes counted."""
    import numpy as np

    source = np.ones(COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    return 2 * COPY_BYTES / _best_seconds(lambda: np.copyto(target, source), tries=8)


def _loopback_bandwidth() -> float:
    """Return bytes/s from one thread to another through a socket pair."""
    here, there = socket.socketpair()
    with here, there:
        data, got = bytes(SEND_BYTES), bytearray(2**20)

        def receive() -> None:
            left = SEND_BYTES
            while left:
                left -= there.recv_into(got)

        reader = threading.Thread(target=receive, daemon=True)
        start = time.perf_counter()
        reader.start()
        here.sendall(data)
        reader.join()
        return SEND_BYTES / max(time.perf_counter() - start, 1e-9)
