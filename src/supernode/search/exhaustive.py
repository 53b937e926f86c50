"""What is best if one tries every strategy alone? The slow way through a space, which checks the fast one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from supernode.forecast.efficiency import CardModel
from supernode.forecast.times import step_parts
from supernode.search.offload import Room, holding, moved, waiting
from supernode.search.search import Bill, Choice, working
from supernode.search.space import OVERLAPS, SHORTEST_PART, Space
from supernode.workload.strategy import INTERLEAVED, ONE_F_ONE_B, make_strategies


def every_strategy(space: Space) -> Iterator[dict[str, float]]:
    """Yield the strategies of a space one by one, by plain loops and the rules in `Space`'s words."""
    model, layers = space.model, int(space.model.layers)
    tensors = range(1, min(space.most_tensor, max(space.cards)) + 1)
    contexts = [2**i for i in range(20) if 2**i <= min(space.most_context, max(1, space.sequence // SHORTEST_PART))]
    experts = range(1, int(model.experts) + 1) if model.mixtures else [1]
    for cards, tensor, context, expert in product(sorted(space.cards), tensors, contexts, experts):
        if model.heads % tensor or model.mlp_width % tensor or space.sequence % (tensor * context):
            continue
        if model.key_value_heads % tensor and tensor % model.key_value_heads:
            continue
        for pipeline, interleave, micro_batch in product(
            range(1, layers + 1), range(1, layers + 1), range(1, space.batch + 1)
        ):
            data, rest = divmod(cards, tensor * context * pipeline)
            if rest or not data or space.batch % (data * micro_batch) or (cards // pipeline) % expert:
                continue
            if model.mixtures and model.experts % expert:
                continue
            parts = pipeline * interleave
            if parts > layers or -layers % parts > space.spare:
                continue
            many = space.batch // (data * micro_batch)
            if space.is_filled and many < pipeline:
                continue
            for schedule in _schedules(space, pipeline=pipeline, interleave=interleave, micro_batches=many):
                degrees = {
                    "cards": cards, "tensor": tensor, "context": context, "expert": expert, "pipeline": pipeline,
                    "schedule": schedule, "interleave": interleave, "micro_batch": micro_batch, "data": data,
                }  # fmt: skip
                yield from _switched(space, {name: float(value) for name, value in degrees.items()})


def _schedules(space: Space, *, pipeline: int, interleave: int, micro_batches: int) -> list[int]:
    if pipeline == 1:
        return [ONE_F_ONE_B] if interleave == 1 else []
    if interleave > 1:
        return [s for s in space.schedules if s == INTERLEAVED and micro_batches % pipeline == 0]
    return [s for s in space.schedules if s != INTERLEAVED]


def _switched(space: Space, degrees: dict[str, float]) -> Iterator[dict[str, float]]:
    is_copied = degrees["data"] * degrees["context"] > 1
    matters = (degrees["tensor"] > 1, is_copied, degrees["pipeline"] > 1)
    usual = [bool(getattr(space.software, name)) for name in OVERLAPS]
    overlaps = product(*(space.overlaps if space.overlaps and m else (u,) for u, m in zip(usual, matters, strict=True)))
    switches = product(
        space.sequence_parallels if degrees["tensor"] > 1 else (0,), space.recomputes,
        space.shardings if is_copied else (0,), space.offloads, overlaps,
    )  # fmt: skip
    for spread, recompute, sharding, offload, overlapped in switches:
        if space.allows is not None and not space.allows(
            make_strategies(
                **{name: degrees[name] for name in ("schedule", "pipeline", "context", "tensor")}, recompute=recompute,
                sequence=space.sequence, sequence_parallel=spread,
            )
        ):  # fmt: skip
            continue
        yield {
            **degrees, "sequence_parallel": float(spread), "recompute": float(recompute), "sharding": float(sharding),
            "offload": float(offload), **dict(zip(OVERLAPS, map(float, overlapped), strict=True)),
        }  # fmt: skip


def alone(space: Space, card: CardModel, room: Room, bill: Bill, axes: dict[str, float]) -> Choice | None:
    """Return one strategy evaluated by itself; None if it does not fit."""
    choice = Choice(axes=axes, time=0.0, memory=0.0, energy=0.0, cost=0.0)
    ways, software, option = choice.ways(space), choice.software(space), int(axes["offload"])
    parts = step_parts(space.model, ways, card, software)
    held = holding(space.model, ways, software)
    away = moved(held, option)
    time = float(parts.total + waiting(held, option, ways, parts.total - parts.optimizer - parts.step, room))
    memory = float(held.total - away)
    if memory > room.memory or (option and float(away) > room.host_memory):
        return None
    energy = float(bill.energy(axes["cards"], seconds=time, working=working(parts)))
    cost = axes["cards"] * bill.price * time + bill.tariff * energy
    return Choice(axes=axes, time=time, memory=memory, energy=energy, cost=cost)


def exhaustive(space: Space, card: CardModel, room: Room, bill: Bill) -> list[Choice]:
    """Return every strategy that fits, each evaluated by itself."""
    tried = (alone(space, card, room, bill, axes) for axes in every_strategy(space))
    return [choice for choice in tried if choice is not None]
