"""How a rank reads a noun from JSON without waiting for pydantic, whose import takes longer than the reading.

The same dataclasses as `codec`, the same strictness about keys and kinds; no coercion and no long explanations, since
what is read here was written by `codec` or by `json` from a checked value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read(kind: type[T], text: str | bytes) -> T:
    """Return the value of a frozen dataclass that JSON text holds.

    Raises:
        ValueError: the text is not JSON, or not a `kind`; the message names the key.
    """
    found: T = _value(kind, json.loads(text), kind.__name__)
    return found


def value(kind: Any, found: Any, name: str = "value") -> Any:
    """Return the value of any kind that parsed JSON holds; raises as `read`."""
    return _value(kind, found, name)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if not name.startswith("__")}


def _value(kind: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _noun(kind, value, name)
    if origin in (Union, UnionType):
        return _either(inner, value, name)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        each = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(each) == len(value):
            return tuple(_value(part, item, name) for part, item in zip(each, value, strict=True))
    if origin is Mapping and isinstance(value, dict):
        return {_key(inner[0], key): _value(inner[1], item, f"{name}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool, type(None)) and type(value) is kind:
        return value
    raise ValueError(f"`{name}` is {value!r:.80}")


def _noun(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` is {value!r:.80}")
    hints = _hints(kind)
    if unknown := sorted(set(value) - set(hints)):
        raise ValueError(f"`{name}.{unknown[0]}` is not known")
    try:
        return kind(**{key: _value(hints[key], item, f"{name}.{key}") for key, item in value.items()})
    except TypeError as error:
        raise ValueError(f"`{name}`: {error}") from error


def _either(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    for kind in kinds:
        try:
            return _value(kind, value, name)
        except ValueError:
            continue
    raise ValueError(f"`{name}` is {value!r:.80}")


def _key(kind: Any, key: str) -> Any:
    return int(key) if kind is int else key
