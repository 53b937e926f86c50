"""However a batch is dealt out, each of its samples is trained on once, and nothing else counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from supernode.data.sampler import Sampler
from supernode.errors import DataError
from supernode.hardware.assemble import build_machine
from supernode.parallel.tensor import IGNORED, cross_entropy
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, EvaluateSpec, JobSpec
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism
from supernode.training.data import Feed, TokenWindows, open_feed

MACHINE = build_machine(card_count=64, card="H100")


class Numbers:
    """Sample i is (i, i)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index]), torch.tensor([index])


def plan_of(*, batch: int, data: int = 1, accumulation: int = 1, spec: DataSpec | None = None) -> Plan:
    job = JobSpec(
        model="net.py:build" if spec else "tiny", batch=batch, gradient_accumulation=accumulation,
        parallelism=Parallelism(data=data), data=spec or DataSpec(), evaluate=EvaluateSpec(batches=100),
    )  # fmt: skip
    return make_plan(job, MACHINE)


def feed_of(plan: Plan, data: int, *, train: int, held_out: int = 5) -> Feed:
    return Feed(
        plan=plan, data=data, train=Numbers(train), held_out=Numbers(held_out),
        sampler=Sampler(train, plan.job.batch, 0, False), loss=cross_entropy,
        count=lambda target: int((target != IGNORED).sum()), pads=True,
    )  # fmt: skip


def test_windows_follow_each_other_and_targets_are_one_ahead() -> None:
    windows = TokenWindows(np.arange(10, dtype=np.uint16), 3)

    assert len(windows) == 3
    assert [window.tolist() for window in windows[2]] == [[6, 7, 8], [7, 8, 9]]
    assert windows[0][0].dtype == torch.int64
    assert len(TokenWindows(np.arange(3, dtype=np.uint8), 3)) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.data())
def test_all_ranks_together_read_each_sample_of_a_step_once(
    data: int, accumulation: int, size: int, train: int, draw: st.DataObject
) -> None:
    plan = plan_of(batch=data * accumulation * size, data=data, accumulation=accumulation)
    feeds = [feed_of(plan, rank, train=train) for rank in range(data)]
    step = draw.draw(st.integers(0, 2 * feeds[0].sampler.steps_per_epoch))

    batches = [feed.training(step) for feed in feeds]

    counted = []
    for feed, batch in zip(feeds, batches, strict=True):
        assert len(batch.inputs) == len(batch.targets) == accumulation
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            assert inputs.shape == targets.shape == (size, 1)
            here = targets != IGNORED
            assert feed.count(targets) == int(here.sum())
            assert torch.equal(inputs[here], targets[here])
            counted += targets[here].tolist()
    assert sorted(counted) == sorted(feeds[0].sampler.indices(step).tolist())


def test_micro_batches_are_dealt_out_alike_on_every_layout() -> None:
    one = feed_of(plan_of(batch=8, data=1, accumulation=4), 0, train=8).training(0)
    two = [feed_of(plan_of(batch=8, data=2, accumulation=4), rank, train=8).training(0) for rank in range(2)]

    for micro in range(4):
        assert torch.equal(one.inputs[micro], torch.cat([batch.inputs[micro] for batch in two]))


def test_evaluation_reads_all_that_is_held_out_once_and_no_more() -> None:
    feeds = [feed_of(plan_of(batch=4, data=2), rank, train=9, held_out=5) for rank in range(2)]

    assert feeds[0].evaluation_batches == 2
    batches = [feed.evaluation(number) for number in range(2) for feed in feeds]
    seen = torch.cat([target for batch in batches for target in batch.targets]).flatten()
    assert sorted(seen[seen != IGNORED].tolist()) == list(range(5))


