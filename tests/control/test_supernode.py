"""The machine in the user's hands: the sample of the specification as written, and errors that say what would fit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supernode import JobSpec, SuperNode, SupernodeError
from supernode.control.supernode import as_job
from supernode.errors import CapacityError, MachineError, RunError, SpecError
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec
from supernode.schema.model import PRESETS
from supernode.schema.spread import Balance, Communication, Parallelism
from supernode.search.best import room_of

SAMPLE = """
from cluster_sdk import SuperNode
supernode = SuperNode(card_count=512, interconnect='3D_Ring', cooling='liquid')
gpu_slice = supernode.allocate(gpu_memory=80*1024, inter_bandwidth=400)
"""


def test_the_sample_of_the_specification_runs_as_written() -> None:
    scope: dict[str, Any] = {}

    exec(SAMPLE, scope)

    granted = scope["gpu_slice"]
    assert granted.memory == 80 * 2**30
    assert granted.bandwidth == 400e9
    # One node's cards by default, next to each other on the torus.
    assert len(granted.cards) == scope["supernode"].machine.node_cards == 8
    assert granted.slice.shape == (2, 2, 2)


def test_what_is_written_with_units_is_what_is_written_in_mb_and_gb_per_second() -> None:
    node = SuperNode(card_count=64)

    with node.allocate("80GiB", "100GB/s", cards=2) as words, node.allocate(80 * 1024, 100, cards=2) as numbers:
        assert (words.memory, words.bandwidth) == (numbers.memory, numbers.bandwidth)
        assert not set(words.cards) & set(numbers.cards)


def test_a_shape_says_how_many_cards_and_a_released_slice_can_be_had_again() -> None:
    node = SuperNode(card_count=64)

    first = node.allocate(shape=(4, 2, 1))
    node.release(first)
    node.release(first)
    whole = node.allocate(cards=64)

    assert len(first.cards) == 8
    assert len(whole.cards) == 64


@pytest.mark.parametrize(
    ("kind", "named", "arguments"),
    [
        (CapacityError, "GiB a card", {"gpu_memory": "900GiB"}),
        (CapacityError, "TB/s a card", {"inter_bandwidth": "900TB/s"}),
        (CapacityError, "cards", {"cards": 65}),
        (SpecError, "gpu_memory", {"gpu_memory": "eighty"}),
        (SpecError, "gpu_memory", {"gpu_memory": -1}),
        (SpecError, "gpu_memory", {"gpu_memory": float("nan")}),
        (SpecError, "inter_bandwidth", {"inter_bandwidth": "400GiBs"}),
        (SpecError, "cards", {"cards": 0}),
        (SpecError, "share", {"share": 1.5}),
        (SpecError, "shape", {"shape": (0, 2)}),
    ],
)
def test_what_cannot_be_granted_is_named_with_a_remedy(
    kind: type[SupernodeError], named: str, arguments: dict[str, Any]
) -> None:
    node = SuperNode(card_count=64)

    with pytest.raises(kind, match=named) as caught:
        node.allocate(**arguments)

    assert caught.value.hint
    assert len(node.allocate(cards=64).cards) == 64


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ({"interconnect": "3D_Rng"}, "3D_Ring"),
        ({"cooling": "watr"}, "liquid"),
        ({"card": "H10"}, "H100"),
        ({"card_count": 0}, ""),
        ({"card_count": -4}, ""),
        ({"card_count": 10**9}, ""),
    ],
)
def test_a_machine_that_nobody_knows_is_refused(arguments: dict[str, Any], known: str) -> None:
    with pytest.raises(SpecError) as caught:
        SuperNode(**arguments)

    assert known in caught.value.hint
    assert caught.value.hint


@pytest.mark.parametrize("name", ["llama3-8b", "kimi-k2"])
def test_a_model_s_name_is_no_job_and_a_mapping_is_one(name: str) -> None:
    node = SuperNode.named("8xH100")
    with pytest.raises(SpecError, match="how much of it makes a step"):
        node.advise(name)

    mapping = {"model": "tiny", "batch": 16, "precision": "bfloat16"}
    assert node.advise(mapping)[1].best == node.search(mapping).best


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="name is None"):
        SuperNode.named(None)  # type: ignore[arg-type]


def test_plan_and_search_leave_a_card_the_same_share_of_its_memory() -> None:
    # 8 × 7B-parameter optimizer states cut eight ways and activations of two samples: above 72 of 80 GB, below 80.
    node = SuperNode.named("8xH100")
    room = room_of(node.machine).memory
    job = JobSpec(model=PRESETS["llama3-8b"], batch=16, data=DataSpec(sequence=4096), precision="bfloat16",
                  parallelism=Parallelism(data=8, sharding="fsdp"))  # fmt: skip
    fits: dict[int, JobSpec] = {}
    for sequence in range(2048, 8192, 256):
        asked = replace(job, data=replace(job.data, sequence=sequence))
        wide = replace(node.machine, card=replace(node.machine.card, memory=10**12))
        held = make_plan(asked, wide).memory
        assert held is not None
        fits[held.total] = asked

    assert room == 0.9 * 80e9
    assert min(fits) < room < min(total for total in fits if total > room) < 80e9
    for total, asked in fits.items():
        if total <= room:
            assert node.plan(asked).memory is not None
        else:
            with pytest.raises(CapacityError, match="tensors can have 90%"):
                node.plan(asked)


def test_a_job_is_a_value_a_mapping_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("steps: 7\n")

    assert as_job(JobSpec(steps=7)) == as_job({"steps": 7}) == as_job(tmp_path / "job.yaml") == JobSpec(steps=7)
    with pytest.raises(SpecError, match="int"):
        as_job(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "key"),
    [
        (JobSpec(communication=Communication(compress="zip")), "communication.compress"),  # type: ignore[arg-type]
        (JobSpec(parallelism=Parallelism(recompute="all")), "parallelism.recompute"),  # type: ignore[arg-type]
        (JobSpec(balance=Balance(every=1.5)), "balance.every"),  # type: ignore[arg-type]
        (JobSpec(precision="int3"), "precision"),  # type: ignore[arg-type]
    ],
)
def test_a_job_made_in_python_is_held_against_the_kinds_of_its_keys(job: JobSpec, key: str) -> None:
    with pytest.raises(SpecError, match=f"`{key}` is "):
        as_job(job)


def test_a_job_s_paths_start_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"dataset": "mine.py:data", "loss": "mine.py:loss"}

    mapping = as_job({"model": "net.py:build", "data": data})
    value = as_job(JobSpec(data=DataSpec(text="some/*.txt")))

    assert mapping.model == f"{tmp_path}/net.py:build"
    assert (mapping.data.dataset, mapping.data.loss) == (f"{tmp_path}/mine.py:data", f"{tmp_path}/mine.py:loss")
    assert value.data.text == f"{tmp_path}/some/*.txt"


def test_a_machine_that_is_not_this_computer_cannot_train(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="is another machine") as caught:
        SuperNode(card_count=8).run({"steps": 1}, folder=tmp_path / "run")

    assert "SuperNode.discover()" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_plan_and_simulate_need_no_process() -> None:
    node = SuperNode(card_count=8, card="H100")
    job = {
        "model": "gpt3-13b",
        "batch": 64,
        "gradient_accumulation": 4,
        "parallelism": {"tensor": 4, "data": 2},
        "steps": 50,
    }

    plan = node.plan(job)
    result = node.simulate(job, mtbf=3600.0 * 24 * 365, seed=1)

    assert plan.ranks == 8
    assert result.state.outcome == "finished"
    assert result.seconds > result.ideal_seconds
    assert 0 < result.goodput < 1
    assert repr(node) == "SuperNode(" + node.machine.name + ": 8 × H100)"


def test_status_and_report_of_nothing_are_run_errors(tmp_path: Path) -> None:
    for ask in (SuperNode.status, SuperNode.report, SuperNode(card_count=8).resume):
        with pytest.raises(RunError, match="no run"):
            ask(tmp_path)


LOOK = """
import json, sys
import {module}
print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}} & {{'torch', 'numpy', 'fastapi', 'ray'}})))
"""


@pytest.mark.parametrize("module", ["supernode", "cluster_sdk"])
def test_importing_loads_no_heavy_library(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(module=module)], capture_output=True, text=True, check=True
    )

    assert json.loads(done.stdout) == []


def test_the_package_names_what_it_has() -> None:
    import supernode

    assert set(dir(supernode)) == set(supernode.__all__)
    for name in supernode.__all__:
        assert getattr(supernode, name) is not None
    with pytest.raises(AttributeError, match="SuperNod'"):
        _ = supernode.SuperNod
