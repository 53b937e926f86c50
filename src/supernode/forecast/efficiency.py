"""How much of its data sheet does a card deliver? The few fitted numbers of each generation, from `efficiency.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from supernode.errors import SpecError
from supernode.forecast.network import Wires
from supernode.hardware.calibration import AxisCost
from supernode.workload.shape import Numbers
from supernode.workload.strategy import PRECISIONS

FILE = Path(__file__).parent / "efficiency.yaml"
CARDS = Path(__file__).parent / "cards.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The physical parameters of a card generation; fitted to the fitting half of published measurements.

    Attributes:
        products: part of the peak that very large 16-bit matrix products reach.
        products_low: likewise of 8 bits.
        products_four: likewise of 4 bits.
        operands: how often a matrix product moves each operand between memory and card, over the ideal once.
        scores: part of its peak rates, of products and exponentials one after the other, that attention's core reaches.
        memory: part of the memory bandwidth that memory-bound operations reach.
        launch: seconds in which the host launches one kernel.
        tail: seconds between the end of one kernel and the next one's full speed.
        sync: seconds that the card waits at each mixture for the host to learn how many tokens each expert got.
        inside: part of the node links' bandwidth that collectives reach.
        outside: part of the network cards' bandwidth that collectives reach.
        contention: part of the time of hidden communication at the full rate of `inside` that it costs the computing
            beside it; slower transfers cost less.
        step: seconds around each step: loader, gradient norm, scalars, logging.
    """

    products: float
    products_low: float
    products_four: float
    operands: float
    scores: float
    memory: float
    launch: float
    tail: float
    sync: float
    inside: float
    outside: float
    contention: float
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CardModel:
    """A card with what surrounds it, as the time model sees it.

    Attributes:
        generation: name of the parameters' set.
        peaks: dense FLOP/s by precision, in the order of `PRECISIONS`.
        exponentials: per second, of the special-function units.
        memory_bandwidth: bytes/s.
        memory: bytes.
        wires: links and network cards.
        fitted: what the generation delivers.
        sharing: ranks that share one core; 1 where each card is a rank's own.
        axes: what keeping an axis going costs a rank's Python; nothing where hosts run ahead of their cards.
    """

    generation: str
    peaks: tuple[float, ...]
    exponentials: float
    memory_bandwidth: float
    memory: float
    wires: Wires
    fitted: Efficiency = field(repr=False)
    sharing: float = 1.0
    axes: Mapping[str, AxisCost] = field(default_factory=dict)

    def product_rate(self, precision: Numbers) -> Numbers:
        """Return FLOP/s of very large matrix products."""
        index = precision.astype(int)
        fitted = self.fitted
        low = fitted.products_low
        part = (fitted.products, fitted.products, low, low, fitted.products_four, fitted.products)
        rate: Numbers = (np.asarray(self.peaks) * np.asarray(part))[index]
        return rate

    @property
    def tuned_wires(self) -> Wires:
        """The wires at the bandwidth that collectives reach."""
        return replace(self.wires, inside_efficiency=self.fitted.inside, outside_efficiency=self.fitted.outside)


@cache
def load_efficiency(file: Path = FILE) -> Mapping[str, Efficiency]:
    """Return the fitted parameters by generation.

    Raises:
        SpecError: the file names a parameter that does not exist, or leaves one out.
    """
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    known = {entry.name for entry in fields(Efficiency)}
    made = {}
    for name, numbers in content["generations"].items():
        if set(numbers) != known:
            raise SpecError(
                f"generation {name} in {file.name} has {sorted(numbers)}",
                hint=f"give each of {sorted(known)}, no more.",
            )
        made[name] = Efficiency(**numbers)
    return made


@cache
def _cards() -> Mapping[str, Mapping[str, Any]]:
    content: Mapping[str, Mapping[str, Any]] = yaml.safe_load(CARDS.read_text(encoding="utf-8"))
    return content


def card_names() -> tuple[str, ...]:
    """Return the cards that have parameters."""
    return tuple(_cards())


@cache
def card_model(name: str) -> CardModel:
    """Return a card with its generation's parameters.

    Raises:
        SpecError: there is no such card.
    """
    if name not in _cards():
        raise SpecError(f"no parameters for card {name!r}", hint=f"choose one of {', '.join(_cards())}, or calibrate.")
    entry = _cards()[name]
    half, low = entry["bfloat16"] * 1e12, entry["float8"] * 1e12
    return CardModel(
        generation=entry["generation"],
        peaks=(half, half, low, low, entry["nvfp4"] * 1e12, entry["float32"] * 1e12),
        exponentials=entry["exponentials"] * 1e12,
        memory_bandwidth=entry["memory_bandwidth"] * 1e9,
        memory=entry["memory_GB"] * 1e9,
        wires=Wires(node_cards=entry["node_cards"], inside=entry["inside"] * 1e9, outside=entry["outside"] * 1e9),
        fitted=load_efficiency()[entry["generation"]],
    )


def precision_index(name: str) -> int:
    """Return the place of a precision in `PRECISIONS`.

    Raises:
        SpecError: there is no such precision.
    """
    if name not in PRECISIONS:
        raise SpecError(f"precision {name!r} is unknown", hint=f"choose one of {', '.join(PRECISIONS)}.")
    return PRECISIONS.index(name)
