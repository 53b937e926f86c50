"""Gradients meet in buckets as backward yields them, add up over all copies, and overlap changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from supernode.errors import ModelError
from supernode.syncing.buckets import LEAST, PIECES, ReplicaSync, all_reduce, fill

Together = Callable[..., list[Any]]
FLOAT = 4  # bytes


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
def test_a_bucket_holds_what_the_job_allows_or_one_parameter(given: tuple[int, ...], filled: list[list[int]]) -> None:
    assert sizes(fill(parameters(*given), 20 * FLOAT)) == filled


def test_a_bucket_holds_one_kind_of_number() -> None:
    mixed = [*parameters(2), *parameters(2, dtype=torch.bfloat16), *parameters(2)]

    assert sizes(fill(mixed, 10**6)) == [[2], [2], [2]]


def test_buckets_shrink_towards_the_end_of_backward_and_keep_the_order_of_arrival() -> None:
    unit = LEAST // FLOAT
    order = parameters(*[unit] * 256)

    buckets = fill(order, 2**40)

    assert [parameter for bucket in buckets for parameter in bucket] == order
    assert [len(bucket) for bucket in buckets[-5:]] == [16, 8, 4, 2, 1]
    assert max(len(bucket) for bucket in buckets) == 256 // PIECES
    assert len(buckets[0]) <= 4


def test_buckets_of_copies_on_one_host_are_as_large_as_they_may_be_but_for_the_ends() -> None:
    order = parameters(*[2**20 // FLOAT] * 60)

    buckets = fill(order, 25 * 2**20, near=True)

    assert [parameter for bucket in buckets for parameter in bucket] == order
    assert [len(bucket) for bucket in buckets] == [4, 5, 25, 25, 1]


class Net(nn.Module):
    """Tied ends, a layer used twice, a recomputed one, one that nobody uses and one that rank 1 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.idle = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, branch: bool) -> Tensor:
        x = self.twice(self.embedding(tokens)).tanh()
        x = self.twice(x)
        x = x + checkpoint(self.again, x, use_reentrant=False)
        return self.out(x + self.sometimes(x) if branch else x)


def tokens(step: int, rank: int, micro: int) -> Tensor:
    return torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro))


def backward(model: Net, step: int, rank: int, micro: int) -> float:
    loss = model(tokens(step, rank, micro), branch=bool(rank) or step == 0).square().sum()
    loss.backward()
    return float(loss.detach())


STEPS, MICROS = 3, 2


@dataclass
class Guarded:
    """A sum that happens as late as it may; fails if anything else touched the buffer meanwhile."""

    flat: Tensor
    seen: Tensor

    def wait(self) -> None:
        assert torch.equal(self.flat, self.seen), "the buffer was written to while it travelled"
        dist.all_reduce(self.flat)


def train(rank: int, *, micros: int = MICROS, late: bool = False, **settings: Any) -> list[Any]:
    """Return each step's losses and gradients; plain descent moves the weights."""
    model = Net()
    trained = list(model.parameters())
    assert dist.group.WORLD is not None
    start = (lambda flat, key: Guarded(flat, flat.clone())) if late else None
    sync = ReplicaSync(trained, dict.fromkeys(trained, micros), dist.group.WORLD, start=start, **settings)
    told = []
    for step in range(STEPS):
        sync.begin()
        for bucket in sync.buckets:
            bucket.flat.fill_(torch.nan)  # Whoever reads what an earlier step left would show it.
        losses = [backward(model, step, rank, micro) for micro in range(micros)]
        sync.finish()
        grads = [parameter.grad.clone() for parameter in trained if parameter.grad is not None]
        told.append((losses, grads))
        with torch.no_grad():
            for parameter, grad in zip(trained, grads, strict=True):
                parameter -= 0.01 * grad
    return told


def one_process() -> list[list[Tensor]]:
    whole = Net()
    told = []
    for step in range(STEPS):
        whole.zero_grad(set_to_none=False)
        for rank in range(2):
            for micro in range(MICROS):
                backward(whole, step, rank, micro)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in whole.parameters()]
        told.append(grads)
        with torch.no_grad():
            for parameter, grad in zip(whole.parameters(), grads, strict=True):
                parameter -= 0.01 * grad
    return told


