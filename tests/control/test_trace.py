"""A module that trains has a plan, be it one whose time and memory stay open."""

from __future__ import annotations

from pathlib import Path

import pytest

from supernode.control.supernode import SuperNode
from supernode.schema.job import DataSpec, JobSpec

pytestmark = pytest.mark.slow

FILE = """
import torch
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

class Points(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index):
        return torch.ones(6), torch.tensor(index % 2)

class Shy(nn.Linear):
    def forward(self, x):
        if _len_torch_dispatch_stack():
            raise NotImplementedError("not while someone counts")
        return super().forward(x)

def points(): return Points()
def shy(): return Shy(6, 2)
def open_(): return nn.Linear(6, 2)
"""


@pytest.mark.parametrize(("function", "is_known"), [("shy", False), ("open_", True)])
def test_a_module_that_cannot_be_counted_is_planned_without_time_and_memory(
    tmp_path: Path, function: str, is_known: bool
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    job = JobSpec(model=f"{file}:{function}", data=DataSpec(dataset=f"{file}:points"), batch=8)

    plan = SuperNode(8).plan(job)

    assert plan.ranks == 8
    assert (plan.memory is not None) == is_known
    assert (plan.step is not None) == is_known
    assert ("a step of your module runs, and counting" in plan.notes[0]) != is_known
