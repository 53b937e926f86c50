"""On which strategies are closed form and events compared? Random ones, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from supernode.forecast.efficiency import CardModel
from supernode.forecast.rates import card_of
from supernode.forecast.times import step_parts
from supernode.hardware.assemble import build_machine
from supernode.hardware.machine import Machine
from supernode.planning.cut import cut_stages
from supernode.simulation.domain import outside
from supernode.simulation.step import simulate_strategy
from supernode.workload.presets import public_model
from supernode.workload.shape import ModelShape
from supernode.workload.strategy import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    Software,
    Strategies,
    make_strategies,
)

MODELS = (
    "llama2-7b", "llama2-13b", "llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "qwen3-30b-a3b", "mixtral-8x7b",
)  # fmt: skip
MACHINES = (
    ("H100", "Fat_Tree"), ("H100", "Hybrid"), ("H100", "3D_Ring"), ("H100", "Full_Mesh"), ("A100-80", "Hybrid"),
    ("B200", "2D_Torus"), ("GB200", "Fat_Tree"), ("TPU-v4", "3D_Torus"), ("Ascend-910C", "Hybrid"),
)  # fmt: skip
MOST_CARDS = 512
MOST_IN_A_MESH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A strategy on a machine, in both views.

    Attributes:
        name: model, card and interconnect.
        closed: seconds of a step by the closed form.
        events: seconds by the events.
        layers: of each stage, where the planner cut; empty where it is as even as it goes.
        reasons: why the closed form does not apply; empty where it does.
    """

    name: str
    model: ModelShape
    ways: Strategies
    software: Software
    machine: Machine
    card: CardModel
    layers: tuple[int, ...]
    closed: float
    events: float
    reasons: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Closed form over events, less 1."""
        return self.closed / self.events - 1


def draw(seed: int) -> Iterator[Drawn]:
    """Yield strategies without end: models, machines, degrees, orders, cuts, micro-batches, sharding, recomputation."""
    dice = np.random.default_rng(seed)
    while True:
        model_name = str(dice.choice(MODELS))
        card_name, interconnect = MACHINES[dice.integers(len(MACHINES))]
        ways = _ways(dice, public_model(model_name))
        most = MOST_IN_A_MESH if interconnect == "Full_Mesh" else MOST_CARDS
        if ways is None or not 2 <= float(ways.cards) <= most:
            continue
        software = Software(
            overlaps_pipeline=bool(dice.random() < 0.8), overlaps_data=bool(dice.random() < 0.8),
            overlaps_tensor=bool(dice.random() < 0.3),
        )  # fmt: skip
        machine = build_machine(card_count=max(8, int(ways.cards)), card=card_name, interconnect=interconnect)
        yield _both(
            f"{model_name} on {card_name}, {interconnect}", public_model(model_name), ways, software, machine,
            cuts=bool(dice.random() < 0.5),
        )  # fmt: skip


def _ways(dice: np.random.Generator, model: ModelShape) -> Strategies | None:
    """Return one strategy; None where the degrees do not go together."""

    def one_of(*values: int) -> int:
        return int(dice.choice(values))

    pipeline, tensor, context, data = one_of(1, 2, 4, 8, 16), one_of(1, 2, 4, 8), one_of(1, 1, 1, 2), one_of(1, 2, 4, 8)
    schedule = one_of(GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE) if pipeline > 1 else ONE_F_ONE_B
    interleave = one_of(2, 4) if schedule == INTERLEAVED else 1
    many, micro_batch = one_of(1, 2, 4, 8, 16) * pipeline, one_of(1, 2)
    expert = one_of(1, 2, 4, 8) if model.mixtures else 1
    sharding, recompute, sequence = one_of(0, 1, 2, 3), one_of(0, 2), one_of(2048, 4096, 8192)
    if pipeline * interleave > int(model.layers) or tensor * context * data % expert:
        return None
    return make_strategies(
        tensor=tensor, context=context, expert=expert, pipeline=pipeline, interleave=interleave, data=data,
        sharding=sharding if data * context > 1 else 0, micro_batch=micro_batch, batch=data * micro_batch * many,
        sequence=sequence, recompute=recompute, schedule=schedule, sequence_parallel=int(tensor > 1),
    )  # fmt: skip


def _cut(model: ModelShape, ways: Strategies) -> tuple[int, ...]:
    """Return the layers of each stage as the planner cuts, the head weighed by its matrix."""
    layers = int(model.layers)
    head = float(model.vocabulary * model.width / (model.body_parameters / layers))
    stages = cut_stages([1.0] * layers, pipeline=int(ways.pipeline), interleave=int(ways.interleave), head=head)
    return tuple(stage.last - stage.first for stage in stages)


def _both(name: str, model: ModelShape, ways: Strategies, software: Software, machine: Machine, *, cuts: bool) -> Drawn:
    card = card_of(machine)
    layers: tuple[int, ...] = ()
    if cuts and ways.pipeline > 1:
        layers = _cut(model, ways)
        held = [sum(layers[rank :: int(ways.pipeline)]) for rank in range(int(ways.pipeline))]
        ways = replace(ways, fullest=np.asarray(float(max(held[:-1]))), last=np.asarray(float(held[-1])))
    return Drawn(
        name=name, model=model, ways=ways, software=software, machine=machine, card=card, layers=layers,
        closed=float(step_parts(model, ways, card, software).total),
        events=simulate_strategy(model, ways, card, software, machine=machine, layers=layers).total,
        reasons=outside(model, ways, card, software, machine=machine, layers=layers),
    )  # fmt: skip
