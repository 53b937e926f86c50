"""What the tests of splitting share: forked ranks, and the law that a module in parts computes what it does whole."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from supernode.roles.report import SplitReport
from supernode.roles.shards import to_full
from supernode.splitting.export import Exported, export
from supernode.splitting.rewrite import split_tensor

_spec = importlib.util.spec_from_file_location("ranks_together", Path(__file__).parents[1] / "parallel" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)

together = _shared.together
Build = Callable[[], tuple[nn.Module, Tensor]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a module split over the tensor axis differs from itself in one process, each over the largest value."""

    report: SplitReport
    output: float
    gradients: dict[str, float]
    buffers: dict[str, float]
    unlike: list[str]

    @property
    def whole(self) -> set[str]:
        """Names of the parameters that every rank holds whole."""
        return {kept.name for kept in self.report.whole}

    def assert_same(self, tolerance: float = 1e-5) -> None:
        """Assert that output, gradients and buffers are those of one process, on all ranks."""
        wrong = {n: e for n, e in {**self.gradients, **self.buffers}.items() if not e <= tolerance}
        assert self.output <= tolerance
        assert not wrong
        assert not self.unlike


@pytest.fixture
def law(together: Callable[..., list[Any]]) -> Callable[..., dict[str, Outcome]]:
    """Return a function that splits modules over so many ranks, in one launch, and says how they differ from whole."""

    def run(modules: Mapping[str, Build], *, ranks: int) -> dict[str, Outcome]:
        # The ranks are forks of this process and inherit what is exported here once.
        prepared = {name: _prepare(*build()) for name, build in modules.items()}

        def part(_: int) -> dict[str, Outcome]:
            return {name: _compare(*made, ranks) for name, made in prepared.items()}

        found: dict[str, Outcome] = together(part, ranks=ranks)[0]
        return found

    return run


def _prepare(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor, Exported]:
    with torch.no_grad():  # Biases and norms away from zero and one, lest a wrong one go unseen.
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, x, export(copy.deepcopy(model), x)


def _compare(model: nn.Module, x: Tensor, split: Exported, ranks: int) -> Outcome:
    mesh = init_device_mesh("cpu", (ranks,))
    report = split_tensor(split.graph, mesh.get_group(), mesh, keeps_logits_split=False)
    expected, output = _logits(model(x)), split.rebuild(split.graph(x))
    for values in (expected, output):
        torch.manual_seed(2)
        (values * torch.randn(values.shape)).sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    kept = {k.name: k.split for k in (*report.parameters, *report.buffers)}
    gradients, unlike = {}, []
    for name, parameter in split.graph.named_parameters():
        grad = parameter.grad
        if grad is None:
            assert name not in wanted or not wanted[name].any(), name
            continue
        if kept[name] is None:
            others = [torch.empty_like(grad) for _ in range(ranks)]
            dist.all_gather(others, grad)
            unlike += [name] * any(_apart(other, grad, largest) > 1e-6 for other in others)
        gradients[name] = _apart(_full(grad, kept[name], mesh.get_group()), wanted[name], largest)
    buffers = {}
    for name, buffer in split.graph.named_buffers():
        if name in dict(model.named_buffers()):
            full = _full(buffer, kept.get(name), mesh.get_group())
            buffers[name] = _apart(full.double(), model.get_buffer(name).double(), 0.0)
    return Outcome(report, _apart(output, expected, 0.0), gradients, buffers, unlike)


def _apart(found: Tensor, expected: Tensor, largest: float) -> float:
    """Return the largest difference over the largest value; values that are zero but for rounding do not count."""
    assert found.shape == expected.shape
    scale = max(float(expected.detach().abs().max()), 1e-2 * largest, 1e-12)
    return float((found - expected).detach().abs().max()) / scale


def _full(tensor: Tensor, split: Any, group: dist.ProcessGroup) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor if split is None else to_full(tensor, split, group)


def _logits(output: Any) -> Tensor:
    found: Tensor = getattr(output, "logits", output)
    return found
