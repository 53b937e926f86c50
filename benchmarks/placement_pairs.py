"""Which models on which machines does `placement.py` compare? Chosen by rule, before any figure was seen.

Published: the runs of Megatron-LM, Megatron-Turing, NeMo, Llama 3 and DeepSeek-V3 that the project had from its first
placement benchmark on, and the rows of NVIDIA's newest performance summary on more than one domain of GB200. Catalogue:
a dense model and a mixture on every machine that has a name, at Megatron-LM's habits. Misfits: one model at one set of
degrees on nodes that these do not fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

from supernode.forecast.rates import card_of
from supernode.hardware.assemble import MACHINES, build_machine, predefined
from supernode.hardware.machine import Machine, Tier
from supernode.placing.placement import (
    RANK_ORDER,
    Placed,
    best_place,
    every_order,
    place,
    slow_bytes,
    with_spares,
)
from supernode.placing.torus import TorusPlaces
from supernode.workload.presets import public_model
from supernode.workload.shape import ModelShape, gpt_shape
from supernode.workload.strategy import INTERLEAVED, Software, Strategies, make_strategies

DOMAIN = 72  # cards that NVLink joins in a GB200 NVL72


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model with the degrees that people run it with, on a machine.

    Attributes:
        group: published, catalogue or misfits.
        source: of the degrees.
    """

    group: str
    model: ModelShape
    machine: Machine
    ways: Strategies
    source: str

    @property
    def cards(self) -> int:
        """Cards that the strategy takes."""
        return int(self.ways.cards)

    def naive(self, ways: Strategies, software: Software) -> Placed:
        """Return a strategy with its ranks in Megatron-LM's order on cards in theirs."""
        card = card_of(self.machine)
        if self.machine.topology == "torus":
            return TorusPlaces(self.model, ways, card, software, self.machine).in_rank_order()
        return place(self.model, ways, card, software, self.machine.nested_tiers)

    def best(self, ways: Strategies, software: Software) -> Placed:
        """Return a strategy where our planner puts it."""
        card = card_of(self.machine)
        if self.machine.topology == "torus":
            return TorusPlaces(self.model, ways, card, software, self.machine).best()
        return best_place(self.model, ways, card, software, self.machine.nested_tiers)

    def every(self, ways: Strategies, software: Software) -> Iterable[Placed]:
        """Return a strategy in every place that is tried."""
        card = card_of(self.machine)
        if self.machine.topology == "torus":
            return TorusPlaces(self.model, ways, card, software, self.machine).all()
        return every_order(self.model, ways, card, software, self.machine.nested_tiers)

    def by_bytes(self, ways: Strategies, software: Software) -> Iterator[tuple[float, Callable[[], Placed]]]:
        """Yield each place's bytes over the slowest tier with what says the rest of it; nothing off a torus' grid."""
        card = card_of(self.machine)
        if self.machine.topology == "torus":
            if int(ways.data) % int(ways.expert) == 0:
                for placed in self.every(ways, software):
                    yield placed.slow_bytes, partial(_same, placed)
            return
        wide = [axis for axis in RANK_ORDER if float(getattr(ways, axis)) > 1]
        narrow = [axis for axis in RANK_ORDER if axis not in wide]
        for tiers in with_spares(self.machine.nested_tiers, int(ways.cards)):
            for first in permutations(wide):
                order = (*first, *narrow)
                nbytes = slow_bytes(self.model, ways, software, tiers, order=order)
                yield nbytes, partial(place, self.model, ways, card, software, tiers, order=order)


def _same(placed: Placed) -> Placed:
    return placed


def _ways(batch: int, sequence: int, **degrees: float) -> Strategies:
    rest = {"sequence_parallel": 1.0, "sharding": 1.0, "precision": 1.0}
    if degrees.get("interleave", 1) > 1:
        rest["schedule"] = INTERLEAVED
    return make_strategies(batch=batch, sequence=sequence, **{**rest, **degrees})


def _gpt(layers: int, width: int, heads: int) -> ModelShape:
    return gpt_shape(layers=layers, width=width, heads=heads, vocabulary=51_200, positions=2048)


