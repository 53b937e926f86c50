"""What every benchmark shares: its flags, the machine, a scratch folder, peers' environments, the last line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CACHE = Path.home() / ".cache" / "supernode-bench"
"""Where peers' environments are kept from one call to the next."""


class PeerMissingError(Exception):
    """A peer cannot be installed here; the text says why."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the two flags that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    made.add_argument("--full", action="store_true", help="measure longer than ten minutes, for calmer figures")
    return made


def machine(*packages: str) -> dict[str, Any]:
    """Return what the numbers were measured on, with the versions of the packages that matter to them."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    here = Path(__file__).parent
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "commit": _git(here, "rev-parse", "--short", "HEAD"),
        "source_changed_since_commit": bool(
            _git(here.parent, "status", "--porcelain", "--untracked-files=no", "--", "src")
        ),
    }


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def scratch() -> Iterator[Path]:
    """Lend an empty folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="supernode-bench-") as folder:
        yield Path(folder)


def say(text: str) -> None:
    """Tell the person who watches; stdout stays for the result."""
    print(text, file=sys.stderr, flush=True)


def finish(result: Mapping[str, Any], flags: argparse.Namespace) -> None:
    """Print the result, as the last line where a program reads it."""
    print(json.dumps(result) if flags.json else json.dumps(result, indent=2))


def peer_python(name: str, *, exactly: Sequence[str] = (), needs: Sequence[str] = ()) -> Path:
    """Return the interpreter of a peer's own environment, made on first use.

    It sees this interpreter's packages behind its own, so that torch is there once and is the same for all.

    Args:
        exactly: requirements to install without what they ask for.
        needs: requirements to install with it.

    Raises:
        PeerMissingError: the environment cannot be made, or a requirement cannot be had.
    """
    home = CACHE / name
    python, mark = home / "bin" / "python", home / "installed"
    wanted = "\n".join([sysconfig.get_paths()["purelib"], *exactly, "--", *needs])
    if python.exists() and mark.exists() and mark.read_text() == wanted:
        return python
    say(f"installing {name} into {home}")
    try:
        venv.create(home, with_pip=True, clear=True)
        inside = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (inside / "benchmark.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for words in ([*pip, "--no-deps", *exactly] if exactly else [], [*pip, *needs] if needs else []):
            if words:
                subprocess.run(words, check=True, capture_output=True, text=True, timeout=1200)
    except subprocess.CalledProcessError as error:
        raise PeerMissingError(f"{name}: {(error.stderr or str(error)).strip().splitlines()[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissingError(f"{name}: {error}") from error
    mark.write_text(wanted)
    return python
