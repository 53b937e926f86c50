"""S9: what does a planner save that knows the fabric? Its plans beside those of one that takes all links as equal."""

from __future__ import annotations

import statistics
from dataclasses import replace

from supernode.claims.claim import Setting, Shown, Sweep
from supernode.claims.plain import Job, beside, space_of
from supernode.forecast.efficiency import CardModel
from supernode.forecast.rates import card_of
from supernode.hardware.assemble import build_machine
from supernode.hardware.machine import Machine
from supernode.placing.placement import Placed, best_order, place
from supernode.search.best import bill_of, room_of
from supernode.search.search import Choice, search
from supernode.search.space import Space
from supernode.workload.presets import public_model
from supernode.workload.strategy import Software

FEW = 10
SOFTWARE = Software()


def pairs(setting: Setting) -> dict[str, tuple[Job, Machine]]:
    """Return models and machines: dense and mixtures, short and long, on each kind of fabric that has tiers."""

    def cluster(cards: int, card: str = "H100", **more: object) -> Machine:
        return beside(build_machine(cards, "Hybrid", card=card, **more), network=setting.network)  # type: ignore[arg-type]

    def job(name: str, batch: int, sequence: int) -> Job:
        return Job(model=public_model(name), batch=batch, sequence=sequence)

    return {
        "GPT-3 175B, 512 A100": (
            job("gpt3-175b", 512, 2048), cluster(512, "A100-80", between_nodes="InfiniBand-HDR")
        ),
        "Llama 3 70B, 64 H100": (job("llama3-70b", 128, 8192), cluster(64)),
        "Llama 3 70B, 512 H100": (job("llama3-70b", 512, 8192), cluster(512)),
        "Llama 3 405B, 4096 H100, 4 to 1": (job("llama3-405b", 1024, 8192), cluster(4096, oversubscription=4.0)),
        "Llama 3 405B at 131,072 tokens, 4096 H100": (job("llama3-405b", 32, 131_072), cluster(4096)),
        "Mixtral 8x7B, 128 H100": (job("mixtral-8x7b", 256, 4096), cluster(128)),
        "DeepSeek-V3, 2048 H100": (job("deepseek-v3", 7680, 4096), cluster(2048)),
        "Llama 3 70B, 384 Ascend 910C": (job("llama3-70b", 768, 8192), cluster(384, "Ascend-910C")),
    }  # fmt: skip


def aware_partition(setting: Setting) -> Shown:
    """Return the part of the time that waits for communication which knowing the fabric saves, mean over the pairs."""
    found = {name: _saved(job, machine) for name, (job, machine) in pairs(setting).items()}
    waits = {name: wait for name, (wait, _) in found.items()}
    fewer = statistics.mean(nbytes for _, nbytes in found.values())
    return Shown(
        ours=statistics.mean(waits.values()),
        baseline="the fastest plan of the same planner when it takes all links to be as fast as those in a node",
        sweep=Sweep(over="model and machine", points=tuple(waits.items())),
        assumptions=(
            "Seconds of a step that wait for communication, both plans on the same fabric, ranks placed on its tiers.",
            f"Bytes over the slowest tier fall by {fewer:.0%} in the mean: the planner wants the fastest step, and "
            "sends more where that hides behind computing.",
        ),
        by="search and placing.placement",
    )


def _saved(job: Job, machine: Machine) -> tuple[float, float]:
    """Return the parts of waiting, and of bytes over the slowest tier, that knowing the fabric saves."""
    card, tiers = card_of(machine), machine.nested_tiers
    space = space_of(job, machine)
    flat = replace(card, wires=replace(card.wires, node_cards=machine.card_count))
    few = [best_order(job.model, one.ways(space), card, SOFTWARE, tiers) for one in _best(space, card, machine)]
    aware = min(few, key=lambda placed: placed.time)
    blind = _best(space, flat, machine)[0]
    unaware = place(job.model, blind.ways(space), card, SOFTWARE, tiers)
    return _less(_waiting(unaware), _waiting(aware)), _less(unaware.slow_bytes, aware.slow_bytes)


def _waiting(placed: Placed) -> float:
    return placed.time - placed.parts["alone"]


def _less(before: float, after: float) -> float:
    return float(1 - after / before) if before else 0.0


def _best(space: Space, card: CardModel, machine: Machine) -> tuple[Choice, ...]:
    return search(space, card, room_of(machine), bill_of(machine), top=FEW, front=False).best