def _domains(cards: int, size: int, card: str = "GB200") -> Machine:
    """Return domains of so many cards, as few as hold the job, with InfiniBand between."""
    count = -(-cards // (size - size % 8)) * size
    made = build_machine(count, "Hybrid", card=card)
    inner, outer = made.tiers[0], made.tiers[-1]
    tiers = (replace(inner, cards=size), Tier(name="machine", cards=count, bandwidth=outer.bandwidth,
             latency=outer.latency))  # fmt: skip
    return replace(made, node_cards=size, tiers=tiers)


def _published() -> dict[str, Pair]:
    a100: dict[str, Any] = {"interconnect": "Hybrid", "card": "A100-80", "between_nodes": "InfiniBand-HDR"}
    h100: dict[str, Any] = {"interconnect": "Hybrid", "card": "H100"}
    llama, large = public_model("llama3-70b"), public_model("llama3-405b")
    bridge = "Megatron-Bridge, performance summary of 26.08"
    meta = "arXiv:2407.21783, table 4, a quarter of its cards"

    def pair(model: ModelShape, machine: Machine, source: str, ways: Strategies) -> Pair:
        return Pair(group="published", model=model, machine=machine, source=source, ways=ways)

    return {
        "GPT-3 175B, 512 A100": pair(
            _gpt(96, 12288, 96), build_machine(512, **a100), "arXiv:2205.05198, table 3, eight copies",
            _ways(512, 2048, tensor=8, pipeline=8, data=8, interleave=3),
        ),
        "MT-NLG 530B, 2240 A100": pair(
            _gpt(105, 20480, 128), build_machine(2240, **a100), "arXiv:2201.11990, section 3",
            _ways(1920, 2048, tensor=8, pipeline=35, data=8),
        ),
        "Llama 3 70B, 64 H100": pair(
            llama, build_machine(64, **h100), "NeMo's Llama 3 70B recipe",
            _ways(128, 8192, tensor=4, context=2, pipeline=4, data=2, interleave=5),
        ),
        "Llama 3 405B, 4096 H100, oversubscribed 4 to 1": pair(
            large, build_machine(4096, oversubscription=4.0, **h100), meta,
            _ways(1024, 8192, tensor=8, pipeline=16, data=32, interleave=4),
        ),
        "Llama 3 405B at 131,072 tokens, 4096 H100": pair(
            large, build_machine(4096, **h100), meta,
            _ways(32, 131_072, tensor=8, context=16, pipeline=16, data=2, interleave=4),
        ),
        "DeepSeek-V3, 2048 H100": pair(
            public_model("deepseek-v3"), build_machine(2048, **h100), "arXiv:2412.19437, section 3.2",
            _ways(7680, 4096, expert=64, pipeline=16, data=128),
        ),
        "DeepSeek-V4 Flash, 128 GB200 in domains of 72": pair(
            public_model("deepseek-v4-flash"), _domains(128, DOMAIN), bridge,
            _ways(2048, 4096, expert=64, data=128, precision=3),
        ),
        "Qwen3 235B, 256 GB200 in domains of 72": pair(
            public_model("qwen3-235b-a22b"), _domains(256, DOMAIN), bridge,
            _ways(8192, 4096, expert=32, pipeline=8, data=32, interleave=3, precision=3),
        ),
    }  # fmt: skip


def _catalogue() -> dict[str, Pair]:
    """Return Llama 3 70B at tensor 8 and pipeline 4, and Qwen3 30B at expert 8 and pipeline 4; data is the rest."""
    found = {}
    for name in MACHINES:
        machine = predefined(name)
        for model, label, degrees in (
            ("llama3-70b", "Llama 3 70B", {"tensor": 8, "pipeline": 4, "interleave": 5}),
            ("qwen3-30b-a3b", "Qwen3 30B", {"expert": 8, "pipeline": 4}),
        ):
            data = machine.card_count // (degrees.get("tensor", 1) * degrees["pipeline"])
            ways = _ways(16 * data, 8192, data=data, **degrees)
            found[f"{label}, {name}"] = Pair(
                group="catalogue", model=public_model(model), machine=machine, ways=ways, source="Megatron-LM's habits"
            )
    return found


def _misfits() -> dict[str, Pair]:
    """Return Llama 3 70B at tensor 8 on 256 cards, in nodes that hold half a tensor group, one and a quarter, nine."""
    ways = _ways(512, 8192, tensor=8, pipeline=4, data=8, interleave=5)
    return {
        f"Llama 3 70B, 256 H100 in nodes of {size}": Pair(
            group="misfits", model=public_model("llama3-70b"), ways=ways, source="assumed",
            machine=_domains(256, size, "H100") if size > 8 else _small(256, size),
        )
        for size in (4, 10, 72)
    }  # fmt: skip


def _small(cards: int, size: int) -> Machine:
    made = build_machine(cards, "Hybrid", card="H100")
    return replace(made, node_cards=size, tiers=(replace(made.tiers[0], cards=size), *made.tiers[1:]))


def pairs() -> dict[str, Pair]:
    """Return all of them by name."""
    return {**_published(), **_catalogue(), **_misfits()}
