"""A computer of two cores whose collectives were measured, as values; nothing is measured here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supernode.hardware.assemble import build_machine
from supernode.hardware.calibration import VERSION, AxisCost, Calibration, Compute, Curve, Host
from supernode.hardware.machine import Machine

SIZES = (4.0, 1e3, 1e5, 1e7)


def _curve(kind: str, ranks: int, cards: int) -> Curve:
    """Return a millisecond of latency and a nanosecond a byte."""
    return Curve(kind=kind, ranks=ranks, cards=cards, nbytes=SIZES, seconds=tuple(1e-3 + n * 1e-9 for n in SIZES))


@pytest.fixture
def calibrated() -> Machine:
    """Return five cards on two cores."""
    alone = Compute(
        processes=1, products=7e10, products_half=1e9, operands=1e10, scores=2e10, memory=5e9, operation=5e-6,
        step=1e-3, copy=1e10,
    )  # fmt: skip
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "send")
    found = Calibration(
        version=VERSION, date="2026-01-31", host=Host(cpu="any", cores=2, torch="2.13.0", gpus=()), device="cpu",
        compute=(alone, replace(alone, processes=2, products=6e10)),
        curves=tuple(
            _curve(kind, ranks, cards) for kind in kinds for ranks in (2, 4) for cards in (2, 4)
            if cards <= ranks and (kind != "send" or cards == 2)
        ),
        axes=tuple(
            AxisCost(axis=axis, ranks=ranks, step=5e-3, layer=1e-3, micro_batch=1e-3, block=5e-4)
            for axis in ("tensor", "pipeline", "replicas", "fsdp") for ranks in (2, 4)
        ), samples=(),
    )  # fmt: skip
    machine = build_machine(5, "Full_Mesh", card="CPU-core")
    return replace(machine, name="local", cores=2, calibration=found, card=replace(machine.card, price=None))
