"""Which numbers follow from what was measured? The forecast's rates, curves of exchanges, and what axes cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from supernode.calibrating.fit import Measured, curves_of, fit_axis, fit_compute
from supernode.calibrating.programme import AXIS_STEPS, plan_of
from supernode.forecast.efficiency import CardModel
from supernode.forecast.rates import card_of
from supernode.forecast.times import step_parts
from supernode.hardware.calibration import VERSION, AxisCost, Calibration, Compute, Sample, this_host
from supernode.hardware.discover import discover, usable_cores
from supernode.hardware.gpus import gpu_names
from supernode.hardware.machine import Machine
from supernode.planning.cost import software_of
from supernode.planning.memory import strategy_of
from supernode.workload.shape import decoder_shape


def evaluate(samples: Sequence[Sample]) -> Calibration:
    """Return the calibration that follows from samples.

    Raises:
        MachineError: they make no sense together.
    """
    device = "cuda" if any(sample.what.get("device") == "cuda" for sample in samples) else "cpu"
    compute = _gpu_compute(samples) if device == "cuda" else _cpu_compute(samples)
    found = Calibration(
        version=VERSION, date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        host=this_host(usable_cores(), gpu_names() if device == "cuda" else ()), device=device,
        compute=tuple(compute), curves=curves_of(samples), axes=(), samples=tuple(samples),
    )  # fmt: skip
    return replace(found, axes=tuple(_axis_costs(found))) if device == "cpu" else found


def _cpu_compute(samples: Sequence[Sample]) -> Iterator[Compute]:
    machine = discover(1, measure=False)
    alone = [sample for sample in samples if sample.kind == "steps" and not sample.what["axis"]]
    for count in sorted({sample.ranks for sample in alone}):
        steps = [_measured(sample, machine) for sample in alone if sample.ranks == count]
        yield fit_compute(count, steps, samples)


def _measured(sample: Sample, machine: Machine) -> Measured:
    plan = plan_of(sample.what)
    shape = plan.job.shape
    assert shape is not None
    given = decoder_shape(shape), strategy_of(plan), software_of(plan, machine)
    return Measured(
        seconds=sample.seconds, predict=lambda card: float(step_parts(given[0], given[1], card, given[2]).total)
    )


def _axis_costs(found: Calibration) -> Iterator[AxisCost]:
    for ranks in sorted({sample.ranks for sample in found.samples if sample.what.get("axis")}):
        machine = replace(discover(ranks, measure=False), calibration=found)
        card = card_of(machine, ranks)
        for axis in AXIS_STEPS:
            mine = [s for s in found.samples if s.ranks == ranks and s.what.get("axis") == axis]
            over = [sample.seconds - _measured(sample, machine).predict(card) for sample in mine]
            per_rank = 2 if axis == "pipeline" else 1
            counts = [
                (float(s.what["layers"]) / per_rank, float(s.what["micro_batches"]), _busy(s, machine, card))
                for s in mine
            ]
            # A step of which others took a tenth of the cores says a third as much as one that they left alone.
            trust = [1 / sample.seconds / (1 + 20 * sample.others) for sample in mine]
            yield fit_axis(axis, ranks, counts, over, trust)


def _busy(sample: Sample, machine: Machine, card: CardModel) -> float:
    """Return the seconds that a rank computes in a measured step."""
    plan = plan_of(sample.what)
    shape = plan.job.shape
    assert shape is not None
    return float(step_parts(decoder_shape(shape), strategy_of(plan), card, software_of(plan, machine)).compute)


def _gpu_compute(samples: Sequence[Sample]) -> Iterator[Compute]:
    """Return what GPUs deliver: the best product of each precision, and the best copy."""
    for count in sorted({sample.ranks for sample in samples if sample.kind == "product"}):
        mine = [sample for sample in samples if sample.ranks == count]
        copy = max(2 * float(s.what["nbytes"]) / s.seconds for s in mine if s.kind == "copy")
        rates = {
            precision: max(
                2 * float(s.what["rows"]) * float(s.what["depth"]) * float(s.what["columns"]) / s.seconds
                for s in mine
                if s.kind == "product" and s.what["precision"] == precision
            )
            for precision in ("float32", "bfloat16")
        }
        yield Compute(
            processes=count, products=rates["float32"], products_half=rates["bfloat16"], operands=copy,
            scores=rates["bfloat16"], memory=copy, operation=0.0, step=0.0, copy=copy,
        )  # fmt: skip