def test_copies_get_one_processs_gradients_and_overlap_changes_no_bit(together: Together) -> None:
    def every_way(rank: int) -> list[Any]:
        return [
            train(rank, bucket_bytes=bucket_bytes, overlap=overlap, late=late)
            for bucket_bytes in (1, 600, 10**6)
            for overlap, late in ((True, False), (False, False), (True, True))
        ]

    first, second = together(every_way)
    expected = one_process()

    for ours, others in zip(first, second, strict=True):
        for (losses, grads), (_, other_grads), (known_losses, known), whole in zip(
            ours, others, first[0], expected, strict=True
        ):
            assert losses == known_losses
            for grad, other, same, right in zip(grads, other_grads, known, whole, strict=True):
                assert torch.equal(grad, other)
                assert torch.equal(grad, same)  # two copies: one sum of two numbers, whatever the buckets
                torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-5)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_leave_during_the_last_backward_and_not_before(together: Together, overlap: bool) -> None:
    def count(rank: int) -> list[int]:
        model = chain()
        trained = list(model.parameters())
        assert dist.group.WORLD is not None
        started: list[int] = []

        def start(flat: Tensor, key: str = "") -> Any:
            started.append(flat.numel())
            return all_reduce(dist.group.WORLD)(flat)  # type: ignore[arg-type]

        sync = ReplicaSync(
            trained, dict.fromkeys(trained, 2), dist.group.WORLD, start=start, bucket_bytes=1, overlap=overlap
        )
        seen = []

        def note(_: Tensor) -> None:
            seen.append(len(started))

        model(torch.ones(3, 4)).sum().backward()
        model(torch.ones(3, 4)).sum().backward()
        sync.finish()  # The order is known from here on.
        started.clear()
        sync.begin()
        note(torch.empty(0))
        model(torch.ones(3, 4)).sum().backward()
        note(torch.empty(0))
        x = torch.ones(3, 4, requires_grad=True)
        x.register_hook(note)
        model(x).sum().backward()
        sync.finish()
        return seen

    # Before the first and the second micro-batch none has left; when backward reaches the input all but the first
    # layer's have (its weight and bias come together with the input's gradient).
    for before_first, before_last, at_the_input in together(count):
        assert (before_first, before_last) == (0, 0)
        assert at_the_input >= 4 if overlap else at_the_input == 0


def test_the_order_is_that_of_arrival_on_the_first_copy_and_the_unused_are_told(together: Together) -> None:
    def learn(rank: int) -> tuple[list[int], list[int]]:
        weights = parameters(1, 2, 3, 4)
        assert dist.group.WORLD is not None
        sync = ReplicaSync(weights, dict.fromkeys(weights, 1), dist.group.WORLD, bucket_bytes=1)
        # Backward comes to what was used last first: to 2, 4 and 1 numbers on rank 0, in another order on rank 1.
        x = torch.ones(())
        for number in ((0, 3, 1), (3, 1))[rank]:
            x = x * (weights[number].sum() + 1)
        x.backward()
        sync.finish()
        return [bucket.flat.numel() for bucket in sync.buckets], [weight.numel() for weight in sync.unused]

    assert together(learn) == [([2, 4, 1, 3], [3])] * 2


def test_a_parameter_that_one_copy_does_not_use_still_gets_the_others_gradient(together: Together) -> None:
    def gradients(rank: int) -> list[float]:
        weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
        assert dist.group.WORLD is not None
        sync = ReplicaSync(weights, dict.fromkeys(weights, 1), dist.group.WORLD, bucket_bytes=1)
        for _ in range(2):
            sync.begin()
            used = weights[:2] if rank else weights[1:]
            sum(2 * weight for weight in used).backward()  # type: ignore[union-attr]
            sync.finish()
        return [float(weight.grad) for weight in weights if weight.grad is not None]

    assert together(gradients) == [[2.0, 4.0, 2.0]] * 2


def test_a_gradient_that_comes_after_its_bucket_left_is_an_error_and_not_lost(together: Together) -> None:
    def late(rank: int) -> str:
        model = chain()
        trained = list(model.parameters())
        assert dist.group.WORLD is not None
        sync = ReplicaSync(trained, dict.fromkeys(trained, 1), dist.group.WORLD)
        model(torch.ones(3, 4)).sum().backward()
        with pytest.raises(ModelError, match="more often than once a micro-batch") as caught:
            model(torch.ones(3, 4)).sum().backward()
        sync.finish()
        return caught.value.hint

    assert all("use_reentrant=False" in hint for hint in together(late))


def test_what_is_summed_is_handed_on_while_the_rest_still_travels(together: Together) -> None:
    def follow(rank: int) -> list[str]:
        model = chain()
        trained = list(model.parameters())
        names = {parameter: name for name, parameter in model.named_parameters()}
        assert dist.group.WORLD is not None
        told: list[str] = []

        @dataclass
        class Told:
            key: str

            def wait(self) -> None:
                told.append(f"wait {self.key}")

        def start(flat: Tensor, key: str = "") -> Told:
            return Told(key)

        sync = ReplicaSync(
            trained, dict.fromkeys(trained, 1), dist.group.WORLD, start=start, bucket_bytes=300,
            filled=lambda buckets: told.append(f"{len(buckets)} buckets"),
        )  # fmt: skip
        model(torch.ones(3, 4)).sum().backward()
        sync.finish(lambda parameters: told.append(" ".join(names[parameter] for parameter in parameters)))
        return told

    known, *first = together(follow)[0]
    assert known == f"{len(first) // 2} buckets"
    assert first[::2] == [f"wait bucket-{number}" for number in range(len(first) // 2)]
    assert set(" ".join(first[1::2]).split()) == {name for name, _ in chain().named_parameters()}
