"""What is installed is what was tried, or a run says so before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from supernode.backends.versions import TORCH, trouble

PROJECT = Path(__file__).resolve().parents[1]
OLDER = """
import importlib.abc, importlib.machinery, sys

class Older(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch.version":
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            def exec_module(module):
                run(module)
                module.__version__ = "2.9.1"
            spec.loader.exec_module = exec_module
            return spec

sys.meta_path.insert(0, Older())
"""


@pytest.mark.slow
def test_a_torch_that_was_never_tried_is_refused_with_the_range(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OLDER)
    (tmp_path / "job.json").write_text(json.dumps({"steps": 1, "data": {"text": str(Path(json.__file__).parent)}}))

    ran = subprocess.run(
        [sys.executable, "-m", "supernode", "run", "job.json", "--cards", "1"], cwd=tmp_path, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, text=True, check=False,
    )  # fmt: skip

    assert ran.returncode == 2, ran.stderr
    assert "torch 2.9.1 is installed" in ran.stderr
    assert "supernode-sdk[train]" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.13.0a0+git1"])
def test_versions_within_the_range_are_none_to_speak_of(version: str) -> None:
    assert trouble(version) == ""


@pytest.mark.parametrize("version", ["2.12.9", "2.14.0", "3.0", "unknown"])
def test_versions_beyond_it_are(version: str) -> None:
    assert version in trouble(version)


def test_the_range_is_the_one_that_is_installed_from() -> None:
    wanted = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    least, most = (".".join(map(str, numbers)) for numbers in TORCH)

    assert f"torch>={least},<{most}" in wanted
