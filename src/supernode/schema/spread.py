"""How is the work of a job spread over cards, and how do its gradients meet?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from supernode.errors import SpecError

MOST_CARDS = 1_048_576
FORBID: dict[str, str] = {"extra": "forbid"}


def within(section: str, value: object, **limits: tuple[float, float]) -> None:
    """Check that each named attribute lies within its closed limits (NaN never does)."""
    for key, (least, most) in limits.items():
        number = getattr(value, key)
        if not least <= number <= most:
            name = f"{section}.{key}" if section else key
            raise SpecError(f"`{name}` is {number}", hint=f"choose {least:,} to {most:,}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How the work is spread over cards.

    Attributes:
        tensor: cards that share each matrix.
        pipeline: stages that the layers are cut into.
        data: copies (or shards) that see different samples. 0 means: what the cards at hand leave over.
        context: cards that share each sequence, a part of its tokens each.
        expert: cards of the data axis over which the experts of a mixture are spread.
        sequence: what lies between the split matrices is shared along the sequence by the cards of the tensor axis.
        sharding: `replicas` keeps whole copies on the data axis; `fsdp` shards weights, gradients and optimizer.
        schedule: order of forward and backward over the stages.
        interleave: stages that each pipeline rank holds, 2 or more for `interleaved`.
        recompute: what is computed again in the backward instead of kept: nothing, the attention's core, whole layers.
    """

    __pydantic_config__: ClassVar = FORBID

    tensor: int = 1
    pipeline: int = 1
    data: int = 0
    context: int = 1
    expert: int = 1
    sequence: bool = False
    sharding: Literal["replicas", "fsdp"] = "replicas"
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    interleave: int = 1
    recompute: Literal["none", "selective", "full"] = "none"

    def __post_init__(self) -> None:
        within(
            "parallelism", self,
            tensor=(1, 1024), pipeline=(1, 1024), data=(0, MOST_CARDS), context=(1, 1024), expert=(1, 1024),
            interleave=(1, 64),
        )  # fmt: skip
        if (self.schedule == "interleaved") != (self.interleave > 1):
            raise SpecError(
                f"`parallelism.schedule` is {self.schedule} and `parallelism.interleave` is {self.interleave}",
                hint="`interleaved` goes with `interleave` of 2 or more, the others with 1.",
            )
        if self.interleave > 1 and self.pipeline == 1:
            raise SpecError(
                "`parallelism.interleave` is above 1 on one pipeline stage",
                hint="set `parallelism.pipeline` to 2 or more, or `interleave` to 1.",
            )
        if self.schedule == "zero_bubble" and self.pipeline == 1:
            raise SpecError(
                "`parallelism.schedule` is zero_bubble on one pipeline stage, which has no bubble",
                hint="set `parallelism.pipeline` to 2 or more, or `parallelism.schedule` to 1f1b.",
            )
        if self.sequence and self.tensor == 1:
            raise SpecError(
                "`parallelism.sequence` is on and `parallelism.tensor` is 1",
                hint="set `parallelism.tensor` to 2 or more; `parallelism.context` shares a sequence without it.",
            )
        if self.data and self.data % self.expert:
            raise SpecError(
                f"`parallelism.expert` is {self.expert} and `parallelism.data` {self.data}, over which experts spread",
                hint="set `parallelism.expert` to a divisor of `parallelism.data`.",
            )

    @property
    def one_copy(self) -> int:
        """Cards that hold the model once and read the same samples."""
        return self.tensor * self.pipeline * self.context

    @property
    def least(self) -> int:
        """Cards that the degrees need; where the data axis is open, those of its fewest copies."""
        return self.one_copy * (self.data or self.expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Whether slow cards are named, and whether work follows what cards are measured to do.

    Attributes:
        every: steps between two looks at the ranks' times; 0 never looks.
        slow: from how many times its peers' time on a card counts as slow.
        move: layers move between stages, and micro-batches between copies, where that makes the step quicker. Sums are
            then added in another order, so losses agree to rounding and no longer to the bit.
        gain: part of the busiest card's time that a move must save.
    """

    __pydantic_config__: ClassVar = FORBID

    every: int = 20
    slow: float = 1.5
    move: bool = False
    gain: float = 0.1

    def __post_init__(self) -> None:
        within("balance", self, every=(0, 10**9), slow=(1.05, 1000), gain=(0.01, 0.9))
        if self.move and not self.every:
            raise SpecError(
                "`balance.move` is on and `balance.every` is 0", hint="set `balance.every` to some steps, such as 20."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """How gradients meet on the data axis.

    Attributes:
        algorithm: of the sum over copies; `auto` takes what is quickest as predicted and then measured at the start.
        compress: what travels instead of the gradient, with error feedback.
        where: `slow` compresses between hosts only, `all` everywhere.
        rank: of `powersgd`'s factors.
        density: part of the numbers that `topk` sends.
        warmup: steps that travel uncompressed.
        bucket: most bytes of gradients that travel together; between hosts, small models are cut into smaller pieces.
        overlap: gradients travel while backward goes on; off, they leave when it has ended. No number depends on it.
    """

    __pydantic_config__: ClassVar = FORBID

    algorithm: Literal["auto", "flat", "hierarchical", "torus"] = "auto"
    compress: Literal["none", "int8", "float8", "topk", "powersgd", "levels5", "levels7", "onebit"] = "none"
    where: Literal["slow", "all"] = "slow"
    rank: int = 4
    density: float = 0.01
    warmup: int = 0
    # PyTorch DDP's default bucket (Li et al., arXiv:2006.15704, figure 8).
    bucket: int = 25 * 2**20
    overlap: bool = True

    def __post_init__(self) -> None:
        within(
            "communication", self,
            rank=(1, 1024), density=(1e-6, 1), warmup=(0, 10**9), bucket=(1024, 2**34),
        )  # fmt: skip
        if self.compress != "none" and self.algorithm != "auto":
            raise SpecError(
                f"`communication.algorithm` is {self.algorithm} and `communication.compress` {self.compress}, whose "
                "sums take a way of their own",
                hint="leave out `communication.algorithm`, or set `communication.compress` to none.",
            )
