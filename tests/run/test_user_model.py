"""An ordinary PyTorch file trains in parallel as it is: parts shared, frozen, dropped out, normalised and all."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from supernode.control.training import status
from supernode.errors import DataError, ModelError
from supernode.intake.jobfile import job_to_dict, load_job
from supernode.schema.event import Event, StepDone
from supernode.schema.report import RunState

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_model.yaml"

FILE = """
import torch
from torch import nn

class Points(torch.utils.data.Dataset):
    def __init__(self, count, target):
        self.count, self.target = count, target
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, self.target(x)

def classes(): return Points(44, lambda x: (x.sum() > 0).long())
class Drawn(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index):
        k = int(torch.randint(6, ()))
        return nn.functional.one_hot(torch.tensor(k), 6).float(), torch.tensor(k % 2)
def drawn(): return Drawn()
class Holed(Points):
    def __getitem__(self, index):
        if index == 3: raise ValueError("the file of sample 3 is gone")
        return super().__getitem__(index)
def holed(): return Holed(16, lambda x: (x.sum() > 0).long())
def values(): return Points(48, lambda x: x[:2] * 2)
def few(): return Points(16, lambda x: x[:2] * 2)

def shared_and_frozen():
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8),
        nn.Linear(8, 2))
    model[6].weight = model[2].weight
    model[4].requires_grad_(False)
    return model

def shared_apart():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return model

def by_process():
    import os
    model = nn.Linear(6, 2)
    nn.init.constant_(model.weight, os.getpid())
    return model

def noisy():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

def parts_without_parameters(): return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(6, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, x): return super().forward(x) * self.scale

def scaled(): return Scaled()
class Idle(nn.Linear):
    def __init__(self):
        super().__init__(6, 2)
        self.idle = nn.Linear(6, 2)
def with_idle_parts(): return Idle()
def regression(): return nn.Linear(6, 2)
def squares(output, target): return (output - target).square().sum()
def not_a_model(): return "model"
def fails_in_forward():
    class Net(nn.Linear):
        def forward(self, x): raise ValueError("shapes are wrong")
    return Net(6, 2)
