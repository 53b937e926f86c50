"""Which public models are known by name? Their shapes, read from `models.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from supernode.errors import SpecError
from supernode.workload.shape import ModelShape, make_shape

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
    if name not in _content():
        raise SpecError(f"no public model {name!r}", hint=f"choose one of {', '.join(_content())}.")
    return make_shape(**_content()[name]["shape"])
