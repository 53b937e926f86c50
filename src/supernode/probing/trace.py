"""What would a step of the user's own module take? Follows one without values, or computes one where it must."""

from __future__ import annotations

import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from supernode.errors import ModelError
from supernode.parallel.assemble import DTYPES
from supernode.parallel.chance import seed_for, seed_generators
from supernode.parallel.graphs import read_logits
from supernode.parallel.usercode import blame, build_user_data, build_user_model
from supernode.probing.counting import LOSS, Counter, Tally
from supernode.schema.job import JobSpec
from supernode.schema.trace import ModelTrace, PassWork, Size, TracedPart, Work
from supernode.training.data import CheckedSamples, user_loss

Batches = Callable[[int], tuple[Tensor, Tensor]]
"""So many samples to (inputs, targets)."""
Loss = Callable[[Any, Tensor], Tensor]
Line = Callable[[float, float], Size]
"""Counts of few and of many samples to what each takes and what comes once."""
MOST_REAL = 1 << 30
"""Bytes of parameters up to which a step is computed for real where it cannot be followed without values."""
MOST_BUILT = 8 << 30
"""Bytes of memory that a model may take where it must be built for real."""
DRAWN = 4
"""Samples of the data set that fill the traced batches over and over."""


def trace_job(job: JobSpec, *, micro_batch: int) -> ModelTrace:
    """Return the trace of the job's own module.

    Raises:
        ModelError: the user's code fails, or needs values that the model is too large to have.
        DataError: the data set or the loss fails.
    """
    dtype = DTYPES[job.precision]
    loss = read_logits if job.data.loss == "cross_entropy" else user_loss(job.data.loss)

    def build() -> nn.Module:
        seed_generators(seed_for(job.seed, "model"))
        return build_user_model(job.module, has_values=False)

    return trace_module(
        build, _batches(job, dtype), loss, micro_batch=micro_batch, dtype=dtype,
        told=lambda error: blame(error, (job.module, job.data.loss)) or _last_line(error), name=job.module,
    )  # fmt: skip


def trace_module(
    build: Callable[[], nn.Module], batches: Batches, loss: Loss, *, micro_batch: int = 2,
    dtype: torch.dtype = torch.float32, told: Callable[[BaseException], str] = str, name: str = "the model",
) -> ModelTrace:  # fmt: skip
    """Return the trace of a module in training; one without parts, and with a note, where counting fails.

    It is built and followed without values. Where its constructor needs values it is built for real, and where its
    forward does, too, a small one is computed for real.

    Args:
        build: makes the module; twice, if its step must be computed for real.
        dtype: of the module in training.
        micro_batch: samples at which the counts are exact; the step is followed with twice as many, too.
        told: an error to what the user reads of it.

    Raises:
        ModelError: the module fails, whether or not anything is counted.
    """
    notes: tuple[str, ...] = ()
    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # noqa: BLE001 - whether it is about values, the second attempt tells
        with _limited_memory():
            model = build()  # An error that is not about values comes again.
        notes = ("the model was built for real, since its constructor needs values.",)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            _take_values(model, dtype)
            found = _follow(model, batches, loss, micro_batch)
            return replace(found, notes=(*notes, *found.notes))
    except Exception as error:  # noqa: BLE001 - whose fault it is, a step for real tells, which a large model cannot have
        why = told(error)
    if size > MOST_REAL:
        return ModelTrace(parts=(), notes=(_unfollowed(why, size),))
    model = build().to(dtype)
    try:
        found = _follow(model, batches, loss, micro_batch)
    except Exception as error:  # noqa: BLE001 - whether it is the step's own, the step alone tells
        _run_alone(model, partial(_loss_of, model, batches(micro_batch), loss), told, name)
        return ModelTrace(parts=(), notes=(_uncounted(error),))
    note = f"a step was computed for real, since following it without values failed: {why}."
    return replace(found, notes=(note, *found.notes))


def _unfollowed(why: str, size: int) -> str:
    return (
        f"time and memory stay open: a step of your module cannot be followed without values ({why}), and with "
        f"{size / (1 << 30):.1f} GiB of parameters none is computed. Without `.item()`, `.tolist()`, `nonzero` and "
        f"branches on values in the forward, or below {MOST_REAL >> 30} GiB, it can be planned."
    )


def _uncounted(error: BaseException) -> str:
    return (
        "time and memory stay open: a step of your module runs, and counting what it does failed "
        f"({_last_line(error)})."
    )


def _run_alone(
    model: nn.Module, forward: Callable[[], Tensor], told: Callable[[BaseException], str], name: str
) -> None:
    """Take a step uncounted.

    Raises:
        ModelError: it fails.
    """
    model.zero_grad(set_to_none=True)
    try:
        forward().backward()
    except Exception as error:  # whatever the user's code raises is theirs to read
        raise ModelError(
            f"a step of {name} raised {told(error)}",
            hint="correct the module or the data that `model` and `data` name.",
        ) from error


