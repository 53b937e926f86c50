"""What does the user's own module ask of a card? Counted operation by operation, without a value being computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from supernode.schema.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Counts of work.

    Attributes:
        products: FLOPs of matrix products and convolutions.
        scores: FLOPs of fused attention's core.
        exponentials: of fused attention's core.
        operands: bytes that products and convolutions read and write.
        moved: bytes that all other operations read and write.
    """

    products: float = 0.0
    scores: float = 0.0
    exponentials: float = 0.0
    operands: float = 0.0
    moved: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Return both together."""
        return Work(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)})

    def times(self, factor: float) -> Work:
        """Return so many of it."""
        return Work(**{f.name: factor * getattr(self, f.name) for f in fields(Work)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """What one pass, forward or backward, takes on one card.

    Attributes:
        each: for each sample of the micro-batch.
        once: whatever the number of samples, such as reading the weights.
        kernels: operations that launch something.
        operations: all operations, views included.
    """

    each: Work = field(default_factory=Work)
    once: Work = field(default_factory=Work)
    kernels: int = 0
    operations: int = 0

    def __add__(self, other: PassWork) -> PassWork:
        """Return one after the other."""
        return PassWork(
            each=self.each + other.each, once=self.once + other.once, kernels=self.kernels + other.kernels,
            operations=self.operations + other.operations,
        )  # fmt: skip

    def of(self, samples: float) -> Work:
        """Return the work of a micro-batch of so many samples."""
        return self.once + self.each.times(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Bytes that grow with the micro-batch: `each` for a sample, `once` whatever its size."""

    each: float = 0.0
    once: float = 0.0

    def of(self, samples: float) -> float:
        """Return the bytes of a micro-batch of so many samples."""
        return self.once + self.each * samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPart:
    """One module with what its own forward does beside its children's.

    Attributes:
        name: of the module in the model, as `named_modules` says; `loss` for what follows the model.
        kind: its class.
        parameters: elements that no earlier part owns.
        trained: those of them that have gradients.
        shared: parameters tied to an earlier part: its name, their elements.
        buffers: bytes of its buffers.
        forward: work of the forward.
        backward: work of the backward.
        kept: bytes that it saves for the backward and no earlier part did, parameters and buffers left out.
        output: bytes of what it returns.
    """

    name: str
    kind: str
    parameters: int = 0
    trained: int = 0
    shared: tuple[tuple[str, int], ...] = ()
    buffers: int = 0
    forward: PassWork = field(default_factory=PassWork)
    backward: PassWork = field(default_factory=PassWork)
    kept: Size = field(default_factory=Size)
    output: Size = field(default_factory=Size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTrace:
    """A module in the order in which a sample meets its parts.

    Attributes:
        parts: none where the module could not be counted; the notes say why.
        children: names of the root's children where it is an `nn.Sequential`, which is cut between them.
        is_cut_anywhere: stages are told by `parts` in their order, since the graph of a module is cut.
        workspace: bytes alive at the fullest moment of a forward and backward beside what is kept and the gradients.
        notes: what the reader of a plan should know of how it was traced.
    """

    parts: tuple[TracedPart, ...]
    children: tuple[str, ...] = ()
    is_cut_anywhere: bool = False
    workspace: Size = field(default_factory=Size)
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(part.parameters for part in self.parts)

    @property
    def forward(self) -> PassWork:
        """Work of the whole forward."""
        return _sum(part.forward for part in self.parts)

    @property
    def backward(self) -> PassWork:
        """Work of the whole backward."""
        return _sum(part.backward for part in self.parts)

    def flops(self, samples: float) -> float:
        """Return the FLOPs of a step's products; what fused attention computes again in its backward is left out."""
        ahead, back = self.forward.of(samples), self.backward.of(samples)
        return ahead.products + back.products + 3 * ahead.scores

    def block(self, index: int) -> tuple[TracedPart, ...]:
        """Return the parts of a child of the sequence; the loss goes with the last one."""
        if self.is_cut_anywhere:
            return self.parts[index : index + 1]
        if len(self.children) <= 1:
            return self.parts
        last = index == len(self.children) - 1
        mine = self.children[index]
        return tuple(p for p in self.parts if p.name.partition(".")[0] == mine or (last and p.name in ("loss", "")))

    @property
    def blocks(self) -> int:
        """Pieces that the model can be cut into."""
        if self.is_cut_anywhere:
            return len(self.parts)
        return max(1, len(self.children))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """What is to be traced.

    Attributes:
        job: names the user's module, data and loss; its paths are absolute.
        micro_batch: samples at which the counts are exact; at others they follow a straight line.
    """

    job: JobSpec
    micro_batch: int


def _sum(passes: Iterable[PassWork]) -> PassWork:
    total = PassWork()
    for each in passes:
        total = total + each
    return total
