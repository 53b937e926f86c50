"""Whatever the user's code does in its own process, the asker gets a trace or an error with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from supernode.backends.tracing import trace
from supernode.errors import DataError, ModelError
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.trace import TraceRequest

pytestmark = pytest.mark.slow

FILE = """
import os, sys, time
import torch
from torch import nn

class Points(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, index):
        return torch.tensor([float(index)] * 6), torch.tensor(index).clamp(0, 1)

def points(): return Points()
def nothing(): return []
def fine():
    print("hello")
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
def dies(): os._exit(3)
def sleeps(): time.sleep(600)
def raises(): raise RuntimeError("no weights at hand")
class Wrong(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(5, -1))
def wrong(): return Wrong(6, 2)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def request(file: Path, function: str, dataset: str = "points") -> TraceRequest:
    job = JobSpec(model=f"{file}:{function}", data=DataSpec(dataset=f"{file}:{dataset}"))
    return TraceRequest(job=job, micro_batch=4)


def test_a_module_that_prints_is_traced(file: Path) -> None:
    found = trace(request(file, "fine"))

    assert found.parameters == 6 * 4 + 4 + 4 * 2 + 2
    assert found.children == ("0", "1", "2")
    assert found.flops(10) == pytest.approx(10 * 2 * (2 * 24 + 3 * 8))  # nothing asks for the input's gradient


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", r"raised RuntimeError: no weights at hand \(mine\.py, line 18\)"),
        ("wrong", r"RuntimeError: .*mine\.py, line 21"),
        ("dies", "ended with exit code 3"),
        ("absent", "has no function `absent`"),
    ],
)
def test_what_goes_wrong_names_the_line_and_shows_no_traceback(file: Path, function: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        trace(request(file, function))

    assert "Traceback" not in str(caught.value)
    assert caught.value.hint


def test_data_that_cannot_be_read_is_told_as_such(file: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        trace(request(file, "fine", dataset="nothing"))


def test_code_that_hangs_is_ended(file: Path) -> None:
    with pytest.raises(ModelError, match="more than 8 s"):
        trace(request(file, "sleeps"), most_seconds=8)
