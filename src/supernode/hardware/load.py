"""Which part does a name stand for? Reads the catalogue's YAML, strictly and only when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from supernode.errors import SpecError
from supernode.hardware.parts import Card, Cooling, Link, Node, Supply, Switch
from supernode.registry import did_you_mean, lookup
from supernode.units import parse_bandwidth, parse_bytes, parse_seconds

Part = TypeVar("Part", Card, Cooling, Link, Node, Supply, Switch)

_KINDS: dict[str, Any] = {
    "cards": Card,
    "nodes": Node,
    "links": Link,
    "switches": Switch,
    "supplies": Supply,
    "cooling": Cooling,
}
_RATES = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_WATTS = {"kW": 1e3, "MW": 1e6, "W": 1.0}


def card(name: str) -> Card:
    """Return a card of the catalogue."""
    return lookup(name, cards(), kind="card")


def node(name: str) -> Node:
    """Return a node of the catalogue."""
    return lookup(name, _catalogue("nodes", Node), kind="node")


def link(name: str) -> Link:
    """Return a link of the catalogue."""
    return lookup(name, _catalogue("links", Link), kind="link")


def switch(name: str) -> Switch:
    """Return a switch of the catalogue."""
    return lookup(name, _catalogue("switches", Switch), kind="switch")


def supply(name: str) -> Supply:
    """Return a power supply of the catalogue."""
    return lookup(name, _catalogue("supplies", Supply), kind="power supply")


def cooling(name: str) -> Cooling:
    """Return a kind of cooling of the catalogue."""
    return lookup(name, _catalogue("cooling", Cooling), kind="cooling")


def cards() -> Mapping[str, Card]:
    """Return every card of the catalogue by its name."""
    return _catalogue("cards", Card)


def read_parts(text: str, kind: type[Part], *, file: str) -> dict[str, Part]:
    """Return the parts that a YAML text describes, by name.

    Args:
        text: a mapping from names to entries whose keys are the attributes of `kind`; `estimates` maps attributes
            to reasons.
        file: where the text comes from; named in errors.

    Raises:
        SpecError: unknown or missing keys, a quantity that is none, or no source.
    """
    import yaml

    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{file} is not YAML: {error}", hint="mend the line that it names.") from error
    if not isinstance(entries, dict):
        raise SpecError(f"{file} holds no mapping", hint="write `NAME:` and, indented below it, the part's attributes.")
    return {str(name): _read_part(str(name), entry, kind, file=file) for name, entry in entries.items()}


def _read_part(name: str, entry: object, kind: type[Part], *, file: str) -> Part:
    where = f"{file}, `{name}`"
    if not isinstance(entry, dict):
        raise SpecError(f"{where}: no mapping", hint="indent the part's attributes below its name.")
    known = {item.name: item for item in fields(kind) if item.name != "name"}
    for key in entry:
        if key not in known:
            raise SpecError(f"{where}: unknown key `{key}`", hint=did_you_mean(str(key), known))
    missing = [key for key, item in known.items() if key not in entry and item.default is MISSING]
    missing += [] if entry.get("source") else ["source"]
    if missing:
        raise SpecError(f"{where}: no `{missing[0]}`", hint=f"add `{missing[0]}:` to the entry.")
    values = {key: _READERS.get(key, _text)(value, f"{name}.{key}") for key, value in entry.items()}
    for key in values.get("estimates", ()):
        if key not in known:
            raise SpecError(f"{where}: `estimates` names `{key}`", hint=did_you_mean(str(key), known))
    return kind(name=name, **values)


def _catalogue(name: str, kind: type[Part]) -> Mapping[str, Part]:
    parts: Mapping[str, Part] = _read_catalogue(name)
    assert all(isinstance(part, kind) for part in parts.values())
    return parts


@cache
def _read_catalogue(name: str) -> Any:
    file = f"{name}.yaml"
    text = (files("supernode.hardware") / "catalog" / file).read_text("utf-8")
    return read_parts(text, _KINDS[name], file=file)


def _scaled(value: object, key: str, scales: Mapping[str, float], example: str) -> float:
    number, scale = value, 1.0
    if isinstance(value, str):
        unit = next((unit for unit in scales if value.endswith(unit)), "")
        number, scale = value.removesuffix(unit).strip(), scales.get(unit, 1.0)
    try:
        if isinstance(number, bool) or not isinstance(number, (int, float, str)):
            raise ValueError
        return float(number) * scale
    except ValueError:
        raise SpecError(f"`{key}` is {value!r}, not a quantity", hint=f"write a number or, say, {example}.") from None


def _number(value: object, key: str) -> float:
    return _scaled(value, key, {}, "0.9")


def _watts(value: object, key: str) -> float:
    return _scaled(value, key, _WATTS, "120kW")


def _count(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"`{key}` is {value!r}, not a count", hint="write a whole number.")
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise SpecError(f"`{key}` is {value!r}, not text", hint="put it in quotes.")
    return value


def _flops(value: object, key: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise SpecError(f"`{key}` is {value!r}", hint="write {float32: 19.5 TFLOP/s, bfloat16: 312 TFLOP/s}.")
    return {str(name): _scaled(rate, f"{key}.{name}", _RATES, "312 TFLOP/s") for name, rate in value.items()}


def _estimates(value: object, key: str) -> tuple[str, ...]:
    if not isinstance(value, dict) or not all(value.values()):
        raise SpecError(f"`{key}` is {value!r}", hint="write each attribute with the reason for its value.")
    return tuple(str(name) for name in value)


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "memory": lambda value, key: parse_bytes(value, key=key),
    "memory_bandwidth": lambda value, key: parse_bandwidth(value, key=key),
    "scale_up_bandwidth": lambda value, key: parse_bandwidth(value, key=key),
    "bandwidth": lambda value, key: parse_bandwidth(value, key=key),
    "port_bandwidth": lambda value, key: parse_bandwidth(value, key=key),
    "latency": lambda value, key: parse_seconds(value, key=key),
    "scale_up_latency": lambda value, key: parse_seconds(value, key=key),
    "power": _watts,
    "idle_power": _watts,
    "rated": _watts,
    "capacity": _watts,
    "flops": _flops,
    "price": _number,
    "efficiency": _number,
    "overhead": _number,
    "links": _count,
    "cards": _count,
    "cpus": _count,
    "ports": _count,
    "estimates": _estimates,
}
