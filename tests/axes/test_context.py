"""Ring attention against PyTorch's attention over the whole sequence in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from supernode.axes.context import places_of, ring_attention

Together = Callable[..., list[Any]]


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Return attention over the whole sequence by the textbook's formula, and its three gradients."""
    q, k, v = (part.double().requires_grad_() for part in (q, k, v))
    times = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(times, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(times, 1)
    return [mixed.detach(), *torch.autograd.grad(mixed, (q, k, v), grad.double())]


def sample(batch: int, heads: int, key_heads: int, tokens: int, width: int, scale: float = 1.0) -> list[Tensor]:
    dice = torch.Generator().manual_seed(heads * tokens)
    sizes = (heads, key_heads, key_heads, heads)
    return [torch.randn(batch, size, tokens, width, generator=dice) * scale for size in sizes]


CASES = {
    "plain": sample(2, 4, 4, 24, 8),
    "grouped": sample(2, 4, 2, 48, 8),
    "one key head": sample(1, 6, 1, 24, 16),
    "long": sample(1, 2, 1, 1560, 8),  # longer than a tile of PyTorch's kernel
    "sharp": sample(1, 2, 2, 24, 8, scale=12.0),  # exponents that would overflow without the running maximum
}


Results = dict[str, list[Tensor]]


def in_ring(rank: int, dtype: torch.dtype) -> Results:
    results = {}
    for name, case in CASES.items():
        mine = places_of(case[0].shape[2], rank=rank, ranks=dist.get_world_size())
        # As a model yields them: heads second in sight, tokens second in memory.
        q, k, v, grad = (part[:, :, mine].to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for part in case)
        for part in (q, k, v):
            part.requires_grad_()
        mixed = ring_attention(q, k, v, dist.group.WORLD)  # type: ignore[arg-type]
        results[name] = [mixed.detach(), *torch.autograd.grad(mixed, (q, k, v), grad)]
    return results


def compare(parts: list[Results], cases: list[str], *, tolerance: float) -> None:
    for name in cases:
        case = CASES[name]
        places = torch.cat([places_of(case[0].shape[2], rank=r, ranks=len(parts)) for r in range(len(parts))])
        for what, expected, *pieces in zip(
            ("mixed", "dq", "dk", "dv"), whole(*case), *(part[name] for part in parts), strict=True
        ):
            got = torch.empty_like(expected)
            got[:, :, places] = torch.cat(pieces, dim=2).double()
            gap = (got - expected).norm() / expected.norm()
            assert gap < tolerance, f"{name}, {what}: {gap:.1e}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_attends_as_one_process_does_forward_and_backward(together: Together, ranks: int) -> None:
    parts = together(lambda rank: in_ring(rank, torch.float32), ranks=ranks)

    compare(parts, ["plain", "grouped", "one key head", "long"], tolerance=2e-6)
    # Scores of a thousand are rounded by up to 6e-5 in float32, and their exponents by that share.
    compare(parts, ["sharp"], tolerance=6e-5)


def test_a_ring_of_four_sums_half_precision_in_single(together: Together) -> None:
    both = together(lambda rank: [in_ring(rank, dtype) for dtype in (torch.float64, torch.bfloat16)], ranks=4)

    compare([part[0] for part in both], list(CASES), tolerance=1e-12)
    # bfloat16 keeps 8 bits: a rounding is off by up to 2^-9, and inputs, products and results are rounded.
    compare([part[1] for part in both], ["plain", "grouped", "one key head", "long"], tolerance=1e-2)


def test_places_are_a_partition_in_which_every_rank_sees_as_much() -> None:
    tokens, ranks = 48, 4
    parts = [places_of(tokens, rank=rank, ranks=ranks) for rank in range(ranks)]

    assert sorted(torch.cat(parts).tolist()) == list(range(tokens))
    assert all((part.diff() > 0).all() for part in parts)
    assert {int((part + 1).sum()) for part in parts} == {tokens * (tokens + 1) // 2 // ranks}
    assert places_of(7, rank=0, ranks=1).tolist() == list(range(7))


def test_a_ring_of_one_is_pytorchs_attention(together: Together) -> None:
    q, k, v, _ = CASES["grouped"]
    alone = together(lambda _: ring_attention(q, k, v, dist.group.WORLD), ranks=1)[0]  # type: ignore[arg-type]

    assert torch.equal(alone, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
