"""What is measured on this computer, and in which order? Products, copies, steps and exchanges, by ranks at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from supernode.errors import MachineError, SpecError
from supernode.hardware.discover import discover, usable_cores
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism

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

Order = tuple[str, int, Mapping[str, float | str]]
"""What to measure: kind, ranks, sizes."""


def programme(cards: int | None = None, *, device: str = "cpu") -> list[Order]:
    """Return what is measured, in order.

    Args:
        cards: most ranks whose exchanges are measured; by default 8, or all GPUs.
        device: `cpu`, or `cuda` for GPUs.

    Raises:
        SpecError: `cards` is out of reach, or there are no such GPUs.
        MachineError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MachineError("torch is not installed, and ranks need it", hint="pip install 'supernode-sdk[train]'.")
    there = discover(device=device, measure=False).card_count
    if device == "cuda":
        most = there if cards is None else cards
        if not 1 <= most <= there:
            raise SpecError(f"`cards` is {most}", hint=f"choose 1 to {there}, or leave it out.")
        return [*_kernels(most, device), *_exchanges(most, device)]
    most, cores = MOST_RANKS if cards is None else cards, usable_cores()
    if not 2 <= most <= MORE_RANKS:
        raise SpecError(f"`cards` is {most}", hint=f"choose 2 to {MORE_RANKS}, or leave it out.")
    orders = [order for count in sorted({1, cores}) for order in (*_kernels(count, device), *_alone(count))]
    for ranks in sorted({2**power for power in range(1, most.bit_length())} | {most}):
        orders += _exchanges(ranks, device)
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
    """Yield collectives of groups that take up all ranks, and sends within pairs: of an odd number, one is alone."""
    groups = [group for group in sorted({2**power for power in range(1, 11)} | {ranks}) if ranks % group == 0]
    for group in (group for group in groups if group > 1):
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            yield "exchange", ranks, {"collective": collective, "group": group, "device": device}
    if ranks > 1:
        yield "exchange", ranks, {"collective": "send", "group": 2, "device": device}


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
    return make_plan(job, discover(ranks, measure=False))
