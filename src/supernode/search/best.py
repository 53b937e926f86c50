"""Which few plans would one want for a model on a machine? Searches all strategies and says why each wins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from supernode.errors import CapacityError, SpecError
from supernode.forecast.efficiency import CardModel, precision_index
from supernode.forecast.rates import card_of, is_calibrated
from supernode.forecast.trust import strays
from supernode.hardware.machine import Machine
from supernode.hardware.power import power
from supernode.planning.memory import USABLE
from supernode.planning.planner import token_kinds
from supernode.planning.work import with_vocabulary
from supernode.schema.job import JobSpec
from supernode.search.offload import ACTIVATIONS, OPTIMIZER, WEIGHTS, Room
from supernode.search.runnable import is_runnable, obstacles, runnable_space
from supernode.search.search import Bill, Choice, Found, search
from supernode.search.space import Space, divisors, row_table
from supernode.search.why import Why, why
from supernode.units import count_of, show_bytes, show_energy, show_number, show_seconds
from supernode.workload.shape import ModelShape, decoder_shape
from supernode.workload.strategy import (
    FLOAT32,
    FULL,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    PRECISIONS,
    SELECTIVE,
    ZERO_BUBBLE,
    Software,
)

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
        obstacles: likewise, what our trainer cannot do of it; nothing where it can run it.
        objective: what was to be least.
        card: as the time model sees it with so many at work as `found` takes.
        room: that tensors have on it.
        outside: where the best lies outside of what the card's numbers were fitted on, in words; empty where nowhere.
        notes: what the reader should know of the machine's description.
    """

    space: Space
    machine: Machine
    card: CardModel
    room: Room
    found: Found
    reasons: tuple[Why, ...]
    obstacles: tuple[tuple[str, ...], ...]
    objective: str
    outside: str
    notes: tuple[str, ...]

    @property
    def best(self) -> Choice:
        """The best of all."""
        return self.found.best[0]

    @property
    def is_ours(self) -> bool:
        """Whether times are those of our own trainer, and not of what current programs do."""
        return self.space.does is not None


def best_plans(
    model: JobSpec | ModelShape, machine: Machine, batch: int = 0, *, sequence: int = 0, top: int = 5,
    objective: str = "time", cards: int | None = None, software: Software | None = None, precision: int = 1,
    runnable: bool = False, price: float | None = None,
) -> Plans:  # fmt: skip
    """Return the best few plans, each of other degrees, and the Pareto front.

    Args:
        batch: samples of one step; 0 for the job's.
        sequence: tokens of a sample; 0 for the job's.
        objective: time, memory, energy or cost.
        cards: how many of the machine's; None for all, or the most of them that the batch divides by.
        software: what the training program does; by default what current ones do, or ours where `runnable`.
        precision: index into `PRECISIONS`; a job has its own.
        runnable: only what our own trainer can run. On CPU cores, where no other trainer's times are known, that is so
            by default wherever it can train the model.
        price: USD per card and second for everything; None for the machine's own price and its electricity.

    Raises:
        SpecError: a shape comes without batch or sequence, the job's model is the user's own, nothing can be spread
            over so many cards, or cost is to be least and the hardware has no price.
        CapacityError: nothing fits, or the card does not compute in so low a precision.
    """
    if isinstance(model, JobSpec):
        precision = precision_index(model.precision)
    shape, batch, sequence = _asked(model, batch, sequence)
    if top < 1:
        raise SpecError(f"`top` is {top}", hint="ask for 1 plan or more.")
    count, is_core = machine.card_count if cards is None else cards, machine.card.kind == "cpu"
    if not 1 <= count <= machine.card_count:
        raise SpecError(
            f"{count_of(count, 'card')} of a machine of {machine.card_count}", hint=f"choose 1 to {machine.card_count}."
        )
    space = Space(
        model=shape, cards=(count,), batch=batch, sequence=sequence, precision=precision,
        software=software or Software(),
    )  # fmt: skip
    if runnable or (is_core and software is None and is_runnable(space)):
        space = runnable_space(space, model if isinstance(model, JobSpec) else None, is_core=is_core)
    space = space if cards is not None and row_table(space)["cards"].size else _with_work_for_all(space)
    room, bill, is_priced = room_of(machine), bill_of(machine, price), price is not None or has_price(machine)
    if objective == "cost" and not is_priced:
        raise SpecError(
            f"{machine.card.name} has no price, so that no plan costs least",
            hint="give `--price` (USD for a card and hour), or `--objective` time, memory or energy.",
        )
    space = space if room.host_memory else replace(space, offloads=(0,))
    card = card_of(machine, max(space.cards))
    _check_precision(machine, card, PRECISIONS[precision])
    found = search(space, card, room, bill, objective=objective, top=top)
    found = found if is_priced else _without_cost(found)
    outside = outside_of(card, space, found.best[0])
    return Plans(
        space=space, machine=machine, card=card, room=room, found=found, objective=objective,
        reasons=tuple(why(space, card, room, bill, choice) for choice in found.best),
        obstacles=tuple(obstacles(space, choice) for choice in found.best), outside=outside,
        notes=tuple(_notes(machine, space, outside)),
    )  # fmt: skip