"""


@pytest.fixture(scope="module")
def file(workshop: Any) -> Path:
    path: Path = workshop.folder / "net.py"
    path.write_text(FILE)
    return path


def job(workshop: Any, file: Path, model: str, dataset: str, layout: dict[str, Any], **changes: Any) -> dict[str, Any]:
    changes = {"loss": "cross_entropy", "held_out_dataset": f"{file}:{dataset}"} | changes
    data = {
        "dataset": f"{file}:{dataset}",
        "loss": changes.pop("loss"),
        "held_out_dataset": changes.pop("held_out_dataset"),
    }
    made: dict[str, Any] = workshop.job(layout, model=f"{file}:{model}", data=data, **changes)
    return made


def test_the_example_trains_on_two_cards_as_on_one(workshop: Any, tmp_path: Path) -> None:
    example = job_to_dict(load_job(EXAMPLE)) | {"steps": 4, "threads": 1, "checkpoint": {"every": 2, "keep": 2}}

    two = workshop.run(example, tmp_path / "two")
    workshop.run(example | {"parallelism": {"data": 1}}, tmp_path / "one")

    assert two.held_out_loss is not None
    first, second = workshop.losses(tmp_path / "one"), workshop.losses(tmp_path / "two")
    assert second == pytest.approx(first, rel=1e-4)


def test_shared_and_frozen_parameters_are_so_on_every_layout(workshop: Any, tmp_path: Path, file: Path) -> None:
    layouts = {"one": {"data": 1}, "four": {"pipeline": 2, "data": 2}, "shards": {"data": 2, "sharding": "fsdp"}}
    for name, layout in layouts.items():
        workshop.run(job(workshop, file, "shared_and_frozen", "classes", layout), tmp_path / name)

    for name in ("four", "shards"):
        first, second = workshop.losses(tmp_path / "one"), workshop.losses(tmp_path / name)
        assert second == pytest.approx(first, rel=1e-4), name
    begun, ended = (workshop.tensors(tmp_path / "four", step) for step in (4, 6))
    assert begun["model.4.weight"].equal(ended["model.4.weight"])
    assert not begun["model.2.weight"].equal(ended["model.2.weight"])
    # A shared matrix is kept once, a frozen one has no moments.
    assert "model.6.weight" not in ended
    assert "optimizer.4.weight.exp_avg" not in ended


@pytest.mark.parametrize(
    ("model", "layout", "precision"),
    [
        ("parts_without_parameters", {"pipeline": 2, "data": 2}, "float32"),
        ("scaled", {"data": 2}, "float32"),
        ("scaled", {"data": 2}, "bfloat16"),
    ],
)
def test_uncommon_models_learn_on_several_cards_what_they_learn_on_one(
    workshop: Any, tmp_path: Path, file: Path, model: str, layout: dict[str, Any], precision: str
) -> None:
    for name, degrees in (("one", {"data": 1}), ("many", layout)):
        wanted = job(workshop, file, model, "classes", degrees, steps=3, precision=precision)
        workshop.run(wanted, tmp_path / name)

    # bfloat16 keeps 8 bits: gradients of two halves, each rounded, differ from the whole's by up to 1 / 256.
    tolerance = 1e-5 if precision == "float32" else 1e-2
    assert workshop.losses(tmp_path / "many") == pytest.approx(workshop.losses(tmp_path / "one"), rel=tolerance)


@pytest.mark.parametrize("layout", [{"data": 1}, {"data": 2}])
def test_parameters_that_no_gradient_comes_to_are_named(
    workshop: Any, tmp_path: Path, file: Path, layout: dict[str, Any]
) -> None:
    workshop.run(job(workshop, file, "with_idle_parts", "classes", layout, steps=2), tmp_path / "run")

    assert status(tmp_path / "run").notes["parameters without a gradient"] == "idle.weight, idle.bias"


def test_what_a_data_set_draws_at_random_is_the_same_on_every_layout(workshop: Any, tmp_path: Path, file: Path) -> None:
    for name, layout in (("one", {"data": 1}), ("many", {"pipeline": 2, "data": 2})):
        workshop.run(job(workshop, file, "parts_without_parameters", "drawn", layout), tmp_path / name)

    assert workshop.losses(tmp_path / "many") == pytest.approx(workshop.losses(tmp_path / "one"), rel=1e-5)


def test_what_fsdp_would_shard_apart_is_refused(workshop: Any, tmp_path: Path, file: Path) -> None:
    degrees = {"pipeline": 2, "data": 2, "interleave": 2, "schedule": "interleaved", "sharding": "fsdp"}
    with pytest.raises(ModelError, match="shared by two stages of one rank"):
        workshop.run(job(workshop, file, "shared_apart", "classes", degrees), tmp_path / "run")


def test_models_that_start_unlike_on_each_rank_are_refused(workshop: Any, tmp_path: Path, file: Path) -> None:
    with pytest.raises(ModelError, match="other values on other ranks"):
        workshop.run(job(workshop, file, "by_process", "classes", {"data": 2}), tmp_path / "run")


@pytest.mark.parametrize("layout", [{"data": 2}, {"pipeline": 2, "data": 2}], ids=["d2", "p2d2"])
def test_dropout_and_batch_norm_are_resumed_to_the_last_bit(
    workshop: Any, tmp_path: Path, file: Path, layout: dict[str, Any]
) -> None:
    def strike(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step == 3 and state.incarnation == 1:
            workshop.kill(1, signal=signal.SIGKILL)

    wanted = job(workshop, file, "noisy", "classes", layout, batch=16, gradient_accumulation=2)
    with pytest.raises(DataError, match=r"short last batch, and `[14]` would count"):
        workshop.run(wanted, tmp_path / "short")
    wanted["data"]["drop_last"] = True
    workshop.run(wanted, tmp_path / "quiet")
    workshop.run(wanted, tmp_path / "struck", watch=strike)

    assert status(tmp_path / "struck").failures == 1
    workshop.assert_same(tmp_path / "quiet", tmp_path / "struck")
    kept = workshop.tensors(tmp_path / "quiet")
    # Each copy of the model has seen other samples, and keeps its own means.
    assert not kept["buffer.0.1.running_mean"].equal(kept["buffer.1.1.running_mean"])


def test_the_users_own_loss_is_summed_over_cards(workshop: Any, tmp_path: Path, file: Path) -> None:
    for name, copies in (("one", 1), ("two", 2)):
        wanted = job(workshop, file, "regression", "values", {"data": copies}, loss=f"{file}:squares", steps=3)
        workshop.run(wanted, tmp_path / name)

    first, second = workshop.losses(tmp_path / "one"), workshop.losses(tmp_path / "two")
    assert second == pytest.approx(first, rel=1e-5)
    held_out = [status(tmp_path / name).held_out[3] for name in ("one", "two")]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)


def test_without_a_data_set_held_out_nothing_is_called_a_held_out_loss(
    workshop: Any, tmp_path: Path, file: Path
) -> None:
    report = workshop.run(
        job(workshop, file, "regression", "few", {"data": 1}, loss=f"{file}:squares", held_out_dataset="", steps=2),
        tmp_path / "run",
    )

    assert report.outcome == "finished"
    assert report.held_out_loss is None
    assert report.bigram_loss is None


@pytest.mark.parametrize(
    ("model", "layout", "kind", "words"),
    [
        ("not_a_model", {"data": 2}, ModelError, "returned a str"),
        ("regression", {"pipeline": 2, "data": 1}, ModelError, "cannot be cut into 2 stages that each train some"),
        ("fails_in_forward", {"data": 2}, ModelError, "shapes are wrong"),
        ("missing", {"data": 1}, ModelError, "no function `missing`"),
        ("scaled", {"data": 2, "sharding": "fsdp"}, ModelError, "`scale` of the model is a single number"),
    ],
)
def test_a_model_that_cannot_be_used_ends_the_run_with_its_own_words(
    workshop: Any, tmp_path: Path, file: Path, model: str, layout: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        workshop.run(job(workshop, file, model, "classes", layout), tmp_path / "run")

    assert caught.value.hint  # type: ignore[attr-defined]
    assert status(tmp_path / "run").outcome == "failed"
    assert workshop.server.children == []


def test_a_sample_that_fails_on_one_rank_ends_the_run_on_all(workshop: Any, tmp_path: Path, file: Path) -> None:
    asked = job(workshop, file, "regression", "holed", {"data": 2}, held_out_dataset="")

    with pytest.raises(DataError, match=r"sample 3 of .*the file of sample 3 is gone"):
        workshop.run(asked, tmp_path / "run")

    state = status(tmp_path / "run")
    assert (state.outcome, state.failures) == ("failed", 0)
    workshop.assert_tidy(tmp_path / "run")


def test_a_data_set_that_is_missing_ends_the_run_with_its_own_words(workshop: Any, tmp_path: Path, file: Path) -> None:
    with pytest.raises(DataError, match="no function `clases`") as caught:
        workshop.run(job(workshop, file, "regression", "clases", {"data": 2}), tmp_path / "run")

    assert "did you mean `classes`" in caught.value.hint
