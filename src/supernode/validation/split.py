"""Which rows may the parameters be fitted to? At most half of a table, chosen by what was run, never by how it went."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

Key = tuple[str, ...]


def fitting_keys(table: str, keys: Iterable[Key], *, salt: str = "") -> frozenset[Key]:
    """Return the configurations of the fitting half.

    Configurations are put in the order of their hash and taken until half of the rows are; rows that repeat one
    configuration fall on one side.

    Args:
        table: name of the table, part of what is hashed.
        keys: the configuration of each row.
        salt: makes another split; the project's own has none.

    >>> sorted(fitting_keys("t", [("a",), ("b",), ("b",), ("c",)]))
    [('a',), ('c',)]
    """
    rows = Counter(keys)
    most, taken, chosen = rows.total() // 2, 0, set()
    for key in sorted(rows, key=lambda key: _digest(table + salt, key)):
        if taken + rows[key] <= most:
            chosen.add(key)
            taken += rows[key]
    return frozenset(chosen)


def _digest(table: str, key: Key) -> str:
    return hashlib.sha256("|".join((table, *key)).encode()).hexdigest()
