"""What is this computer? Its GPUs, or else its CPU cores, as a machine of cards."""

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
from typing import Any

from supernode.errors import SpecError
from supernode.hardware import load
from supernode.hardware.calibration import Calibration, default_path, read_calibration, this_host
from supernode.hardware.machine import Machine, Tier
from supernode.hardware.parts import Card
from supernode.schema.job import MOST_CARDS

USABLE_MEMORY = 0.9  # the rest is the operating system's and the driver processes'
BFLOAT16_SLOWDOWN = 80  # catalog/cards.yaml, CPU-core: without matrix instructions for it each product is converted
MATMUL_SIZE = 256
TRIES = 40  # short ones: on a busy computer the shortest is the one that nothing interrupted
MESSAGE_SECONDS = 0.2e-3  # half of a 1 KB all-reduce between two idle gloo ranks on loopback, 0.4 ms
COPY_BYTES = 32 * 2**20
SEND_BYTES = 8 * 2**20
CGROUP = Path("/sys/fs/cgroup")


def discover(
    cards: int | None = None, *, cpu_only: bool = False, measure: bool = True, calibration: Path | None = None
) -> Machine:
    """Return this computer as a machine named `local`.

    GPUs that NVML shows are the cards. Without them, or when more cards are asked for than there are GPUs, CPU cores
    are; with more cards than cores, a card is part of a core. What `supernode calibrate` measured on this very computer
    is taken where there is such a file; else FLOP/s and bandwidths are estimates of a moment.

    Args:
        cards: how many; None takes the GPUs, else the cores.
        cpu_only: leave GPUs aside.
        measure: take the calibration, else FLOP/s and bandwidth of CPU cores by measuring for about 0.1 s; if not, all
            is the catalogue's.
        calibration: its file; None for the one that `supernode calibrate` writes by default, if it is there.

    Raises:
        SpecError: `cards` is below 1 or above 1,048,576, or the calibration's file is damaged.
    """
    if cards is not None and (isinstance(cards, bool) or not isinstance(cards, int) or not 1 <= cards <= MOST_CARDS):
        raise SpecError(f"`cards` is {cards!r}", hint=f"choose 1 to {MOST_CARDS:,}, or leave it out.")
    gpus = [] if cpu_only else _gpus()
    if gpus and (cards is None or cards <= len(gpus)):
        count, names = cards or len(gpus), tuple(gpu.name for gpu in gpus)
        machine = _local(gpus[0], count, cores=0, host_memory=_host_memory())
        found, notes = _calibration(calibration, "cuda", usable_cores(), names) if measure else (None, ())
        return replace(_with_gpu_figures(machine, found) if found else machine, notes=notes)
    cores = usable_cores()
    found, notes = _calibration(calibration, "cpu", cores, ()) if measure else (None, ())
    card = _core(cores, cards or cores, measure=measure and found is None)
    if found is not None:
        card = _calibrated_core(card, found, cards or cores, cores)
    machine = _local(card, cards or cores, cores=cores, host_memory=_host_memory())
    return replace(machine, calibration=found, notes=notes)


def _calibration(
    file: Path | None, device: str, cores: int, gpus: tuple[str, ...]
) -> tuple[Calibration | None, tuple[str, ...]]:
    """Return this computer's calibration, if there is one that still holds, and what to tell people of it."""
    path = file or default_path()
    if file is None and not path.exists():
        return None, ("times on this computer are quick estimates; `supernode calibrate` measures what ranks get.",)
    found = read_calibration(path)

    difference = found.host.difference(this_host(cores, gpus))
    if found.device != device:
        difference = f"device {found.device!r}, not {device!r}"
    if difference:
        return None, (f"{path} was measured elsewhere ({difference}), so times are estimates; `supernode calibrate`.",)
    return found, (f"times on this computer rest on the calibration of {found.date} in {path}.",)


def _calibrated_core(card: Card, found: Calibration, cards: int, cores: int) -> Card:
    rates, part = found.compute_for(cards), cores / max(cores, cards)
    curves, _ = found.curves_for(cards)
    sends = [curve for curve in curves if curve.kind == "send"]
    return replace(
        card,
        memory_bandwidth=rates.memory * part,
        flops={"float32": rates.products * part, "bfloat16": rates.products_half * part},
        scale_up_bandwidth=sends[0].nbytes[-1] / sends[0].seconds[-1] if sends else card.scale_up_bandwidth,
        scale_up_latency=sends[0].seconds[0] if sends else card.scale_up_latency,
        efficiency=1.0,
        source=f"measured on this computer by `supernode calibrate`, {found.date}",
    )


def _with_gpu_figures(machine: Machine, found: Calibration) -> Machine:
    """Return a computer of GPUs with the products, copies and exchanges that were measured on them."""
    rates, curves = found.compute_for(machine.card_count), found.curves_for(machine.card_count)[0]
    known = machine.card
    flops = dict(known.flops) | {"float32": rates.products, "bfloat16": rates.products_half}
    card = replace(
        known, flops=flops, efficiency=1.0, memory_bandwidth=rates.copy,
        source=f"measured on this computer by `supernode calibrate`, {found.date}",
    )  # fmt: skip
    sums = [curve for curve in curves if curve.kind == "all_reduce"]
    if not sums:
        return replace(machine, card=card)
    # A ring sends 2 (n - 1) / n of the bytes; Patarasuk and Yuan, JPDC 69, 2009.
    widest = max(sums, key=lambda curve: curve.cards)
    sent = 2 * (widest.cards - 1) / widest.cards * widest.nbytes[-1]
    tier = replace(machine.tiers[0], bandwidth=sent / widest.seconds[-1], latency=widest.seconds[0] / 2)
    return replace(machine, card=card, tiers=(tier,))


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


def gpu_names() -> tuple[str, ...]:
    """Return the names of this computer's GPUs."""
    return tuple(card.name for card in _gpus())


def _gpus() -> list[Card]:
    """Return the GPUs that NVML shows; none without the library, the driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [gpu_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def gpu_card(nvml: Any, index: int) -> Card:
    """Return a GPU: the catalogue's numbers for its model, with the memory and power limit that it reports.

    Args:
        nvml: the module `pynvml`, initialised.
        index: which GPU.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    told = nvml.nvmlDeviceGetName(handle)
    name = told.decode() if isinstance(told, bytes) else str(told)
    known = known_gpu(name)
    try:
        watts = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000  # NVML speaks milliwatts
    except nvml.NVMLError:
        watts = known.power
    return replace(
        known,
        name=name if known.name == "GPU" else known.name,
        memory=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        power=max(watts, known.idle_power),
    )


def known_gpu(name: str) -> Card:
    """Return the catalogue's card for a name that a driver reports; its generic GPU where it knows none.

    >>> known_gpu("NVIDIA H100 80GB HBM3").name, known_gpu("NVIDIA GeForce RTX 3060").name
    ('H100', 'GPU')
    """
    gpus = [card for card in load.cards().values() if card.kind == "gpu" and card.name != "GPU"]
    words = name.replace("-", " ").upper().split()
    return next((card for card in gpus if card.name.split("-")[0].upper() in words), load.card("GPU"))
