"""S6: what do tensor, pipeline and context axes bring beside copies of the model? The best plan with and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from supernode.claims.claim import Setting, Shown, Sweep
from supernode.claims.plain import DATA_ONLY, Job, beside, best, space_of, swept
from supernode.forecast.rates import card_of
from supernode.hardware.assemble import build_machine
from supernode.hardware.machine import Machine
from supernode.search.best import room_of, words
from supernode.search.why import time_parts
from supernode.workload.presets import public_model

CARDS = 512
SEQUENCE = 8192
PORT = 50.0  # GB/s: 400 Gbit/s, what `InfiniBand-NDR` of the catalogue gives each card
PORTS = (50.0, 25.0, 12.5, 6.25, 3.125)
"""GB/s of a card between nodes: 400 Gbit/s down to 25 Gbit/s."""
ASSUMED = (
    "Llama 3 70B at 8,192 tokens in bfloat16; nodes of 8 H100 on NVLink.",
    "Both sides are the fastest of their space that fits into 90% of a card's memory, with the same time model.",
)


def _machine(setting: Setting, *, cards: int = CARDS, port: float = PORT) -> Machine:
    return beside(build_machine(cards, "Hybrid", card="H100"), network=setting.network * port / PORT)


def _job(batch: int, sequence: int = SEQUENCE) -> Job:
    return Job(model=public_model("llama3-70b"), batch=batch, sequence=sequence)


def _gain(job: Job, machine: Machine, wide: Mapping[str, Any], narrow: Mapping[str, Any]) -> float:
    """Return how many times faster the wider space's best is.

    Raises:
        CapacityError: nothing fits in one of them.
    """
    return best(job, machine, **narrow).time / best(job, machine, **wide).time


def parallel_efficiency(setting: Setting) -> Shown:
    """Return the part of a step on 512 cards that cards compute, and do not wait for each other."""

    def computing(cards: int) -> float:
        job, machine = _job(2 * cards), _machine(setting, cards=cards)
        parts = time_parts(space_of(job, machine), card_of(machine), room_of(machine), best(job, machine))
        return parts["compute"] / sum(parts.values())

    return Shown(
        ours=computing(CARDS),
        baseline="cards that wait for nobody: not for tensors, sequences, pipelines or gradients",
        sweep=swept("cards", (32, 64, 128, 256, 512, 1024), lambda cards: computing(int(cards))),
        assumptions=(
            *ASSUMED,
            "Two samples a card and step. Stricter than work a card and second over that on few cards, "
            "whose plans are slower for want of memory.",
        ),
        by="search over all strategies, and the parts of the best one's time",
    )


def over_data(setting: Setting) -> Shown:
    """Return how much faster the best plan is than the best of pure data parallelism."""
    job = _job(CARDS)
    plain = best(job, _machine(setting), **DATA_ONLY)
    return Shown(
        ours=_gain(job, _machine(setting), {}, DATA_ONLY) - 1,
        baseline=f"the best of pure data parallelism: {words(plain)}",
        sweep=_over_ports(setting, job, {}, DATA_ONLY, less=1.0),
        assumptions=(*ASSUMED, f"{CARDS} cards, a sample for each and step."),
        by="search over all strategies, and over those with copies alone",
    )


def over_two_axes(setting: Setting) -> Shown:
    """Return how much faster all axes together are than the best that keeps to tensor and data."""
    job = _job(CARDS // 4)
    narrow = {"most_context": 1, "most_pipeline": 1, "most_tensor": 8}
    plain = best(job, _machine(setting), **narrow)
    return Shown(
        ours=_gain(job, _machine(setting), {}, narrow),
        baseline=f"tensor (in the node) × data alone: {words(plain)}",
        sweep=_over_ports(setting, job, {}, narrow),
        assumptions=(*ASSUMED, f"{CARDS} cards, a sample for four of them: what a small batch leaves to copies."),
        by="search over all strategies, and over tensor × data",
    )


def pipelining(setting: Setting) -> Shown:
    """Return what pipelines bring to long sequences where sequences are not cut."""
    wide, narrow = {"most_context": 1}, {"most_context": 1, "most_pipeline": 1}
    job = _job(CARDS // 8, 65_536)
    plain = best(job, _machine(setting), **narrow)
    return Shown(
        ours=_gain(job, _machine(setting), wide, narrow),
        baseline=f"the best without a pipeline: {words(plain)}",
        sweep=_over_ports(setting, job, wide, narrow),
        assumptions=(*ASSUMED, f"{CARDS} cards, {job.batch} samples of 65,536 tokens a step, no context axis."),
        by="search with and without the pipeline axis",
    )


def _over_ports(
    setting: Setting, job: Job, wide: Mapping[str, Any], narrow: Mapping[str, Any], *, less: float = 0.0,
    ports: Sequence[float] = PORTS,
) -> Sweep:  # fmt: skip
    return swept(
        "GB/s of each card between nodes",
        ports,
        lambda port: _gain(job, _machine(setting, port=port), wide, narrow) - less,
    )
