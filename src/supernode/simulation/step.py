"""What happens in one training step, moment by moment? Every pass, message and exchange, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from supernode.errors import SpecError
from supernode.forecast.efficiency import CardModel
from supernode.hardware.machine import Machine
from supernode.planning.cost import at_work, software_of
from supernode.planning.memory import strategy_of
from supernode.planning.work import shape_of
from supernode.schema.plan import Plan
from supernode.simulation.events.engine import Engine
from supernode.simulation.events.span import Kind, Span
from supernode.simulation.events.strategy import strategy_work
from supernode.simulation.events.traced import traced_work
from supernode.simulation.events.wire import MOST_CARDS, Wire, bundles, card_network, machine_network
from supernode.simulation.events.work import StageWork, StepWork
from supernode.workload.shape import ModelShape, decoder_shape
from supernode.workload.strategy import Software, Strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step. `total`: seconds until the last rank is done."""

    spans: tuple[Span, ...]
    total: float


def simulate_step(plan: Plan, machine: Machine, *, speed: Mapping[int, float] | None = None) -> Timeline:
    """Return the step of a plan: its pipeline event by event, then synchronisation, update and overhead as predicted.

    Args:
        speed: of single ranks' cards, 1 for as fast as planned, 0.5 for half as fast; see `slowest_replicas`.

    Raises:
        SpecError: the model is the user's own, so its times are not known, or a speed is no positive number.
    """
    shape = shape_of(plan)
    if plan.trace is not None:
        work = traced_work(plan, machine)
        is_tied = bool(work.sync and work.sync.each)
        return simulate_work(
            work, replicas=slowest_replicas(
                speed or {}, tensor=1, data=plan.layout.data, pipeline=work.pipeline, tied=is_tied
            ),
        )  # fmt: skip
    if shape is None:
        raise SpecError(
            f"{plan.job.name} trains your own module, whose times are not known before it runs",
            hint="simulate a preset or a shape, or run the job.",
        )
    return simulate_strategy(
        decoder_shape(shape), strategy_of(plan), at_work(plan, machine), software_of(plan, machine),
        layers=[stage.last - stage.first for stage in plan.stages], machine=machine, cards=plan.cards, speed=speed,
    )  # fmt: skip


def simulate_strategy(
    model: ModelShape,
    ways: Strategies,
    card: CardModel,
    software: Software,
    *,
    machine: Machine | None = None,
    layers: Sequence[int] = (),
    cards: Sequence[int] = (),
    speed: Mapping[int, float] | None = None,
) -> Timeline:
    """Return the step of one strategy, its messages and sums of gradients on the fabric's links at once.

    Args:
        machine: whose fabric carries them; None takes the card's nodes, a rail for each card of a node between them.
            Messages of jobs of more than 1,024 cards, and between a computer's cores, have their time alone.
        layers: of each stage, in order; empty cuts as the closed form does.
        cards: of each rank, on the machine; empty takes the first ones in order.
        speed: of single ranks' cards, see `simulate_step`.

    Raises:
        SpecError: more than one strategy, what cannot be cut so, or a speed that is no positive number.
    """
    work = strategy_work(model, ways, card, software, layers=layers)
    replicas = slowest_replicas(
        speed or {}, tensor=int(ways.tensor * ways.context), data=int(ways.data), pipeline=work.pipeline,
        tied=bool(work.sync and work.sync.each),
    )  # fmt: skip
    return simulate_work(work, wire=wire_of(work, ways, card, machine, cards), replicas=replicas)


def wire_of(
    work: StepWork, ways: Strategies, card: CardModel, machine: Machine | None, cards: Sequence[int] = ()
) -> Wire | None:
    """Return the fabric; None where there is nothing to carry, too much, or none: cores pass messages in memory."""
    block = int(ways.tensor * ways.context * ways.data)
    used = max(cards, default=block * work.pipeline - 1) + 1
    whole = machine.card_count if machine and machine.is_direct else used
    if work.pipeline == 1 or whole > MOST_CARDS or (machine and machine.card.kind == "cpu"):
        return None
    ends = bundles(
        block=block, pipeline=work.pipeline, group=int(ways.data * ways.context), stride=int(ways.tensor),
        node_cards=card.wires.node_cards, wraps=work.interleave > 1, cards=cards,
    )  # fmt: skip
    return Wire(machine_network(machine, card, used) if machine else card_network(card, used), ends)


