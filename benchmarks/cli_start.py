"""How much CPU time passes before the package, or its command line, is ready to listen?"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import harness

HEAVY = ("torch", "numpy", "fastapi", "ray")
"""Libraries that neither may have loaded."""
COMMANDS = {
    "import supernode": [sys.executable, "-c", "import supernode"],
    "supernode --help": [str(Path(sys.executable).with_name("supernode")), "--help"],
}
WITHIN = {
    "import supernode": "import supernode",
    "supernode --help": "from supernode.cli.main import app; app(['--help'], standalone_mode=False)",
}
"""The same two inside one interpreter that can be asked afterwards what it has loaded."""


def cpu_seconds(command: list[str]) -> float:
    """Return the user and system time of one child, its own children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def heavy_after(code: str) -> list[str]:
    """Return which heavy libraries an interpreter holds after some code."""
    asked = f"import json, sys\n{code}\nprint()\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    for command in COMMANDS.values():
        cpu_seconds(command)  # Bytecode is written and files are in memory before the first that counts.
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(30 if flags.full else 10):
        for name, command in COMMANDS.items():
            samples[name].append(cpu_seconds(command))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    heavy = {name: heavy_after(code) for name, code in WITHIN.items()}
    for name, seconds in medians.items():
        harness.say(f"{name:18} {seconds:.3f} s of CPU, heavy libraries loaded: {', '.join(heavy[name]) or 'none'}")
    result = {
        "cpu_seconds": round(max(medians.values()), 4),
        "import_cpu_seconds": round(medians["import supernode"], 4),
        "help_cpu_seconds": round(medians["supernode --help"], 4),
        "heavy_loaded": sum(len(names) for names in heavy.values()),
        "heavy": heavy,
        "samples": {name: [round(value, 4) for value in values] for name, values in samples.items()},
        "load_average": os.getloadavg()[0],
        "machine": harness.machine("typer", "click", "rich", "pydantic"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
