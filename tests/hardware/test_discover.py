"""This computer is a machine, too."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from supernode.errors import SpecError
from supernode.hardware.discover import cpu_quota, discover, memory_limit, usable_cores
from supernode.hardware.gpus import gpu_card, known_gpu


def test_eight_cards_share_the_cores() -> None:
    cores = usable_cores()
    one, many = discover(cores, measure=False), discover(8 * cores, measure=False)

    assert many.name == "local"
    assert many.card.flops["float32"] == pytest.approx(one.card.flops["float32"] / 8)
    assert many.card.memory * many.card_count <= many.host_memory


def test_unified_memory_counts_the_host_once() -> None:
    machine = discover(usable_cores(), measure=False)

    assert machine.unified_memory == machine.memory <= machine.host_memory


def test_measured_cores_do_something_within_reason() -> None:
    card = discover(usable_cores(), measure=True).card

    # Between an old laptop's core and four times a server core with wide vectors.
    assert 1e8 < card.flops["float32"] < 2e12
    assert 1e7 < card.scale_up_bandwidth < 1e12
    assert card.flops["bfloat16"] == pytest.approx(card.flops["float32"] / 80)


def test_zero_cards_are_refused() -> None:
    with pytest.raises(SpecError, match="`cards` is 0"):
        discover(0)


def test_a_control_group_limits_cores_and_memory(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")

    assert cpu_quota(tmp_path) == 1.5
    assert memory_limit(tmp_path) == 2**30


def test_a_group_without_limits_has_none(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == memory_limit(tmp_path) == math.inf

    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")

    assert cpu_quota(tmp_path) == memory_limit(tmp_path) == math.inf


def test_the_older_control_groups_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")

    assert cpu_quota(tmp_path) == 2


class FakeNvml:
    """A driver with one H200 whose power is capped."""

    NVMLError = RuntimeError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA H200"

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:  # noqa: N802
        return 500_000  # milliwatts

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=150_754_820_096)


def test_a_gpu_has_the_memory_and_power_that_its_driver_reports() -> None:
    card = gpu_card(FakeNvml(), 0)

    assert (card.name, card.memory, card.power) == ("H200", 150_754_820_096, 500)
    assert card.flops["bfloat16"] == pytest.approx(989.4e12)


@pytest.mark.parametrize(
    ("told", "name"),
    [("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100-80"), ("NVIDIA GB200", "GB200"), ("Tesla T4", "GPU")],
)
def test_a_driver_name_finds_its_card(told: str, name: str) -> None:
    assert known_gpu(told).name == name
