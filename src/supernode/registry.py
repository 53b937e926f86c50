"""Which name means what: look a name up in a table, else in the entry points, else say what is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import TypeVar

from supernode.errors import SpecError

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown name: the nearest known one if there is one, and the list.

    >>> did_you_mean("tensr", ["tensor", "data"])
    'did you mean `tensor`? Known: data, tensor.'
    """
    names = sorted(known)
    by_lower = {candidate.lower(): candidate for candidate in names}
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    nearest = f"did you mean `{by_lower[near[0]]}`? " if near else ""
    return f"{nearest}Known: {', '.join(names)}."


def lookup(name: str, table: Mapping[str, T], *, kind: str, group: str = "") -> T:
    """Return what `name` stands for.

    Args:
        name: what the user wrote; upper and lower case are the same.
        table: the room's own table.
        kind: what a name stands for, in the field's word ("topology"); used in the error.
        group: entry-point group that plug-ins use; empty where the room takes none.

    Raises:
        SpecError: nobody knows the name.
    """
    by_lower = {key.lower(): value for key, value in table.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    plugins = {point.name: point for point in entry_points(group=group)} if group else {}
    if name in plugins:
        loaded: T = plugins[name].load()
        return loaded
    raise SpecError(f"unknown {kind} `{name}`", hint=did_you_mean(name, [*table, *plugins]))
