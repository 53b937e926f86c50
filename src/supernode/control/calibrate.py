"""How are this computer's own numbers found? Has ranks measure what they get, and fits the forecast's rates to it."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from supernode.backends.fork_client import ForkServer
from supernode.backends.measuring import Bench
from supernode.control.runs import write_whole
from supernode.errors import MachineError, SpecError
from supernode.forecast.efficiency import CardModel
from supernode.forecast.fit import Measured, curves_of, fit_axis, fit_compute
from supernode.forecast.rates import card_of
from supernode.forecast.times import step_parts
from supernode.hardware.calibration import VERSION, AxisCost, Calibration, Compute, Sample, this_host, write_calibration
from supernode.hardware.discover import discover, gpu_names, usable_cores
from supernode.hardware.machine import Machine
from supernode.planning.cost import software_of
from supernode.planning.memory import strategy_of
from supernode.planning.planner import make_plan
from supernode.schema.codec import to_json
from supernode.schema.job import DataSpec, JobSpec, Parallelism
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.workload.shape import decoder_shape

MOST_RANKS = 8
MORE_RANKS = 64
PRODUCTS = ((64, 64, 64), (256, 128, 128), (512, 256, 256), (512, 256, 704), (1024, 512, 1376), (2048, 1024, 1024))
"""Rows, depth and columns."""
COPIES = (2**16, 2**20, 2**23, 2**26)
SIZES = (4, 2**10, 2**14, 2**17, 2**19, 2**21, 2**24)
STEPS = (
    # layers, width, heads, sequence, samples, micro-batches, vocabulary: from all overhead to nearly all arithmetic
    (1, 32, 2, 16, 1, 1, 64), (4, 32, 2, 16, 1, 1, 64), (1, 32, 2, 16, 1, 4, 64), (2, 64, 2, 64, 1, 1, 256),
    (2, 128, 4, 128, 2, 1, 256), (2, 128, 4, 128, 4, 2, 256), (2, 256, 8, 128, 2, 1, 256), (2, 256, 4, 256, 2, 1, 256),
    (4, 256, 8, 256, 2, 1, 256), (1, 512, 8, 128, 2, 1, 256), (2, 512, 8, 256, 2, 1, 256), (1, 256, 8, 512, 2, 1, 256),
    (1, 256, 8, 256, 2, 1, 4096), (1, 256, 8, 1024, 1, 1, 256), (1, 128, 4, 256, 8, 1, 2048),
    (1, 768, 12, 128, 4, 1, 256),
)  # fmt: skip
TURNS = 5
EXCHANGE_TURNS = 5
AXIS_TURNS = 4
AXIS_STEPS = {
    "tensor": Parallelism(tensor=2, data=1), "pipeline": Parallelism(pipeline=2, data=1),
    "replicas": Parallelism(data=2), "fsdp": Parallelism(data=2, sharding="fsdp"),
}  # fmt: skip
AXIS_COUNTS = ((2, 2), (8, 2), (2, 6), (8, 6))
"""Layers and micro-batches of a model so small that what is left is the axis' own."""
WIDE = {
    "layers": 2, "micro_batches": 2, "width": 256, "heads": 8, "sequence": 128, "samples": 2, "vocabulary": 256,
}  # fmt: skip
"""A model whose computing counts, so that it shows how long ranks wait for the slowest one."""
QUIET = 0.05
"""Part of all cores that other programs may take for a measurement to count as undisturbed."""
TRIES = 2

Order = tuple[str, int, Mapping[str, float | str]]
"""What to measure: kind, ranks, sizes."""
Progress = Callable[[str, float], None]


def calibrate(
    *, cards: int | None = None, progress: Progress | None = None, server: ForkServer | None = None
) -> Calibration:
    """Return what this computer gives ranks, measured for a minute or two.

    Args:
        cards: most ranks whose exchanges are measured, 2 to 64; by default 8, or all GPUs.
        progress: told what is being measured and how much of it is done, 0 to 1.
        server: what ranks are forked from, which outlives this.

    Raises:
        SpecError: `cards` is out of reach.
        MachineError: torch is not installed, or a rank fails.
    """
    orders = programme(cards)
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


