"""Where random numbers come from: every generator is seeded anew from what the number is for, so none is ever saved."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def seed_for(seed: int, *key: object) -> int:
    """Return a seed that depends on all of `key` and nothing else; 63 bits.

    Every random number of a run comes from such a seed, so a resumed run draws what an undisturbed one would have.
    """
    text = "/".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, Python and, where it is loaded, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