USER = """
import torch

class Set:
    def __init__(self, count, target, broken=None):
        self.count, self.target, self.broken = count, target, broken
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if self.broken == "raises":
            raise KeyError("no such picture")
        if self.broken == "single":
            return torch.ones(2)
        if self.broken == "uneven":
            return torch.ones(2 + index), self.target
        return torch.full((2,), float(index)), self.target

def ten(): return Set(10, torch.tensor([0.5]))
def eight(): return Set(8, torch.tensor([0.5]))
def classes(): return Set(10, torch.tensor(1))
def numpy():
    import numpy
    return [(numpy.ones(2, numpy.float32), 1)] * 8
def raises(): return Set(8, torch.tensor(1), "raises")
def single(): return Set(8, torch.tensor(1), "single")
def uneven(): return Set(8, torch.tensor(1), "uneven")
def loss(output, target): return (output - target).square().sum()
def mean_of_rows(output, target): return (output - target).square()
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER)
    return tmp_path / "user.py"


def opened(user: Path, dataset: str, *, loss: str = "", data: int = 1, batch: int = 4, accumulation: int = 1) -> Feed:
    own = f"{user}:{dataset}"
    spec = DataSpec(dataset=own, held_out_dataset=own, loss=f"{user}:{loss}" if loss else "cross_entropy")
    return open_feed(plan_of(batch=batch, data=data, accumulation=accumulation, spec=spec), None, 0)


def test_the_users_own_samples_are_read_whatever_kind_of_number_they_are(user: Path) -> None:
    batch = opened(user, "numpy").training(0)

    assert batch.inputs[0].shape == (4, 2)
    assert batch.targets[0].tolist() == [1, 1, 1, 1]


def test_inputs_come_in_the_models_precision_and_targets_as_they_are(user: Path) -> None:
    plan = plan_of(batch=4, spec=DataSpec(dataset=f"{user}:eight", loss=f"{user}:loss"))
    plan = replace(plan, job=replace(plan.job, precision="bfloat16"))

    batch = open_feed(plan, None, 0).training(0)

    assert (batch.inputs[0].dtype, batch.targets[0].dtype) == (torch.bfloat16, torch.float32)


def test_a_short_batch_of_classes_is_filled_up_with_what_does_not_count(user: Path) -> None:
    feed = opened(user, "classes", data=2)

    batch = feed.training(2)

    assert batch.inputs[0].shape == (2, 2)
    assert sum(feed.count(target) for target in batch.targets) == 2


def test_a_short_batch_under_the_users_own_loss_is_short(user: Path) -> None:
    feed = opened(user, "ten", loss="loss", accumulation=2)

    short = feed.training(2)
    held_out = [feed.evaluation(number) for number in range(feed.evaluation_batches)]

    assert [len(inputs) for inputs in short.inputs] == [2]
    assert sum(feed.count(target) for target in short.targets) == 2
    assert sum(feed.count(target) for batch in held_out for target in batch.targets) == 10


def test_on_several_cards_the_users_own_loss_needs_whole_batches(user: Path) -> None:
    with pytest.raises(DataError, match="short last batch") as caught:
        opened(user, "ten", loss="loss", data=2)
    feed = opened(user, "eight", loss="loss", data=2, batch=8)

    assert "drop_last" in caught.value.hint
    assert feed.evaluation_batches == 1


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("raises", "sample .* raised KeyError: 'no such picture'"),
        ("single", "is a Tensor, not"),
        ("uneven", "differ in shape"),
        ("ten", r"targets are torch\.float32"),
    ],
)
def test_samples_that_cannot_be_used_are_named(user: Path, dataset: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        opened(user, dataset).training(0)

    assert caught.value.hint


def test_a_loss_that_is_no_number_is_refused(user: Path) -> None:
    feed = opened(user, "eight", loss="mean_of_rows")

    with pytest.raises(DataError, match="no single number") as caught:
        feed.loss(torch.ones(4, 1), torch.ones(4, 1))

    assert "sum" in caught.value.hint


@pytest.mark.parametrize("axis", [{"context": 2}, {"tensor": 2, "sequence": True}], ids=str)
def test_a_shared_sequence_of_another_length_than_the_jobs_is_refused(axis: dict[str, Any]) -> None:
    job = JobSpec(
        batch=2, data=DataSpec(dataset="mine.py:data", sequence=8), parallelism=Parallelism(data=1, **axis)
    )  # fmt: skip
    feed = replace(feed_of(plan_of(batch=2), 0, train=9), plan=make_plan(job, MACHINE))

    with pytest.raises(DataError, match=rf"shape \[1\], and `parallelism\.{list(axis)[-1]}` cuts .* 8") as caught:
        feed.training(0)
    assert "`data.sequence` to the length of your samples" in caught.value.hint
