"""How a value becomes JSON and comes back: one codec for every noun, from the same dataclasses that Python uses."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from supernode.errors import RunError

T = TypeVar("T")


@cache
def _built(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader and writer of a type; building one costs milliseconds, so each is built once."""
    built: TypeAdapter[Any] = _built(kind)
    return built


def to_plain(value: Any) -> Any:
    """Return a dataclass as dictionaries, lists, text and numbers. NaN and infinities stay numbers."""
    return adapter(type(value)).dump_python(value, mode="json")


def to_json(value: Any) -> str:
    """Return a dataclass as one line of JSON.

    A diverged loss must survive, so NaN and infinities are written as Python's `json` writes them (`NaN`, `Infinity`);
    pydantic alone would write `null`. Half a surrogate pair, which file names and messages can hold and UTF-8 cannot,
    becomes `?`.
    """
    return json.dumps(to_plain(value), ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")


def from_json(kind: type[T], text: str | bytes) -> T:
    """Return the value that `to_json` wrote.

    Raises:
        RunError: the text is not JSON, or not a `kind` as this version knows it.
    """
    try:
        value: T = adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise RunError(
            f"a record cannot be read as {kind.__name__}: {f'`{place}`: ' if place else ''}{first['msg']}",
            hint="use the version of supernode that wrote it, or start a new run.",
        ) from error
    return value
