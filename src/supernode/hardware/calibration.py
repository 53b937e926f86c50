"""What was measured on this computer, and does it still hold? The file of `supernode calibrate`, read strictly."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from supernode.errors import SpecError
from supernode.schema import plain

VERSION = 1
AGAIN = "calibrate again with `supernode calibrate`, or remove the file."
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
KNOWN = ", ".join(COLLECTIVES)
AXES = ("tensor", "pipeline", "replicas", "fsdp")


def _check(value: object, name: str, *, may_be_zero: tuple[str, ...] = ()) -> None:
    for entry in fields(value):  # type: ignore[arg-type]
        number = getattr(value, entry.name)
        if not isinstance(number, (int, float)):
            continue
        if not math.isfinite(number) or number < 0 or (number == 0 and entry.name not in may_be_zero):
            raise SpecError(f"`{name}.{entry.name}` is {number}", hint=f"it is a number above 0; {AGAIN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Whose numbers these are; a calibration holds where all of it is the same.

    Attributes:
        cpu: model name of the processor.
        cores: that a process may use.
        torch: its version; empty where it is not installed.
        gpus: names of those that were measured, in order; empty where CPU ranks were.
    """

    cpu: str
    cores: int
    torch: str
    gpus: tuple[str, ...] = ()

    def difference(self, other: Host) -> str:
        """Return the first attribute in which another host differs, with both values; empty for the same host."""
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            if mine != theirs:
                return f"{entry.name} {mine!r}, not {theirs!r}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What one process delivers while so many compute at once, each on a core (or GPU) of its own.

    Attributes:
        processes: at once.
        products: FLOP/s of float32 matrix products, beyond the movement of their operands.
        products_half: FLOP/s of bfloat16 ones.
        operands: bytes/s at which products' operands move.
        scores: FLOP/s of the attention's core.
        memory: bytes/s of everything that memory binds.
        operation: seconds of a kernel as `workload.sublayers` counts them: Python, dispatch and autograd.
        step: seconds around each step: samples, gradient norm, scalars, learning rate.
        copy: bytes/s of a plain copy of 64 MiB, read and written bytes counted; told, not used.
    """

    processes: int
    products: float
    products_half: float
    operands: float
    scores: float
    memory: float
    operation: float
    step: float
    copy: float

    def __post_init__(self) -> None:
        _check(self, "compute", may_be_zero=("operation", "step"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of a collective by size.

    Attributes:
        kind: one of `COLLECTIVES`; a send is timed one way.
        ranks: processes in all, in groups of `cards` that exchange at once.
        cards: of a group; where groups do not take up all ranks, the others compute meanwhile.
        nbytes: of the whole buffer, ascending.
        seconds: of each size.
    """

    kind: str
    ranks: int
    cards: int
    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise SpecError(f"`curves.kind` is {self.kind!r}", hint=f"choose one of {KNOWN}; or {AGAIN}")
        if not 2 <= self.cards <= self.ranks:
            raise SpecError(f"`curves.cards` is {self.cards} of {self.ranks} `ranks`", hint=AGAIN)
        rising = list(self.nbytes) == sorted(set(self.nbytes)) and len(self.nbytes) > 1 and self.nbytes[0] > 0
        if not rising or len(self.seconds) != len(self.nbytes):
            raise SpecError(
                f"`curves.nbytes` of {self.kind} is {list(self.nbytes)}, with {len(self.seconds)} `seconds`",
                hint=f"give two sizes or more, ascending, with the seconds of each; or {AGAIN}",
            )
        if not all(math.isfinite(each) and each > 0 for each in self.seconds):
            told = f"`curves.seconds` of {self.kind} is {list(self.seconds)}"
            raise SpecError(told, hint=f"they are above 0; {AGAIN}")

    def times(self, factor: float) -> Curve:
        """Return the same on a computer so many times as busy."""
        return replace(self, seconds=tuple(factor * each for each in self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisCost:
    """Seconds in which a rank's Python keeps an axis going, beyond computing and the exchanges themselves.

    Attributes:
        axis: one of `AXES`.
        ranks: at work meanwhile, in pairs of two.
        step: once a step.
        layer: for each of the rank's layers, once a step.
        micro_batch: once a micro-batch.
        block: for each of the rank's layers and micro-batches.
        waiting: part of the computing that goes by until the slowest of those that meet is there, too.
    """

    axis: str
    ranks: int
    step: float = 0.0
    layer: float = 0.0
    micro_batch: float = 0.0
    block: float = 0.0
    waiting: float = 0.0

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise SpecError(f"`axes.axis` is {self.axis!r}", hint=f"choose one of {', '.join(AXES)}; or {AGAIN}")
        _check(self, "axes", may_be_zero=("step", "layer", "micro_batch", "block", "waiting"))

    def times(self, factor: float) -> AxisCost:
        """Return the same on a computer so many times as busy."""
        parts = {name: factor * getattr(self, name) for name in ("step", "layer", "micro_batch", "block")}
        return AxisCost(axis=self.axis, ranks=self.ranks, waiting=self.waiting, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One thing that was measured.

    Attributes:
        kind: `product`, `copy`, `steps` or `exchange`.
        ranks: processes that did it at once.
        what: its sizes.
        seconds: median over a rank's turns, mean over the ranks; of the calmest try.
        others: part of all cores that other programs took meanwhile.
    """

    kind: str
    ranks: int
    what: Mapping[str, float | str]
    seconds: float
    others: float

    def __post_init__(self) -> None:
        _check(self, "samples", may_be_zero=("others",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What this computer gives a rank.

    Attributes:
        version: of the file's format.
        date: when it was measured, ISO 8601.
        device: `cpu` or `cuda`.
        compute: by processes at once, ascending.
        curves: of collectives.
        axes: what each axis costs beside, by ranks at work.
        samples: what the rest follows from.
    """

    version: int
    date: str
    host: Host
    device: str
    compute: tuple[Compute, ...]
    curves: tuple[Curve, ...]
    axes: tuple[AxisCost, ...]
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise SpecError(f"`version` is {self.version}, and this program reads {VERSION}", hint=AGAIN)
        if self.device not in ("cpu", "cuda"):
            raise SpecError(f"`device` is {self.device!r}", hint="it is cpu or cuda.")
        counts = [each.processes for each in self.compute]
        if not counts or counts != sorted(set(counts)):
            raise SpecError(f"`compute` is told for {counts} processes", hint=f"name each once, ascending; or {AGAIN}")
        told = {curve.kind for curve in self.curves}
        if missing := [kind for kind in COLLECTIVES if told and kind not in told]:
            raise SpecError(
                f"`curves` has no {missing[0]}, which plans of {max(curve.ranks for curve in self.curves)} ranks need",
                hint=f"give one of each of {KNOWN}; or {AGAIN}",
            )

    def compute_for(self, ranks: int) -> Compute:
        """Return what a rank has while so many are at work, before cores are shared."""
        return next((each for each in self.compute if each.processes >= ranks), self.compute[-1])

    def curves_for(self, ranks: int) -> tuple[Curve, ...]:
        """Return each kind's curves as measured with so many ranks, or the nearest number above that has the kind.

        Beyond those measured, ranks wait for their turn on a core in proportion to how many they are.
        """
        found: list[Curve] = []
        for kind in dict.fromkeys(curve.kind for curve in self.curves):
            mine = [curve for curve in self.curves if curve.kind == kind]
            nearest, grown = self._nearest({curve.ranks for curve in mine}, ranks)
            found += [curve.times(grown) for curve in mine if curve.ranks == nearest]
        return tuple(found)

    def axes_for(self, ranks: int) -> dict[str, AxisCost]:
        """Return what each axis costs with so many ranks at work, or the nearest above; beyond, in proportion."""
        nearest, grown = self._nearest({cost.ranks for cost in self.axes}, ranks)
        return {cost.axis: cost.times(grown) for cost in self.axes if cost.ranks == nearest}

    def _nearest(self, counts: set[int], ranks: int) -> tuple[int, float]:
        nearest = min((count for count in counts if count >= ranks), default=max(counts, default=ranks))
        return nearest, max(1.0, ranks / nearest) if self.device == "cpu" else 1.0


def default_path(device: str = "cpu") -> Path:
    """Return where a device's calibration lies: where `SUPERNODE_CALIBRATION` says, else in the user's cache."""
    if told := os.environ.get("SUPERNODE_CALIBRATION"):
        return Path(told)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "supernode" / ("calibration.yaml" if device == "cpu" else f"calibration-{device}.yaml")


def this_host(cores: int, gpus: tuple[str, ...] = ()) -> Host:
    """Return the computer that this process runs on."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return Host(cpu=_cpu_name(), cores=cores, torch=torch, gpus=gpus)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def write_calibration(calibration: Calibration) -> str:
    """Return the file's text."""
    import yaml

    words = "# Written by `supernode calibrate`. SI units and bytes; see docs/calibration.md.\n"
    plain_value: dict[str, Any] = json.loads(json.dumps(asdict(calibration)))
    return words + yaml.safe_dump(plain_value, sort_keys=False, width=120, default_flow_style=None)


def read_calibration(path: Path) -> Calibration:
    """Return the calibration that a file holds.

    Raises:
        SpecError: the file cannot be read, is not YAML, or a key is unknown, missing or impossible.
    """
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        return plain.read(Calibration, json.dumps(value))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}", hint=AGAIN) from error
    except SpecError as error:
        raise SpecError(f"{path}: {error.message}", hint=error.hint) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not YAML: {str(error).splitlines()[0]}", hint=AGAIN) from None
    except (ValueError, TypeError, RecursionError) as error:
        reason = str(error).removeprefix("`Calibration`: ").replace("Calibration.", "")
        raise SpecError(f"{path}: {reason}", hint=AGAIN) from None
