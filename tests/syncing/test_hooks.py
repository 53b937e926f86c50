"""Plain PyTorch models send compressed gradients: DistributedDataParallel by a hook, FSDP2 by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from supernode.compressing.choose import COMPRESSORS
from supernode.errors import ModelError, SpecError
from supernode.syncing.hooks import HookState, compress_fsdp, hook

Together = Callable[..., list[Any]]


def net() -> nn.Sequential:
    """Return a net whose matrices, halved, have a block of any codec."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 144), nn.Tanh(), nn.Linear(144, 64), nn.Tanh(), nn.Linear(64, 8))


def samples(rank: int) -> Tensor:
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(rank))


def backward(model: nn.Module, rank: int) -> list[Tensor]:
    """Return the gradients of one step, whole."""
    model.zero_grad(set_to_none=True)
    model(samples(rank)).square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads]


def truth(ranks: int) -> list[Tensor]:
    sums = [backward(net(), rank) for rank in range(ranks)]
    return [torch.stack(grads).mean(0) for grads in zip(*sums, strict=True)]


def off(found: list[Tensor], true: list[Tensor]) -> float:
    """Return how far gradients are from the truth, matrices together, over the truth."""
    gap = torch.cat([(f - t).reshape(-1) for f, t in zip(found, true, strict=True) if t.ndim > 1])
    return float(gap.norm() / torch.cat([t.reshape(-1) for t in true if t.ndim > 1]).norm())


def mean(model: nn.Module, rank: int, steps: int) -> list[Tensor]:
    sums = [torch.zeros_like(grad) for grad in backward(model, rank)]
    for _ in range(steps):
        for total, grad in zip(sums, backward(model, rank), strict=True):
            total.add_(grad, alpha=1 / steps)
    return sums


def test_without_a_compressor_the_hook_gives_what_ddp_gives(together: Together) -> None:
    def train(rank: int) -> bool:
        state = HookState("none")
        ours, plain = DistributedDataParallel(net()), DistributedDataParallel(net())
        ours.register_comm_hook(state, hook)
        alike = []
        for _ in range(3):
            ours_grads, plain_grads = backward(ours, rank), backward(plain, rank)
            alike += [torch.equal(one, other) for one, other in zip(ours_grads, plain_grads, strict=True)]
        state.close()
        return all(alike)

    assert together(train) == [True, True]


def test_every_compressor_averages_gradients_in_the_mean_over_steps(together: Together) -> None:
    def train(rank: int) -> dict[str, tuple[float, float]]:
        found = {}
        for kind in COMPRESSORS:
            state = HookState(kind, rank=3, density=0.1)
            model = DistributedDataParallel(net(), bucket_cap_mb=0.01)
            model.register_comm_hook(state, hook)
            first = off(backward(model, rank), truth(2))  # Travels whole.
            found[kind] = first, off(mean(model, rank, 40), truth(2))
            state.close()
        return found

    for kind, (first, later) in together(train)[0].items():
        assert first < 1e-6, kind
        assert 1e-6 < later < 0.15, kind


def test_a_loaded_state_is_taken_up_once_the_buckets_are_known(together: Together) -> None:
    def train(rank: int) -> dict[str, tuple[bool | None, bool]]:
        found = {}
        for kind in COMPRESSORS:
            state = HookState(kind, rank=3, density=0.1)
            model = DistributedDataParallel(net())
            model.register_comm_hook(state, hook)
            mean(model, rank, 3)
            saved = {name: tensor.clone() for name, tensor in state.state_dict().items()}
            unbroken = backward(model, rank)
            state.close()
            other = HookState(kind, rank=3, density=0.1)
            other.load_state_dict(saved)
            again = DistributedDataParallel(net())
            again.register_comm_hook(other, hook)
            backward(again, rank)  # Travels whole; what was held back waits.
            resumed = backward(again, rank)
            assert other._compressed is not None
            found[kind] = other._compressed.kept, all(map(torch.equal, unbroken, resumed))
            other.close()
        return found

    assert together(train) == [dict.fromkeys(COMPRESSORS, (True, True))] * 2


def test_sharded_modules_send_compressed(together: Together) -> None:
    def train(rank: int) -> dict[str, tuple[float, bool]]:
        found = {}
        mesh = init_device_mesh("cpu", (2,))
        for kind in COMPRESSORS:
            model = net()
            fully_shard(model[2], mesh=mesh)
            fully_shard(model, mesh=mesh)
            state = compress_fsdp(model, kind, rank=3, density=0.1)
            gap = off(mean(model, rank, 25), truth(2))
            saved = {name: tensor.clone() for name, tensor in state.state_dict().items()}
            unbroken = backward(model, rank)
            state.load_state_dict(saved)
            resumed = backward(model, rank)
            found[kind] = gap, all(torch.equal(one, other) for one, other in zip(unbroken, resumed, strict=True))
        return found

    for kind, (gap, alike) in together(train)[0].items():
        assert 1e-6 < gap < 0.2, kind
        assert alike, f"{kind}: another number after the state was loaded"


def test_replicas_of_shards_send_compressed_between_them(together: Together) -> None:
    def train(rank: int) -> dict[str, float]:
        found = {}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for kind in ("int8",):
            model = net()
            fully_shard(model, mesh=mesh["shard"])
            compress_fsdp(model, kind, replicas=mesh["replicate"].get_group(), rank=3)
            found[kind] = off(mean(model, rank, 10), truth(4))
        return found

    for kind, gap in together(train, ranks=4)[0].items():
        assert 1e-6 < gap < 0.15, kind


def test_a_rank_that_shards_alone_rounds_nothing(together: Together) -> None:
    def train(rank: int) -> float:
        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        compress_fsdp(model, "onebit")
        return off(mean(model, rank, 3), truth(1))

    assert together(train, ranks=1)[0] < 1e-6


def test_what_cannot_be_is_refused_with_a_remedy() -> None:
    with pytest.raises(ModelError, match="no module"):
        compress_fsdp(net(), "int8")
    with pytest.raises(SpecError, match="none"):
        compress_fsdp(net(), "none")
    with pytest.raises(SpecError, match="unknown compressor `intt8`"):
        compress_fsdp(net(), "intt8")


@pytest.mark.parametrize(
    ("argument", "given"),
    [("where", "bogus"), ("rank", 1.5), ("rank", "4"), ("density", "x"), ("density", float("nan")), ("warmup", None),
     ("compress", None), ("seed", 2**70), ("group", 3)],
)  # fmt: skip
def test_an_argument_of_the_hook_is_held_against_the_kinds_and_limits_of_a_job(
    together: Together, argument: str, given: object
) -> None:
    def make(rank: int) -> str:
        said: dict[str, Any] = {"compress": "powersgd"} | {argument: given}
        try:
            HookState(**said)
        except SpecError as error:
            return error.message
        return ""

    assert f"{argument}` is " in together(make, ranks=1)[0]


def test_a_hook_is_made_after_the_ranks_have_met() -> None:
    with pytest.raises(ModelError, match="before the ranks have met"):
        HookState("int8")


def test_a_state_that_no_hook_gave_is_refused(together: Together) -> None:
    def load(rank: int) -> int:
        state, refused = HookState("int8"), 0
        states: tuple[Any, ...] = ({}, None, {"steps": torch.tensor(torch.nan)}, {"steps": torch.tensor([1, 2])})
        for given in states:
            with pytest.raises(ModelError, match="number of steps"):
                state.load_state_dict(given)
            refused += 1
        state.close()
        return refused

    assert together(load, ranks=1)[0] == 4