def slowest_replicas(
    speed: Mapping[int, float], *, tensor: int, data: int, pipeline: int, tied: bool = False
) -> list[tuple[float, ...]]:
    """Return the speed of each pipeline rank, for every replica that differs.

    Cards that share matrices go on together, as fast as the slowest. Replicas meet at the sum of their gradients only,
    so each has a pipeline of its own, unless they exchange weights at every pass.

    Args:
        speed: by rank, tensor (with context) fastest, then data, then pipeline.
        tied: weights are gathered for every pass, so that all replicas wait for the slowest card of a stage.

    Raises:
        SpecError: no such rank, or a speed that is no positive number.
    """
    ranks = tensor * data * pipeline
    for rank, factor in speed.items():
        if not (0 <= rank < ranks and 0 < factor < float("inf")):
            raise SpecError(
                f"rank {rank} of {ranks} at {factor} of its speed",
                hint=f"name ranks 0 to {ranks - 1}, and speeds above 0.",
            )
    made = [[1.0] * pipeline for _ in range(data)]
    for rank, factor in speed.items():
        stage, replica = rank // tensor // data, rank // tensor % data
        for one in range(data) if tied else [replica]:
            made[one][stage] = min(made[one][stage], factor)
    return sorted({tuple(one) for one in made})


def simulate_work(work: StepWork, *, wire: Wire | None = None, replicas: Sequence[Sequence[float]] = ()) -> Timeline:
    """Return the step of the slowest replica.

    Args:
        wire: what carries messages; without one, each takes its time alone.
        replicas: speed of each pipeline rank, one entry for every replica that differs; empty for one as planned.
    """
    tried = []
    for speed in replicas or [(1.0,) * work.pipeline]:
        engine = Engine(work, wire=wire, speed=speed)
        total = engine.run()
        tried.append((total, engine.spans, speed))
    now, spans, _ = max(tried, key=lambda one: one[0])
    slowest = min((min(speed) for _, _, speed in tried), default=1.0)
    # Clipping needs the norm over all ranks, so that they go on together from here.
    sync, late = work.sync, 0.0
    if sync and not sync.each and not sync.overlaps:
        late += max(a + b for a, b in zip(sync.scatter, sync.gather, strict=True))
    tail: list[tuple[Kind, float]] = [
        ("data", late), ("optimizer", work.optimizer / slowest), ("overhead", work.fixed)
    ]  # fmt: skip
    for kind, seconds in tail:
        if seconds:
            spans += [
                Span(rank=r, stage=-1, kind=kind, micro_batch=-1, start=now, end=now + seconds)
                for r in range(work.pipeline)
            ]
        now += seconds
    ordered = sorted(spans, key=lambda span: (span.start, span.rank, -span.end))
    return Timeline(spans=tuple(ordered), total=now)


def simulate_pipeline(
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    schedule: str,
    pipeline: int,
    micro_batches: int,
    transfer: float = 0.0,
    weights: Sequence[float] = (),
    speed: Sequence[float] = (),
    blocks: bool = False,
) -> Timeline:
    """Return every pass and transfer of one step.

    A rank runs its passes in the schedule's order, each as soon as its input is there; messages that one rank sends
    another go one after the other.

    Args:
        forward: seconds of one micro-batch in each stage; stage s is on rank s % `pipeline`.
        backward: likewise, with the weights' gradients.
        transfer: seconds that a micro-batch takes from a stage to the next.
        weights: of `backward`, the weights' gradients, which zero_bubble puts off.
        speed: of each rank.
        blocks: a rank cannot compute while it sends.
    """
    late = tuple(weights) or (0.0,) * len(forward)
    stages = tuple(
        StageWork(layers=1, forward=f, backward=b, weights=w) for f, b, w in zip(forward, backward, late, strict=True)
    )
    work = StepWork(
        stages=stages, schedule=schedule, pipeline=pipeline, micro_batches=micro_batches, blocks=blocks,
        transfer=transfer, transfer_back=transfer,
    )  # fmt: skip
    return simulate_work(work, replicas=[tuple(speed)] if speed else ())


__all__ = ["Kind", "Span", "Timeline", "simulate_pipeline", "simulate_step", "simulate_strategy", "simulate_work"]
