"""Which GPUs does this computer have, and what do they deliver? What NVML tells, and what was measured on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supernode.hardware import load
from supernode.hardware.calibration import Calibration
from supernode.hardware.machine import Machine
from supernode.hardware.parts import Card


def gpu_names() -> tuple[str, ...]:
    """Return the names of this computer's GPUs."""
    return tuple(card.name for card in gpus())


def gpus() -> list[Card]:
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
    known = [card for card in load.cards().values() if card.kind == "gpu" and card.name != "GPU"]
    words = name.replace("-", " ").upper().split()
    return next((card for card in known if card.name.split("-")[0].upper() in words), load.card("GPU"))


def with_gpu_figures(machine: Machine, found: Calibration) -> Machine:
    """Return a computer of GPUs with the products, copies and exchanges that were measured on them."""
    rates, curves = found.compute_for(machine.card_count), found.curves_for(machine.card_count)
    known = machine.card
    flops = dict(known.flops) | {"float32": rates.products, "bfloat16": rates.products_half}
    card = replace(
        known, flops=flops, efficiency=1.0, memory_bandwidth=rates.copy,
        source=f"measured on this computer by `supernode calibrate --device cuda`, {found.date}",
    )  # fmt: skip
    sums = [curve for curve in curves if curve.kind == "all_reduce"]
    if not sums:
        return replace(machine, card=card)
    # A ring sends 2 (n - 1) / n of the bytes; Patarasuk and Yuan, JPDC 69, 2009.
    widest = max(sums, key=lambda curve: curve.cards)
    sent = 2 * (widest.cards - 1) / widest.cards * widest.nbytes[-1]
    tier = replace(machine.tiers[0], bandwidth=sent / widest.seconds[-1], latency=widest.seconds[0] / 2)
    return replace(machine, card=card, tiers=(tier,))