def _check_precision(machine: Machine, card: CardModel, precision: str) -> None:
    """Raise a CapacityError where the card has no products of a precision below 16 bits."""
    has = [name for name in PRECISIONS if name in machine.card.flops or name == "float16"]
    low, four = (card.peaks[PRECISIONS.index(name)] for name in ("float8", "nvfp4"))
    # What multiplies four bits faster than eight scales small blocks, so that it has both of these formats.
    has += ["mxfp8", "nvfp4"] if four > low else []
    if precision not in (*has, "bfloat16", "float32"):
        raise CapacityError(
            f"{machine.card.name} does not compute in {precision}", hint=f"choose `--precision` {', '.join(has)}."
        )


def _without_cost(found: Found) -> Found:
    """Return what was found on hardware without a price, which says nothing of cost."""
    best, front = ([replace(choice, cost=None) for choice in some] for some in (found.best, found.front))
    return replace(found, best=tuple(best), front=tuple(front))


def _with_work_for_all(space: Space) -> Space:
    """Return the space with the most cards over which the work can be spread.

    Raises:
        SpecError: there is no such number.
    """
    most = max(space.cards)
    for count in _counts(space, most):
        fewer = replace(space, cards=(count,))
        if row_table(fewer)["cards"].size:
            return fewer
    raise SpecError(
        f"a batch of {space.batch} samples of {space.sequence} tokens cannot be spread over {most} cards or fewer",
        hint="choose a batch with more divisors.",
    )


def _counts(space: Space, most: int) -> list[int]:
    """Return the card counts up to `most` that degrees and data axis can multiply to, largest first."""
    model = space.model
    layers = int(model.layers)
    kinds = [int(n) for n in (model.heads, model.mlp_width, model.mamba_heads) if n > 1] or [1]
    stages = {d for extra in range(space.spare + 1) for d in divisors(layers + extra) if d <= layers}
    contexts = [2**power for power in range(space.most_context.bit_length())]
    products = np.ones(1, dtype=np.int64)
    for degrees in (divisors(math.gcd(*kinds)), contexts, sorted(stages), divisors(space.batch)):
        products = np.unique(np.outer(products, np.asarray(degrees, dtype=np.int64)))
        products = products[products <= most]
    return [int(count) for count in products[::-1]]


def _notes(machine: Machine, space: Space, outside: str) -> Iterator[str]:
    used = max(space.cards)
    if used < machine.card_count:
        yield f"{machine.card_count - used} of {machine.card_count} cards stay idle: model and batch divide by no more."
    yield from machine.notes
    if not is_calibrated(machine.card) and not machine.notes:
        yield f"no published training run stands behind times on {machine.card.name}; calibrate."
    if outside:
        yield f"plan 1 is outside of what times on {machine.card.name} were fitted on: {outside}."
    if machine.card.kind == "cpu" and space.does is None:
        yield "our trainer cannot run this; cores are taken to compute while they send, as accelerators do."
    if space.precision == FLOAT32 and "bfloat16" in machine.card.flops and machine.card.kind != "cpu":
        yield "the job is in float32; `precision: bfloat16` would be several times faster here."


def outside_of(card: CardModel, space: Space, best: Choice) -> str:
    """Return in words where a choice lies outside of what the card's numbers were fitted on; empty where nowhere."""
    asked = {"width": float(space.model.width), "sequence": float(space.sequence)}
    return strays(card.generation, asked | {name: best.axes[name] for name in ("cards", "tensor", "pipeline")})


def _asked(model: JobSpec | ModelShape, batch: int, sequence: int) -> tuple[ModelShape, int, int]:
    if isinstance(model, ModelShape):
        if batch < 1 or sequence < 1:
            raise SpecError(
                f"a model's shape with batch {batch} and sequence {sequence}",
                hint="give `batch` and `sequence`, 1 or more each.",
            )
        return model, batch, sequence
    shape = with_vocabulary(model, token_kinds(model))
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


def has_price(machine: Machine) -> bool:
    """Return whether the catalogue knows what the machine's cards cost, which is most of its price."""
    return machine.card.price is not None


def bill_of(machine: Machine, price: float | None = None) -> Bill:
    """Return what a card costs with its share of all else; hardware without a price costs nothing.

    Args:
        price: USD per card and second for everything, electricity included; None for the machine's own.
    """
    count = machine.card_count
    rest = {name: power(machine, load=load).total / count for name, load in (("idle", 0.0), ("full", 1.0))}
    if price is not None:
        return Bill(**rest, price=price, tariff=0.0)
    parts = [(machine.card.price, count), (machine.node.price if machine.node else None, machine.hosts)]
    parts += [(switch.price, many) for switch, many in machine.switches]
    parts += [(cable.price, many) for cable, many in machine.cables]
    return Bill(**rest, price=sum((each or 0.0) * many for each, many in parts) / count / LIFE, tariff=TARIFF)


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
    said = f"{show_seconds(choice.time)} a step, {show_bytes(int(choice.memory))} a card, {show_energy(choice.energy)}"
    return said if choice.cost is None else f"{said}, {show_number(choice.cost)} USD"
