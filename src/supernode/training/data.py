"""What a rank reads in a step: the samples of its data coordinate, micro-batch by micro-batch, always of one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from supernode.axes.context import places_of
from supernode.data.corpus import Corpus, load_tokens
from supernode.data.sampler import Sampler
from supernode.errors import DataError
from supernode.parallel.assemble import DTYPES
from supernode.parallel.chance import seed_for, seed_generators
from supernode.parallel.graphs import Trial
from supernode.parallel.tensor import IGNORED, cross_entropy
from supernode.parallel.usercode import build_user_data, load_function
from supernode.schema.plan import Plan


class Samples(Protocol):
    """Something with numbered samples of one shape."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


class TokenWindows:
    """Consecutive windows of a token file: window i is the tokens from i·T, its target the same shifted by one."""

    def __init__(self, tokens: np.ndarray, sequence: int) -> None:
        self.tokens, self.sequence = tokens, sequence

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.sequence
        window = torch.from_numpy(self.tokens[start : start + self.sequence + 1].astype(np.int64))
        return window[:-1], window[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's part of a step.

    Attributes:
        inputs: one tensor per micro-batch, first dim the samples.
        targets: likewise.
    """

    inputs: list[Tensor]
    targets: list[Tensor]


@dataclass(slots=True, kw_only=True)
class Feed:
    """The samples of a run, the loss that judges them, and who gets which.

    Attributes:
        loss: (output, target) to the *sum* of the losses.
        count: target to the number of positions that count.
        pads: a short batch is filled up with samples that do not count; else it has fewer samples.
        context: which part of each sequence is read, of as many as the layout's context axis has.
    """

    plan: Plan
    data: int
    train: Samples
    held_out: Samples | None
    sampler: Sampler
    loss: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], int]
    pads: bool
    context: int = 0

    def training(self, step: int) -> Batch:
        """Return this rank's samples of a step, counted from 0."""
        return self._batch(self.train, self.sampler.indices(step), ("sample", step))

    def evaluation(self, batch: int) -> Batch:
        """Return this rank's samples of one batch of held-out data, the same at every evaluation."""
        assert self.held_out is not None
        start = batch * self.plan.job.batch
        indices = np.arange(start, min(start + self.plan.job.batch, len(self.held_out)))
        return self._batch(self.held_out, indices, ("held out", batch))

    @property
    def evaluation_batches(self) -> int:
        """Batches of one evaluation; fewer than the job wants where little is held out, none where nothing is."""
        if self.held_out is None:
            return 0
        whole, rest = divmod(len(self.held_out), self.plan.job.batch)
        is_short_taken = rest and (self.pads or self.plan.layout.ranks == 1)
        return min(self.plan.job.evaluate.batches, whole + bool(is_short_taken))

    def _batch(self, samples: Samples, indices: np.ndarray, purpose: tuple[str, int]) -> Batch:
        size = self.plan.micro_batch
        inputs, targets = [], []
        for slot in slots(self.plan, self.data):
            start = slot * size
            picked = [self._draw(samples, int(index), purpose) for index in indices[start : start + size]]
            short = size - len(picked)
            if short and self.pads:
                blank_x, blank_y = self._draw(samples, int(indices[0]), purpose)
                picked += [(blank_x, torch.full_like(blank_y, IGNORED))] * short
            if not picked:
                continue
            try:
                inputs.append(torch.stack([x for x, _ in picked]))
                targets.append(torch.stack([y for _, y in picked]))
            except RuntimeError as error:
                raise DataError(
                    f"samples {indices[start : start + size].tolist()} differ in shape: {error}",
                    hint="return inputs and targets of one shape from the data set.",
                ) from error
        return Batch(inputs=inputs, targets=targets)

    def _draw(self, samples: Samples, index: int, purpose: tuple[str, int]) -> tuple[Tensor, Tensor]:
        """Return a sample; what a user's data set draws for it follows from its number and purpose, not the rank."""
        if self.plan.job.data.dataset:
            seed_generators(seed_for(self.plan.job.seed, *purpose, index))
        x, y = samples[index]
        layout, sequence = self.plan.layout, self.plan.job.data.sequence
        if layout.context == 1 and not layout.sequence:
            return x, y
        key = "context" if layout.context > 1 else "sequence"
        for name, part in (("input", x), ("target", y)):
            if part.shape[:1] != (sequence,):
                raise DataError(
                    f"the {name} of sample {index} has the shape {list(part.shape)}, and `parallelism.{key}` cuts "
                    f"sequences of `data.sequence` {sequence}",
                    hint=f"set `data.sequence` to the length of your samples, or leave out `parallelism.{key}`.",
                )
        places = places_of(sequence, rank=self.context, ranks=layout.context)
        return x[places], y[places]


def slots(plan: Plan, data: int) -> list[int]:
    """Return which of a step's micro-batches are a data coordinate's: dealt out in turn to all that still take some.

    >>> from supernode.schema.job import JobSpec
    >>> from supernode.schema.plan import Layout
    >>> layout = Layout(data=2)
    >>> uneven = Plan(job=JobSpec(), layout=layout, machine="", cards=(0, 1), micro_batch=1, micro_batches=2, stages=(),
    ...               shares=(3, 1))
    >>> slots(uneven, 0), slots(uneven, 1)
    ([0, 2, 3], [1])
    """
    shares = [plan.share(other) for other in range(plan.layout.data)]
    order = [(turn, other) for turn in range(max(shares)) for other, share in enumerate(shares) if turn < share]
    return [slot for slot, (_, other) in enumerate(order) if other == data]


def open_feed(plan: Plan, corpus: Corpus | None, data: int, context: int = 0) -> Feed:
    """Open the run's data for one coordinate on the data axis and one on the context axis.

    Raises:
        DataError: the data is missing, empty, or not what the job says.
    """
    job = plan.job
    train: Samples
    held_out: Samples | None
    if corpus is not None:
        train = TokenWindows(load_tokens(corpus.train, corpus.dtype), job.data.sequence)
        held_out = TokenWindows(load_tokens(corpus.held_out, corpus.dtype), job.data.sequence)
    else:
        dtype, other = DTYPES[job.activations], job.data.held_out_dataset
        train = CheckedSamples(build_user_data(job.data.dataset, key="data.dataset"), job.data.dataset, dtype)
        held_out = CheckedSamples(build_user_data(other, key="data.held_out_dataset"), other, dtype) if other else None
    sampler = Sampler(len(train), job.batch, job.seed, job.data.drop_last)
    plain = job.data.loss == "cross_entropy"
    loss = cross_entropy if plain else user_loss(job.data.loss)
    classes = plain and not train[0][1].is_floating_point()
    if plain and not classes:
        raise DataError(
            f"targets are {train[0][1].dtype}, and cross-entropy wants class numbers (int64)",
            hint="return class numbers, or name your own `data.loss`.",
        )
    whole_batches = job.data.drop_last or len(train) % job.batch == 0
    if not classes and plan.layout.ranks > 1 and not whole_batches:
        raise DataError(
            f"{len(train)} samples leave a short last batch, which `data.loss` cannot leave out on several cards",
            hint=f"set `data.drop_last: true`, or a `batch` that divides {len(train)}.",
        )
    if not classes and plan.layout.ranks > 1 and held_out is not None and len(held_out) < job.batch:
        raise DataError(
            f"{len(held_out)} samples are held out, and `data.loss` on several cards needs a `batch` of {job.batch}",
            hint=f"hold out {job.batch} samples or more, or set `batch` to {len(held_out)} or less.",
        )
    count = (lambda target: int((target != IGNORED).sum())) if classes else len
    return Feed(
        plan=plan, data=data, train=train, held_out=held_out, sampler=sampler, loss=loss, count=count, pads=classes,
        context=context,
    )  # fmt: skip


def check_norms(feed: Feed, modules: Iterable[nn.Module]) -> None:
    """Check that no running statistics will count the samples that only fill a short batch up.

    Raises:
        DataError: they would.
    """
    length, batch = len(feed.train), feed.plan.job.batch
    if not feed.pads or feed.plan.job.data.drop_last or length % batch == 0:
        return
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                raise DataError(
                    f"{length} samples leave a short last batch, and `{name}` would count what fills it up",
                    hint=f"set `data.drop_last: true`, or a `batch` that divides {length}.",
                )


def trial_of(feed: Feed) -> Trial | None:
    """Return this rank's first micro-batch, and what a module has to go with; None where no module is the user's."""
    if feed.plan.job.shape is not None:
        return None
    batch = feed.training(0)
    return Trial(
        inputs=batch.inputs[0], targets=batch.targets[0], loss=feed.loss, evaluates=feed.evaluation_batches > 0,
        accepts=lambda model: check_norms(feed, [model]),
    )  # fmt: skip


class CheckedSamples:
    """A user's data set whose samples are checked to be pairs of tensors; inputs come in the model's precision."""

    def __init__(self, data: Any, reference: str, dtype: torch.dtype) -> None:
        self.data, self.reference, self.dtype = data, reference, dtype

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            sample = self.data[index]
        except Exception as error:
            raise DataError(
                f"sample {index} of {self.reference} raised {type(error).__name__}: {error}",
                hint="correct the data set's `__getitem__`.",
            ) from error
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise DataError(
                f"sample {index} of {self.reference} is a {type(sample).__name__}, not (input, target)",
                hint="return a pair from `__getitem__`.",
            )
        x, y = (torch.as_tensor(part) for part in sample)
        return x.to(self.dtype) if x.is_floating_point() else x, y


def user_loss(reference: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the user's loss, checked to give one number.

    Raises:
        DataError: the file or function fails.
    """
    function = load_function(reference, key="data.loss", error=DataError)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = function(output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise DataError(f"{reference} returned no single number", hint="return the sum over the samples.")
        return value.reshape(())

    return loss
