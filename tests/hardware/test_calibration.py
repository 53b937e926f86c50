"""A calibration is read as it was written, or refused by name; it counts on its own host alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from supernode.errors import SpecError
from supernode.hardware.calibration import (
    VERSION,
    AxisCost,
    Calibration,
    Compute,
    Curve,
    Sample,
    default_path,
    read_calibration,
    this_host,
    write_calibration,
)
from supernode.hardware.discover import discover, usable_cores

ALONE = Compute(
    processes=1, products=1e11, products_half=2e9, operands=5e9, scores=5e10, memory=1e10, operation=8e-6, step=1e-3,
    copy=2e10,
)  # fmt: skip
PAIR = Curve(kind="all_reduce", ranks=2, cards=2, nbytes=(4.0, 1e6), seconds=(1e-4, 1e-3))
GATHER, SCATTER = (replace(PAIR, kind=kind) for kind in ("all_gather", "reduce_scatter"))
SEND = Curve(kind="send", ranks=2, cards=2, nbytes=(4.0, 1e6), seconds=(5e-5, 4e-4))


def made(**changes: Any) -> Calibration:
    known = Calibration(
        version=VERSION, date="2026-01-31T12:00:00", host=this_host(usable_cores()), device="cpu",
        compute=(ALONE, replace(ALONE, processes=2, products=9e10)), curves=(PAIR, GATHER, SCATTER, SEND),
        axes=(AxisCost(axis="tensor", ranks=2, step=1e-3, block=2e-3),),
        samples=(Sample(kind="copy", ranks=1, what={"nbytes": 65536, "device": "cpu"}, seconds=1e-5, others=0.0),),
    )  # fmt: skip
    return replace(known, **changes)


def written(folder: Path, calibration: Calibration) -> Path:
    path = folder / "calibration.yaml"
    path.write_text(write_calibration(calibration))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_calibration(written(tmp_path, made())) == made()


def without(value: dict[str, Any], *keys: str) -> None:
    for key in keys[:-1]:
        value = value[key]
    del value[keys[-1]]


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda v: v.update(colour="red"), "colour"),
        (lambda v: without(v, "host", "torch"), "torch"),
        (lambda v: v["host"].update(cores="two"), "host.cores"),
        (lambda v: v.update(version=7), "`version` is 7"),
        (lambda v: v.update(device="tpu"), "`device` is 'tpu'"),
        (lambda v: v.update(compute=[]), "`compute`"),
        (lambda v: v["compute"][0].update(products=0.0), "`compute.products` is 0.0"),
        (lambda v: v["compute"][0].update(memory=-1.0), "`compute.memory` is -1.0"),
        (lambda v: v["curves"][0].update(seconds=[1.0]), "`curves.nbytes`"),
        (lambda v: v["curves"][0].update(nbytes=[8.0, 4.0]), "`curves.nbytes`"),
        (lambda v: v["curves"][0].update(cards=3), "`curves.cards` is 3 of 2"),
        (lambda v: v["curves"].pop(), "`curves` has no send"),
        (lambda v: v["curves"].pop(0), "`curves` has no all_reduce"),
        (lambda v: v["curves"][0].update(kind="broadcast"), "`curves.kind` is 'broadcast'"),
        (lambda v: v["axes"][0].update(axis="sequence"), "`axes.axis` is 'sequence'"),
        (lambda v: v["axes"][0].update(step=float("nan")), "`axes.step` is nan"),
    ],
)
def test_a_damaged_file_is_refused_by_its_key(
    tmp_path: Path, harm: Callable[[dict[str, Any]], None], named: str
) -> None:
    path = written(tmp_path, made())
    value = yaml.safe_load(path.read_text())
    harm(value)
    path.write_text(yaml.safe_dump(value))

    with pytest.raises(SpecError) as refused:
        read_calibration(path)

    assert named in refused.value.message
    assert str(path) in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("content", [b"compute: [", b"\xff\xfe", b"", b"- 1"])
def test_what_is_no_calibration_at_all_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_bytes(content)

    with pytest.raises(SpecError, match=r"calibration\.yaml") as refused:
        read_calibration(path)

    assert "supernode calibrate" in refused.value.hint


def test_this_computer_takes_its_own_calibration_and_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, made())

    machine = discover(2, calibration=path)

    share = min(1.0, usable_cores() / 2)
    assert machine.card.flops["float32"] == pytest.approx(9e10 * share)
    assert machine.card.scale_up_bandwidth == pytest.approx(1e6 / 4e-4)
    assert machine.calibration == made()
    assert "2026-01-31" in machine.notes[0]


@pytest.mark.parametrize(
    ("host", "named"),
    [({"cpu": "Z80"}, "cpu 'Z80'"), ({"cores": 999}, "cores 999"), ({"torch": "0.4"}, "torch '0.4'")],
)
def test_a_calibration_of_another_host_is_left_aside_with_the_reason(
    tmp_path: Path, host: dict[str, Any], named: str
) -> None:
    path = written(tmp_path, made(host=replace(this_host(usable_cores()), **host)))

    machine = discover(2, calibration=path)

    assert machine.calibration is None
    assert named in machine.notes[0]


def test_without_measuring_no_calibration_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calibration.yaml").write_text("not one")
    monkeypatch.setenv("SUPERNODE_CALIBRATION", str(tmp_path / "calibration.yaml"))

    assert discover(2, measure=False).calibration is None
    with pytest.raises(SpecError, match=r"calibration\.yaml"):
        discover(2)


def test_more_processes_than_measured_count_as_the_most_measured() -> None:
    known = made()

    assert [known.compute_for(ranks).processes for ranks in (1, 2, 9)] == [1, 2, 2]
    curves = known.curves_for(6)
    assert {curve.ranks for curve in curves} == {2}
    assert curves[0].seconds == pytest.approx((3e-4, 3e-3))  # three times as many wait for a turn
    assert known.axes_for(6)["tensor"].block == pytest.approx(6e-3)
    assert known.axes_for(2)["tensor"].block == pytest.approx(2e-3)


def test_each_kind_takes_the_nearest_number_of_ranks_that_has_it() -> None:
    three = replace(PAIR, ranks=3, cards=3, seconds=(2e-4, 2e-3))

    curves = {curve.kind: curve for curve in made(curves=(PAIR, three, GATHER, SCATTER, SEND)).curves_for(3)}

    assert curves["all_reduce"] == three
    assert curves["send"].seconds == pytest.approx((1.5 * 5e-5, 1.5 * 4e-4))  # of two, half as many again at work


def test_a_computer_with_gpus_plans_for_its_cores_by_what_was_measured_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.delenv("SUPERNODE_CALIBRATION", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "supernode").mkdir()
    default_path().write_text(write_calibration(made()))
    on_gpus = replace(made(device="cuda"), host=this_host(usable_cores(), ("H100", "H100")))

    assert discover().calibration == discover(2).calibration == made()
    assert discover(device="cuda").calibration is None
    assert "--device cuda" in discover(device="cuda").notes[0]

    default_path("cuda").write_text(write_calibration(on_gpus))
    gpus = discover(device="cuda")

    assert (gpus.card.kind, gpus.card_count) == ("gpu", 2)
    assert gpus.card.flops["float32"] == 9e10
    assert gpus.calibration is None  # of the forecast the figures change, not its terms
    assert discover().calibration == made()
    with pytest.raises(SpecError, match="NVML shows 2"):
        discover(3, device="cuda")


def fake_nvml() -> ModuleType:
    """Return a driver's library that shows two H100."""
    found = ModuleType("pynvml")
    found.NVMLError = RuntimeError  # type: ignore[attr-defined]
    found.nvmlInit = found.nvmlShutdown = lambda: None  # type: ignore[attr-defined]
    found.nvmlDeviceGetCount = lambda: 2  # type: ignore[attr-defined]
    found.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    found.nvmlDeviceGetName = lambda handle: "NVIDIA H100 80GB HBM3"  # type: ignore[attr-defined]
    found.nvmlDeviceGetPowerManagementLimit = lambda handle: 700_000  # type: ignore[attr-defined]
    found.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=80 * 2**30)  # type: ignore[attr-defined]
    return found