def programme(cards: int | None = None) -> list[Order]:
    """Return what is measured, in order.

    Raises:
        SpecError: `cards` is out of reach.
        MachineError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MachineError("torch is not installed, and ranks need it", hint="pip install 'supernode-sdk[train]'.")
    gpus, cores = gpu_names(), usable_cores()
    most = cards if cards is not None else (len(gpus) or MOST_RANKS)
    if not (1 if gpus else 2) <= most <= (len(gpus) or MORE_RANKS):
        raise SpecError(
            f"`cards` is {most}", hint=f"choose {1 if gpus else 2} to {len(gpus) or MORE_RANKS}, or leave it out."
        )
    if gpus:
        return [*_kernels(most, "cuda"), *_exchanges(most, "cuda")]
    counts = sorted({1, cores})
    orders = [order for count in counts for order in (*_kernels(count, "cpu"), *_alone(count))]
    for ranks in sorted({2**power for power in range(1, most.bit_length())} | {most}):
        orders += _exchanges(ranks, "cpu")
    return orders + list(_axes(cores))


def _kernels(ranks: int, device: str) -> Iterator[Order]:
    scale = 1 if device == "cpu" else 4  # a GPU is not filled by less
    for rows, depth, columns in PRODUCTS:
        for precision in ("float32", "bfloat16"):
            if precision == "bfloat16" and device == "cpu" and rows > 256:
                continue  # where it has no instructions of its own it takes a hundred times as long
            sizes = {"rows": scale * rows, "depth": scale * depth, "columns": scale * columns}
            yield "product", ranks, {**sizes, "precision": precision, "device": device}
    for nbytes in COPIES:
        yield "copy", ranks, {"nbytes": scale**2 * nbytes, "device": device}


def _alone(processes: int) -> Iterator[Order]:
    names = ("layers", "width", "heads", "sequence", "samples", "micro_batches", "vocabulary")
    for sizes in STEPS:
        yield "steps", processes, {"axis": "", **dict(zip(names, sizes, strict=True))}


def _axes(cores: int) -> Iterator[Order]:
    """Yield steps over pairs of ranks: one pair, and so many that two ranks share each core."""
    small = {"width": 32, "heads": 2, "sequence": 16, "samples": 1, "vocabulary": 64}
    for ranks in sorted({2, min(2 * cores, MOST_RANKS)}):
        for axis in AXIS_STEPS:
            for layers, many in AXIS_COUNTS:
                yield "steps", ranks, {"axis": axis, "layers": layers, "micro_batches": many, **small}
            yield "steps", ranks, {"axis": axis, **WIDE}


def _exchanges(ranks: int, device: str) -> Iterator[Order]:
    groups = [group for group in sorted({2**power for power in range(1, 11)} | {ranks}) if ranks % group == 0]
    for group in (group for group in groups if group > 1):
        for collective in ("all_reduce", "all_gather", "reduce_scatter", *(("send",) if group == 2 else ())):
            yield "exchange", ranks, {"collective": collective, "group": group, "device": device}


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


def calmest(rounds: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return one sample of each kind out of several rounds: the median of the calm ones, else the calmest."""
    found = []
    for tries in zip(*rounds, strict=True):
        calm = [sample for sample in tries if sample.others <= QUIET]
        best = min(tries, key=lambda sample: sample.others)
        found.append(replace(best, seconds=statistics.median(s.seconds for s in calm)) if calm else best)
    return found


def plan_of(what: Mapping[str, float | str]) -> Plan:
    """Return the plan of a measured step."""
    degrees = AXIS_STEPS.get(str(what["axis"]), Parallelism(data=1))
    many = int(what["micro_batches"])
    shape = DecoderShape(
        layers=int(what["layers"]), width=int(what["width"]), heads=int(what["heads"]),
        vocabulary=int(what["vocabulary"]), tied=False,
    )  # fmt: skip
    job = JobSpec(
        model=shape, batch=int(what["samples"]) * many * degrees.data, gradient_accumulation=many, threads=1,
        data=DataSpec(sequence=int(what["sequence"])), parallelism=degrees,
    )  # fmt: skip
    ranks = degrees.data * degrees.tensor * degrees.pipeline
    return make_plan(job, discover(ranks, cpu_only=True, measure=False))


