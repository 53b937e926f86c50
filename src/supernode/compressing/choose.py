"""Which compressor is meant? The table of names, and what a job says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from supernode.compressing.codecs import Float8, Int8, Levels, OneBit, TopK
from supernode.compressing.coded import Coded
from supernode.compressing.compressor import Compressor
from supernode.compressing.powersgd import PowerSgd
from supernode.registry import lookup
from supernode.schema.spread import Communication

Make = Callable[[Communication, int], Compressor[Any]]

COMPRESSORS: dict[str, Make] = {
    "int8": lambda said, seed: Coded("int8", Int8(), warmup=said.warmup),
    "float8": lambda said, seed: Coded("float8", Float8(), warmup=said.warmup),
    "topk": lambda said, seed: Coded("topk", TopK(said.density), warmup=said.warmup),
    "powersgd": lambda said, seed: PowerSgd(said.rank, seed=seed, warmup=said.warmup),
    "levels5": lambda said, seed: Coded("levels5", Levels(5), evens=True, warmup=said.warmup),
    "levels7": lambda said, seed: Coded("levels7", Levels(7), evens=True, warmup=said.warmup),
    "onebit": lambda said, seed: Coded("onebit", OneBit(), warmup=said.warmup),
}


def compressor(said: Communication, *, seed: int = 0) -> Compressor[Any] | None:
    """Return a new compressor as a job wants it; None where gradients travel as they are.

    Raises:
        SpecError: nobody knows its name.
    """
    if said.compress == "none":
        return None
    return lookup(said.compress, COMPRESSORS, kind="compressor")(said, seed)
