"""Gradients meet in buckets as backward yields them, and add up over all copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from supernode.errors import ModelError
from supernode.parallel.sync import ReplicaSync, _fill_buckets

Together = Callable[..., list[Any]]


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def sizes(buckets: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[parameter.numel() for parameter in bucket] for bucket in buckets]


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ((), []),
        ((5,), [[5]]),
        ((10, 10), [[10, 10]]),
        ((10, 11), [[10], [11]]),
        ((50, 1, 1), [[50], [1, 1]]),
        ((1, 50, 1), [[1], [50], [1]]),
    ],
)
def test_buckets_are_filled_in_order_up_to_their_size(given: tuple[int, ...], filled: list[list[int]]) -> None:
    assert sizes(_fill_buckets(parameters(*given), 80)) == filled  # 80 bytes hold 20 float32


def test_a_bucket_holds_one_kind_of_number() -> None:
    mixed = [*parameters(2), *parameters(2, dtype=torch.bfloat16), *parameters(2)]

    assert sizes(_fill_buckets(mixed, 10**6)) == [[2], [2], [2]]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def samples(rank: int, micro: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + micro))


@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_two_copies_end_up_with_the_sum_of_their_gradients(together: Together, bucket_bytes: int) -> None:
    def train(rank: int) -> list[Tensor]:
        model = net()
        trained = list(model.parameters())
        assert dist.group.WORLD is not None
        sync = ReplicaSync(trained, dict.fromkeys(trained, 2), dist.group.WORLD, bucket_bytes=bucket_bytes)
        for _ in range(2):  # The second step must not see the first one's gradients.
            sync.start()
            for micro in range(2):
                model(samples(rank, micro)).sum().backward()
            sync.finish()
        return [parameter.grad.clone() for parameter in trained if parameter.grad is not None]

    both = together(train)
    whole = net()
    for rank in range(2):
        for micro in range(2):
            whole(samples(rank, micro)).sum().backward()

    for first, second, parameter in zip(*both, whole.parameters(), strict=True):
        assert torch.equal(first, second)
        assert parameter.grad is not None
        assert torch.allclose(first, parameter.grad, atol=1e-5)


def test_a_parameter_that_one_copy_does_not_use_still_gets_the_others_gradient(together: Together) -> None:
    def train(rank: int) -> list[float]:
        weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
        assert dist.group.WORLD is not None
        sync = ReplicaSync(weights, dict.fromkeys(weights, 1), dist.group.WORLD, bucket_bytes=1)
        used = weights[:2] if rank else weights[1:]
        sum(2 * weight for weight in used).backward()  # type: ignore[union-attr]
        sync.finish()
        return [float(weight.grad) for weight in weights if weight.grad is not None]

    assert together(train) == [[2.0, 4.0, 2.0]] * 2


def test_a_gradient_that_comes_after_its_bucket_left_is_an_error_and_not_lost(together: Together) -> None:
    def train(rank: int) -> str:
        model = net()
        trained = list(model.parameters())
        sync = ReplicaSync(trained, dict.fromkeys(trained, 1), dist.group.WORLD)
        sync.start()
        model(samples(rank, 0)).sum().backward()
        with pytest.raises(ModelError, match="more often than once a micro-batch") as caught:
            model(samples(rank, 1)).sum().backward()
        sync.finish()
        return caught.value.hint

    assert all("use_reentrant=False" in hint for hint in together(train, ranks=2))