def evaluate(samples: Sequence[Sample]) -> Calibration:
    """Return the calibration that follows from samples.

    Raises:
        MachineError: they make no sense together.
    """
    gpus, cores = gpu_names(), usable_cores()
    device = "cuda" if any(sample.what.get("device") == "cuda" for sample in samples) else "cpu"
    compute = _gpu_compute(samples) if device == "cuda" else _cpu_compute(samples)
    found = Calibration(
        version=VERSION, date=time.strftime("%Y-%m-%dT%H:%M:%S%z"), host=this_host(cores, gpus), device=device,
        compute=tuple(compute), curves=curves_of(samples), axes=(), samples=tuple(samples),
    )  # fmt: skip
    return replace(found, axes=tuple(_axis_costs(found))) if device == "cpu" else found


def _cpu_compute(samples: Sequence[Sample]) -> Iterator[Compute]:
    machine = discover(1, cpu_only=True, measure=False)
    alone = [sample for sample in samples if sample.kind == "steps" and not sample.what["axis"]]
    for count in sorted({sample.ranks for sample in alone}):
        steps = [_measured(sample, machine) for sample in alone if sample.ranks == count]
        yield fit_compute(count, steps, samples)


def _measured(sample: Sample, machine: Machine) -> Measured:
    plan = plan_of(sample.what)
    shape = plan.job.shape
    assert shape is not None
    given = decoder_shape(shape), strategy_of(plan), software_of(plan, machine)
    return Measured(
        seconds=sample.seconds, predict=lambda card: float(step_parts(given[0], given[1], card, given[2]).total)
    )


def _axis_costs(found: Calibration) -> Iterator[AxisCost]:
    for ranks in sorted({sample.ranks for sample in found.samples if sample.what.get("axis")}):
        machine = replace(discover(ranks, cpu_only=True, measure=False), calibration=found)
        card = card_of(machine, ranks)
        for axis in AXIS_STEPS:
            mine = [s for s in found.samples if s.ranks == ranks and s.what.get("axis") == axis]
            over = [sample.seconds - _measured(sample, machine).predict(card) for sample in mine]
            per_rank = 2 if axis == "pipeline" else 1
            counts = [
                (float(s.what["layers"]) / per_rank, float(s.what["micro_batches"]), _busy(s, machine, card))
                for s in mine
            ]
            # A step of which others took a tenth of the cores says a third as much as one that they left alone.
            trust = [1 / sample.seconds / (1 + 20 * sample.others) for sample in mine]
            yield fit_axis(axis, ranks, counts, over, trust)


def _busy(sample: Sample, machine: Machine, card: CardModel) -> float:
    """Return the seconds that a rank computes in a measured step."""
    plan = plan_of(sample.what)
    shape = plan.job.shape
    assert shape is not None
    return float(step_parts(decoder_shape(shape), strategy_of(plan), card, software_of(plan, machine)).compute)


def _gpu_compute(samples: Sequence[Sample]) -> Iterator[Compute]:
    """Return what GPUs deliver: the best product of each precision, and the best copy."""
    for count in sorted({sample.ranks for sample in samples if sample.kind == "product"}):
        mine = [sample for sample in samples if sample.ranks == count]
        copy = max(2 * float(s.what["nbytes"]) / s.seconds for s in mine if s.kind == "copy")
        rates = {
            precision: max(
                2 * float(s.what["rows"]) * float(s.what["depth"]) * float(s.what["columns"]) / s.seconds
                for s in mine
                if s.kind == "product" and s.what["precision"] == precision
            )
            for precision in ("float32", "bfloat16")
        }
        yield Compute(
            processes=count, products=rates["float32"], products_half=rates["bfloat16"], operands=copy,
            scores=rates["bfloat16"], memory=copy, operation=0.0, step=0.0, copy=copy,
        )  # fmt: skip
