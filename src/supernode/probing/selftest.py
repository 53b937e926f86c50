"""Does a card compute and remember as it should? Products and patterns whose values are known another way."""

from __future__ import annotations

import torch

_SIZE = 256
_ROUNDS = 8
_PATTERN_BYTES = 2**26


def passes() -> bool:
    """Tell whether the card at hand gives right numbers, in a second or less.

    Products of whole numbers below 8 are exact in float32 (sums stay below 2²⁴), so they must be equal to the same
    products of integers; a pattern must be read as it was written.
    """
    drawn = torch.Generator().manual_seed(0)
    for _ in range(_ROUNDS):
        left, right = (torch.randint(0, 8, (_SIZE, _SIZE), generator=drawn) for _ in range(2))
        if not torch.equal((left.float() @ right.float()).long(), left @ right):
            return False
    for byte in (0x55, 0xAA):
        held = torch.full((_PATTERN_BYTES,), byte, dtype=torch.uint8)
        if int(held.sum(dtype=torch.int64)) != byte * _PATTERN_BYTES:
            return False
    return True
