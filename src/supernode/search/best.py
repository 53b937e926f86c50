"""Which few plans would one want for a model on a machine? Searches all strategies and says why each wins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from supernode.errors import SpecError
from supernode.forecast.rates import card_of, is_calibrated
from supernode.hardware.machine import Machine
from supernode.hardware.power import power
from supernode.planning.work import with_vocabulary
from supernode.schema.job import JobSpec
from supernode.search.offload import ACTIVATIONS, OPTIMIZER, WEIGHTS, Room
from supernode.search.search import Bill, Choice, Found, search
from supernode.search.space import Space
from supernode.search.why import Why, why
from supernode.units import show_bytes, show_seconds
from supernode.workload.shape import ModelShape, decoder_shape
from supernode.workload.strategy import (
    FULL,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SELECTIVE,
    ZERO_BUBBLE,
    Software,
)

# Of a card's memory, for tensors; the rest is the driver's, the communication library's, and lost to fragments.
USABLE = 0.9
FRONT_ROWS = 12
YEAR = 365 * 86_400.0
# What hyperscalers write servers off over (Alphabet's and Microsoft's annual reports of 2023: six years).
LIFE = 6 * YEAR
# USD per joule: 0.08 USD/kWh, what industry paid in the United States in 2023 (EIA, Electric Power Monthly, table 5.3).
TARIFF = 0.08 / 3.6e6

SCHEDULES = {GPIPE: "GPipe", ONE_F_ONE_B: "1F1B", INTERLEAVED: "interleaved", ZERO_BUBBLE: "zero-bubble"}
RECOMPUTES = {SELECTIVE: "selective recompute", FULL: "full recompute"}
OFFLOADS = {OPTIMIZER: "optimizer", WEIGHTS: "weights", ACTIVATIONS: "activations"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The best few, why, and what else no plan beats.

    Attributes:
        reasons: of each of `found.best`.
        notes: what the reader should know of the machine's description.
    """

    space: Space
    found: Found
    reasons: tuple[Why, ...]
    notes: tuple[str, ...]


def best_plans(
    model: JobSpec | ModelShape, machine: Machine, batch: int = 0, *, sequence: int = 0, top: int = 5,
    objective: str = "time", cards: tuple[int, ...] = (), software: Software | None = None, precision: int = 1,
) -> Plans:  # fmt: skip
    """Return the best few plans, each of other degrees, and the Pareto front.

    Args:
        batch: samples of one step; 0 for the job's.
        sequence: tokens of a sample; 0 for the job's.
        objective: time, memory, energy or cost.
        cards: card counts to consider; empty for all of the machine's.

    Raises:
        SpecError: a shape comes without batch or sequence, or the job's model is the user's own.
        CapacityError: nothing fits.
    """
    shape, batch, sequence = _asked(model, batch, sequence)
    card = card_of(machine)
    space = Space(
        model=shape, cards=cards or (machine.card_count,), batch=batch, sequence=sequence, precision=precision,
        software=software or Software(),
    )  # fmt: skip
    room, bill = room_of(machine), bill_of(machine)
    found = search(space, card, room, bill, objective=objective, top=top)
    reasons = tuple(why(space, card, room, bill, choice) for choice in found.best)
    return Plans(space=space, found=found, reasons=reasons, notes=_notes(machine))


def _notes(machine: Machine) -> tuple[str, ...]:
    if is_calibrated(machine.card):
        return ()
    return (f"no published training run stands behind times on {machine.card.name}; calibrate.",)


def _asked(model: JobSpec | ModelShape, batch: int, sequence: int) -> tuple[ModelShape, int, int]:
    if isinstance(model, ModelShape):
        if not batch or not sequence:
            raise SpecError(
                f"a model's shape with batch {batch} and sequence {sequence}", hint="give `batch` and `sequence`."
            )
        return model, batch, sequence
    shape = with_vocabulary(model, 0)
    if shape is None:
        raise SpecError(
            f"the model of {model.name} is your own, and its layers are unknown",
            hint="give its shape under `model:`, or its `ModelShape`.",
        )
    return decoder_shape(shape), batch or model.batch, sequence or model.data.sequence


def room_of(machine: Machine) -> Room:
    """Return what tensors can have of a card and of its host."""
    host = 0.0 if machine.card.kind == "cpu" else machine.host_memory / machine.card_count * USABLE
    return Room(memory=machine.card.memory * USABLE, host_memory=host)


def bill_of(machine: Machine) -> Bill:
    """Return what a card costs with its share of all else; hardware without a price costs nothing."""
    count = machine.card_count
    parts = [(machine.card.price, count), (machine.node.price if machine.node else None, machine.hosts)]
    parts += [(switch.price, many) for switch, many in machine.switches]
    parts += [(cable.price, many) for cable, many in machine.cables]
    price = sum((each or 0.0) * many for each, many in parts) / count
    return Bill(
        idle=power(machine, load=0.0).total / count, full=power(machine, load=1.0).total / count,
        price=price / LIFE, tariff=TARIFF,
    )  # fmt: skip


def rows(plans: Plans) -> Iterator[tuple[str, str]]:
    """Yield the plans as rows for people: which, and what of it; of the front, a dozen from fastest to slowest."""
    for choice, reason in zip(plans.found.best, plans.reasons, strict=True):
        best = sorted(reason.saved.items(), key=lambda item: -item[1])[:2]
        hopes = ", ".join(f"10% more {name} saves {saved:.1%}" for name, saved in best if saved > 0.0005)
        waits = reason.parts[reason.largest_wait] / sum(reason.parts.values())
        yield words(choice), f"{figures(choice)}; waits most for {reason.largest_wait} ({waits:.0%}); {hopes}"
    front = plans.found.front
    step = max(1, -(-len(front) // FRONT_ROWS))
    for choice in front[::step]:
        yield f"front: {words(choice)}", figures(choice)
    for note in plans.notes:
        yield "note", note


def words(choice: Choice) -> str:
    """Return a choice's strategy in words."""
    axes = {name: int(value) for name, value in choice.axes.items()}
    said = [f"{name} {axes[name]}" for name in ("tensor", "context", "expert", "pipeline", "data") if axes[name] > 1]
    said.append(f"micro-batch {axes['micro_batch']}")
    if axes["pipeline"] > 1:
        said.append(SCHEDULES[axes["schedule"]] + (f" × {axes['interleave']}" if axes["interleave"] > 1 else ""))
    said += ["sequence parallel"] * axes["sequence_parallel"]
    said += [f"ZeRO {axes['sharding']}"] if axes["sharding"] else []
    said += [RECOMPUTES[axes["recompute"]]] if axes["recompute"] else []
    away = [name for bit, name in OFFLOADS.items() if axes["offload"] & bit]
    return ", ".join(said + ([f"{' and '.join(away)} on the host"] if away else []))


def figures(choice: Choice) -> str:
    """Return what a choice comes to, in words."""
    return (
        f"{show_seconds(choice.time)} a step, {show_bytes(int(choice.memory))} a card, "
        f"{choice.energy / 3.6e6:.3g} kWh, {choice.cost:.3g} USD"
    )