def _follow(model: nn.Module, batches: Batches, loss: Loss, micro_batch: int) -> ModelTrace:
    """Return what two sizes of the micro-batch say of one sample and of what comes once.

    A module may take its own micro-batch alone; then all grows with it, and the counts hold there.
    """
    model.train()
    notes: tuple[str, ...] = ()
    line: Line = partial(_size, samples=micro_batch)
    was_enabled: bool = torch._C._get_mkldnn_enabled()
    # oneDNN's recurrent layers are one operation each, whose work nothing tells.
    torch._C._set_mkldnn_enabled(False)
    try:
        model(batches(micro_batch)[0])  # What a module makes once, and keeps, is no part of a step.
        few = _count(model, batches(micro_batch), loss)
        try:
            many = _count(model, batches(2 * micro_batch), loss)
        except Exception:  # noqa: BLE001 - with the samples that it is trained on, it just ran
            many = few
            line = partial(_proportion, samples=micro_batch)
            notes = (
                f"the module was followed with {micro_batch} samples alone, since it does not take {2 * micro_batch}: "
                "for other micro-batches all is taken to grow with the samples.",
            )
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)
    return replace(_put_together(model, few, many, line), notes=notes)


def _count(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Loss) -> Counter:
    model.zero_grad(set_to_none=True)
    counter = Counter(model)
    counter.run(partial(_loss_of, model, batch, loss))
    return counter


def _loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Loss) -> Tensor:
    return loss(model(batch[0]), batch[1])


def _put_together(model: nn.Module, few: Counter, many: Counter, line: Line) -> ModelTrace:
    modules = dict(model.named_modules())
    owners: dict[int, str] = {}
    parts = []
    names = [*few.order, *(n for n in modules if n not in few.order), LOSS]
    for name in names:
        own: list[tuple[str, Tensor]] = []
        shared: list[tuple[str, Tensor]] = []
        module = modules.get(name)
        for parameter in module.parameters(recurse=False) if module is not None else ():
            owner = owners.setdefault(id(parameter), name)
            (own if owner == name else shared).append((owner, parameter))
        part = TracedPart(
            name=name,
            kind=type(module).__name__ if module is not None else LOSS,
            parameters=sum(p.numel() for _, p in own),
            trained=sum(p.numel() for _, p in own if p.requires_grad),
            shared=tuple((owner, p.numel()) for owner, p in shared),
            buffers=sum(b.nbytes for b in module.buffers(recurse=False)) if module is not None else 0,
            forward=_pass(few.forward[name], many.forward[name], line),
            backward=_pass(few.backward[name], many.backward[name], line),
            kept=line(few.kept[name], many.kept[name]),
            output=line(few.outputs.get(name, 0), many.outputs.get(name, 0)),
        )
        is_child = module is not None and "." not in name
        if (
            is_child
            or part.parameters
            or part.shared
            or part.buffers
            or part.forward.operations
            or part.backward.operations
        ):
            parts.append(part)
    children = tuple(name for name, _ in model.named_children()) if isinstance(model, nn.Sequential) else ()
    workspace = line(few.workspace, many.workspace)
    return ModelTrace(parts=tuple(parts), children=children, workspace=workspace)


def _pass(few: Tally, many: Tally, line: Line) -> PassWork:
    lines = {f.name: line(getattr(few.work, f.name), getattr(many.work, f.name)) for f in fields(Work)}
    return PassWork(
        each=Work(**{name: size.each for name, size in lines.items()}),
        once=Work(**{name: size.once for name, size in lines.items()}),
        kernels=few.kernels, operations=few.operations,
    )  # fmt: skip


def _size(few: float, many: float, *, samples: int) -> Size:
    """Return the line through the counts at `samples` and twice as many."""
    each = (many - few) / samples
    return Size(each=each, once=few - each * samples)


def _proportion(count: float, _: float, *, samples: int) -> Size:
    """Return one count as what grows with the samples."""
    return Size(each=count / samples)


def _take_values(model: nn.Module, dtype: torch.dtype) -> None:
    """Put tensors of the wanted kind, without values as the mode at work makes them, in the place of all others.

    Ties stay ties. Tensors on the meta device would be sent to other kernels than the CPU's.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        plain = [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
        for name, tensor in [*module._parameters.items(), *module._buffers.items(), *plain]:
            if tensor is None:
                continue
            if id(tensor) not in made:
                kind = dtype if tensor.is_floating_point() else tensor.dtype
                bare = torch.empty_like(tensor.detach(), device="cpu", dtype=kind)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
            setattr(module, name, made[id(tensor)])  # as recurrent modules, which keep lists of them, expect


def _batches(job: JobSpec, dtype: torch.dtype) -> Batches:
    """Return what makes batches of a few samples drawn beforehand, for real: a data set may need values."""
    if job.data.dataset:
        data = CheckedSamples(build_user_data(job.data.dataset, key="data.dataset"), job.data.dataset, dtype)
        pairs = [data[index] for index in range(min(DRAWN, len(data)))]
    else:
        pairs = [(torch.zeros(job.data.sequence, dtype=torch.int64),) * 2]

    def of(samples: int) -> tuple[Tensor, Tensor]:
        picked = [pairs[index % len(pairs)] for index in range(samples)]
        return torch.stack([x for x, _ in picked]), torch.stack([y for _, y in picked])

    return of


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Let this process grow by no more than `MOST_BUILT`: a larger model is refused, and the machine does not swap."""
    status = Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if status.is_file():
        held = int(status.read_text().split()[0]) * resource.getpagesize()
        most = held + MOST_BUILT if before[1] == resource.RLIM_INFINITY else min(held + MOST_BUILT, before[1])
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {said}{where}"
