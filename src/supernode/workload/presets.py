"""Which public models are known by name? Their shapes and where they come from, read from `models.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from supernode.errors import SpecError
from supernode.workload.shape import ModelShape, make_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a shape comes from.

    Attributes:
        source: who published it.
        assumed: what of it was not published, in words; empty where all was.
    """

    source: str
    assumed: str = ""


FILE = Path(__file__).parent / "models.yaml"


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return content


def public_models() -> tuple[str, ...]:
    """Return the names."""
    return tuple(_content())


@cache
def public_model(name: str) -> ModelShape:
    """Return the shape of a public model.

    Raises:
        SpecError: there is no such model.

    >>> round(float(public_model("llama3-70b").parameters) / 1e9, 1)
    70.6
    """
    return make_shape(**_entry(name)["shape"])


def provenance(name: str) -> Provenance:
    """Return where the shape of a public model comes from, and what of it is assumed.

    Raises:
        SpecError: there is no such model.
    """
    entry = _entry(name)
    return Provenance(source=entry["source"], assumed=entry.get("assumed", ""))


def _entry(name: str) -> dict[str, Any]:
    if name not in _content():
        raise SpecError(f"no public model {name!r}", hint=f"choose one of {', '.join(_content())}.")
    entry: dict[str, Any] = _content()[name]
    return entry
