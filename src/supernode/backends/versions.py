"""Is the torch that is installed one that was tried? Its private parts, which pipelines and sharding use, change."""

from __future__ import annotations

import re

TORCH = ((2, 13), (2, 14))
"""First version that was tried, and the first one that was not; as `pyproject.toml` has it."""


def trouble(version: str) -> str:
    """Return why ranks cannot run on a version of torch; empty where they can.

    >>> trouble("2.13.0+cpu")
    ''
    >>> trouble("2.11.0")
    'torch 2.11.0 is installed, and ranks were tried with 2.13 up to, not including, 2.14'
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    first, after = TORCH
    if found and first <= (int(found[1]), int(found[2])) < after:
        return ""
    least, most = (".".join(map(str, numbers)) for numbers in TORCH)
    return f"torch {version} is installed, and ranks were tried with {least} up to, not including, {most}"
