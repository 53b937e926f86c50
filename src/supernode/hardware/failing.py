"""How often does a part fail, and how long is it away? Reads the catalogue's rates, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from supernode.errors import SpecError
from supernode.registry import did_you_mean
from supernode.units import parse_seconds

YEAR = 365.25 * 86_400.0
READ = ("fetched", "memory", "estimate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """One kind of part.

    Attributes:
        rate: failures per second of one part, at a constant rate.
        repair: seconds on average until it, or its replacement, works again.
        read: how the source was read: `fetched`, from `memory`, or `estimate` where there is none.
        source: where the rate comes from.
        estimates: which of the numbers are guesses, and why they are as they are.
    """

    name: str
    rate: float
    repair: float
    read: str
    source: str
    estimates: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf or not 0 <= self.repair < math.inf:
            raise SpecError(
                f"{self.name} fails {self.rate * YEAR} times a year for {self.repair} s",
                hint="give finite numbers of 0 or more.",
            )
        if self.read not in READ:
            raise SpecError(f"`read` of {self.name} is {self.read!r}", hint=f"choose one of {', '.join(READ)}.")
        if not self.source:
            raise SpecError(f"the rate of {self.name} has no source", hint="say in `source` where it comes from.")

    @property
    def mtbf(self) -> float:
        """Seconds between failures of one part."""
        return 1 / self.rate if self.rate else math.inf


@cache
def failing() -> Mapping[str, Failing]:
    """Return every kind of part of the catalogue by name."""
    text = (files("supernode.hardware") / "catalog" / "failures.yaml").read_text("utf-8")
    return MappingProxyType(read_failing(text, file="failures.yaml"))


def read_failing(text: str, *, file: str) -> dict[str, Failing]:
    """Return what a YAML text says of each kind of part.

    Args:
        text: a mapping from names to `per_year`, `repair`, `read`, `source` and, where they are guesses, `estimates`.
        file: where the text comes from; named in errors.

    Raises:
        SpecError: it is no such mapping, or a number is none.
    """
    import yaml

    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{file} is not YAML: {error}", hint="mend the line that it names.") from error
    if not isinstance(entries, dict):
        raise SpecError(f"{file} holds no mapping", hint="write `NAME:` and, indented below it, `per_year: 0.1`.")
    return {str(name): _read(str(name), entry, file=file) for name, entry in entries.items()}


_KEYS = ("per_year", "repair", "read", "source", "estimates")


def _read(name: str, entry: Any, *, file: str) -> Failing:
    where = f"{file}, `{name}`"
    if not isinstance(entry, dict):
        raise SpecError(f"{where}: no mapping", hint="indent the part's keys below its name.")
    for key in entry:
        if key not in _KEYS:
            raise SpecError(f"{where}: unknown key `{key}`", hint=did_you_mean(str(key), _KEYS))
    for key in _KEYS[:4]:
        if key not in entry:
            raise SpecError(f"{where}: no `{key}`", hint=f"add `{key}:` to the entry.")
    number = entry["per_year"]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise SpecError(f"{where}: `per_year` is {number!r}", hint="write failures a year as a number, such as 0.1.")
    return Failing(
        name=name, rate=number / YEAR, repair=parse_seconds(entry["repair"], key=f"{name}.repair"),
        read=str(entry["read"]), source=str(entry["source"]), estimates=dict(entry.get("estimates") or {}),
    )  # fmt: skip
