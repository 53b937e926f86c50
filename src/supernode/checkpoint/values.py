"""How does what is no tensor in a state dict get to disk and back? As JSON that keeps tuples, keys and bytes apart."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from supernode.errors import CheckpointError

_TAG = "is"
_MOST_DEPTH = 100


def encoded(value: Any, name: str) -> bytes:
    """Return a value as JSON.

    Raises:
        CheckpointError: it holds something that only pickle could carry; the message says where.
    """
    return json.dumps(_plain(value, name, 0), separators=(",", ":")).encode()


def decoded(data: bytes, name: str) -> Any:
    """Return what `encoded` was given.

    Raises:
        CheckpointError: it was given no such thing.
    """
    try:
        return _value(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"`{name}` cannot be read: {error}", hint="resume from an older checkpoint.") from error


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _MOST_DEPTH:
        raise CheckpointError(f"`{where}` lies {depth} levels deep, or holds itself", hint="save it flatter.")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_plain(item, f"{where}.{number}", depth + 1) for number, item in enumerate(value)]
    if kind in (tuple, set, frozenset):
        return {_TAG: kind.__name__, "of": [_plain(item, where, depth + 1) for item in value]}
    if kind is dict:
        of = [[_plain(key, where, depth + 1), _plain(one, f"{where}.{key}", depth + 1)] for key, one in value.items()]
        return {_TAG: "dict", "of": of}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "of": base64.b64encode(value).decode()}
    if kind is complex:
        return {_TAG: "complex", "of": [value.real, value.imag]}
    raise CheckpointError(
        f"`{where}` is a {kind.__module__}.{kind.__qualname__}, which would have to be pickled",
        hint="save it as tensors, numbers, text, bytes, or lists, tuples, sets and dicts of these.",
    )


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "complex": lambda of: complex(*of),
    "bytes": base64.b64decode, "bytearray": lambda of: bytearray(base64.b64decode(of)),
}  # fmt: skip


def _value(found: Any) -> Any:
    if isinstance(found, list):
        return [_value(item) for item in found]
    if isinstance(found, dict):
        of = found["of"]
        return _KINDS[found[_TAG]](_value(of) if isinstance(of, list) else of)
    return found
