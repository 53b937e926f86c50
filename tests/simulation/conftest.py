"""A computer of CPU cores whose calibration is made up: as many ranks as one likes share so many cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from supernode.hardware.calibration import AXES, VERSION, AxisCost, Calibration, Compute, Curve, this_host
from supernode.hardware.discover import discover
from supernode.hardware.machine import Machine

SIZES = (4.0, 2.0**10, 2.0**14, 2.0**17, 2.0**19, 2.0**21, 2.0**24)


def calibrated(cards: int, *, cores: int) -> Machine:
    """Return `cards` ranks on `cores` cores; exchanges take 0.2 ms and 1 GB/s, longer as ranks take turns."""
    one = Compute(
        processes=1, products=7e10, products_half=1e9, operands=1e10, scores=2e10, memory=5e9, operation=5e-6,
        step=1e-3, copy=1e10,
    )  # fmt: skip
    curves = [
        Curve(
            kind=kind, ranks=ranks, cards=group, nbytes=SIZES,
            seconds=tuple(max(1.0, ranks / cores) * (2e-4 + nbytes / 1e9) for nbytes in SIZES),
        )
        for ranks in (2, 4, 8)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
        for group in (2, 4, 8)
        if group <= ranks and (kind != "send" or group == 2)
    ]  # fmt: skip
    costs = (AxisCost(axis=axis, ranks=2, step=5e-3, layer=1e-3, micro_batch=1e-3, block=5e-4) for axis in AXES)
    found = Calibration(
        version=VERSION, date="2026-01-31", host=this_host(cores), device="cpu", compute=(one,), curves=tuple(curves),
        axes=tuple(costs),
    )  # fmt: skip
    return replace(discover(cards, measure=False), calibration=found, cores=cores)


@pytest.fixture
def computer() -> Callable[..., Machine]:
    """A computer of `computer(cards, cores=…)`."""
    return calibrated
