"""How are this computer's own numbers found? Has ranks measure what they get, and fits the forecast's rates to it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from supernode.backends.fork_client import ForkServer
from supernode.backends.measuring import Bench
from supernode.calibrating.evaluate import evaluate
from supernode.calibrating.programme import SIZES, Order, plan_of, programme
from supernode.errors import MachineError
from supernode.files import write_whole
from supernode.hardware.calibration import Calibration, Sample, write_calibration
from supernode.schema.codec import to_json

TURNS = 5
EXCHANGE_TURNS = 5
AXIS_TURNS = 4
QUIET = 0.05
"""Part of all cores that other programs may take for a measurement to count as undisturbed."""
TRIES = 2

Progress = Callable[[str, float], None]


def calibrate(
    *, cards: int | None = None, device: str = "cpu", progress: Progress | None = None, server: ForkServer | None = None
) -> Calibration:
    """Return what this computer gives ranks, measured for a minute or two.

    Args:
        cards: most ranks whose exchanges are measured, 2 to 64; by default 8, or all GPUs.
        device: `cpu`, whose cores ranks are trained on, or `cuda` for GPUs.
        progress: told what is being measured and how much of it is done, 0 to 1.
        server: what ranks are forked from, which outlives this.

    Raises:
        SpecError: `cards` is out of reach.
        MachineError: torch is not installed, or a rank fails.
    """
    orders = programme(cards, device=device)
    own = server or ForkServer()
    try:
        return evaluate(measure(orders, own, progress=progress))
    finally:
        if server is None:
            own.close()


def write(calibration: Calibration, path: Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write_calibration(calibration))
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}", hint="name another with `--out`.") from error


def measure(orders: Iterable[Order], server: ForkServer, *, progress: Progress | None = None) -> list[Sample]:
    """Carry out orders one after the other; what others disturbed is tried again, and the calmest try kept."""
    every = list(orders)
    made: list[Sample] = []
    for number, (kind, ranks, what) in enumerate(every):
        if progress is not None:
            progress(_words(kind, ranks, what), number / len(every))
        tries: list[list[Sample]] = []
        most = TRIES if kind == "exchange" or what.get("axis") else 1  # the CPU's own clock is not disturbed
        while len(tries) < most and (not tries or tries[-1][0].others > QUIET):
            tries.append(_measure_once(kind, ranks, what, server))
        calmest_try: list[Sample] = min(tries, key=_others)
        made += calmest_try
    if progress is not None:
        progress("measured", 1.0)
    return made


def _others(samples: Sequence[Sample]) -> float:
    return samples[0].others


def _words(kind: str, ranks: int, what: Mapping[str, float | str]) -> str:
    name = str(what.get("collective") or what.get("axis") or kind).replace("_", "-")
    return f"{name} on {ranks} rank{'s' * (ranks > 1)}"


def _measure_once(kind: str, ranks: int, what: Mapping[str, float | str], server: ForkServer) -> list[Sample]:
    values: dict[str, object] = {**what, "repeats": TURNS}
    if kind == "steps":
        values = {"plan": to_json(plan_of(what)), "steps": TURNS if not what["axis"] else AXIS_TURNS}
    elif kind == "exchange":
        values = {**what, "repeats": EXCHANGE_TURNS, "sizes": SIZES}
    with Bench(server, ranks) as bench:  # Ranks of their own for each, whose memory nothing before has laid out.
        busy, ours, begun = _busy_seconds(), bench.cpu_seconds(), time.perf_counter()
        told = bench.order(kind, **values)
        elapsed = time.perf_counter() - begun
        busy, ours = _busy_seconds() - busy, bench.cpu_seconds() - ours
    others = round(max(0.0, busy - ours) / (elapsed * (os.cpu_count() or 1)), 3)
    if kind != "exchange":
        return [Sample(kind=kind, ranks=ranks, what=what, seconds=_middle(told), others=others)]
    return [
        Sample(kind=kind, ranks=ranks, what={**what, "nbytes": nbytes}, seconds=_middle(turns), others=others)
        for nbytes, turns in zip(SIZES, zip(*told, strict=True), strict=True)
    ]


def _middle(told: Iterable[Sequence[float]]) -> float:
    """Return the median over a rank's turns, the mean over the ranks."""
    return statistics.mean(statistics.median(turns) for turns in told if turns)


def _busy_seconds() -> float:
    """Return the seconds that all cores have worked; 0 where the system does not tell."""
    try:
        columns = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, columns)
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
