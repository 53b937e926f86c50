"""What the user asks for: the job file as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import ClassVar, Literal

from supernode.errors import SpecError
from supernode.schema.lasting import CheckpointSpec, RecoverySpec
from supernode.schema.model import PRESETS, DecoderShape
from supernode.schema.spread import FORBID, MOST_CARDS, Balance, Communication, Parallelism, within


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What the model reads. One of `text`, `tokens` and `dataset`.

    Attributes:
        text: text files, folders or glob patterns; `stdlib` is the running Python's own standard library.
        tokens: a file of token numbers: `.npy`, or raw little-endian uint16 (`.bin`).
        dataset: `file.py:function` that returns a torch data set of (input, target) pairs.
        held_out_dataset: `file.py:function` likewise, for evaluation.
        tokenizer: `bytes`, or `bpe:4096` to train a byte-pair encoding of that many tokens on the text.
        sequence: tokens in a sample.
        held_out: share of the text kept for evaluation.
        loss: `cross_entropy`, or `file.py:function` of (output, target) that returns the *sum* over the samples.
        drop_last: leave out the short batch at the end of an epoch instead of training on it.
    """

    __pydantic_config__: ClassVar = FORBID

    text: str | tuple[str, ...] = ""
    tokens: str = ""
    dataset: str = ""
    held_out_dataset: str = ""
    tokenizer: str = "bytes"
    sequence: int = 128
    held_out: float = 0.02
    loss: str = "cross_entropy"
    drop_last: bool = False

    def __post_init__(self) -> None:
        given = [key for key in ("text", "tokens", "dataset") if getattr(self, key)]
        if not given:
            object.__setattr__(self, "text", "stdlib")
        if len(given) > 1:
            raise SpecError(f"`data` names {' and '.join(given)}", hint="give one of `text`, `tokens` and `dataset`.")
        within("data", self, sequence=(2, 1_048_576), held_out=(0.0, 0.5))
        if self.tokenizer != "bytes":
            size = self.tokenizer.removeprefix("bpe:")
            if not self.tokenizer.startswith("bpe:") or not size.isdigit() or not 257 <= int(size) <= 65_535:
                raise SpecError(
                    f"`data.tokenizer` is {self.tokenizer!r}",
                    hint="write `bytes`, or `bpe:N` with N from 257 to 65535.",
                )
        if self.held_out_dataset and not self.dataset:
            raise SpecError("`data.held_out_dataset` stands without `data.dataset`", hint="give both, or neither.")
        if self.loss != "cross_entropy" and not self.dataset:
            raise SpecError(
                f"`data.loss` is {self.loss!r} on text", hint="leave it out, or bring your own `data.dataset`."
            )

    @property
    def texts(self) -> tuple[str, ...]:
        """The text patterns."""
        return (self.text,) if isinstance(self.text, str) else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """How the weights move: AdamW or SGD; warm-up, decay and clipping only where they are asked for.

    Attributes:
        learning_rate: highest rate.
        warmup: steps to get there.
        decay: shape of the way down from `warmup` to the last step.
        final_ratio: rate at the last step over the highest rate.
        clip: greatest norm of the whole gradient, over all cards; 0 leaves it alone.
        rounding: of weights of 16 bits after their update: to the nearest, or up or down by chance so that the mean
            is kept.
        state: moments of the weights' own precision, of float32, or in 8 bits with a scale per 256.
        in_backward: each weight is updated as soon as its gradient is whole, which is let go then.
        most_skips: steps in a row whose gradients may overflow in float16 before the run stops.
    """

    __pydantic_config__: ClassVar = FORBID

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    warmup: int = 0
    decay: Literal["cosine", "linear", "none"] = "none"
    final_ratio: float = 0.1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    momentum: float = 0.9
    clip: float = 0.0
    rounding: Literal["nearest", "stochastic"] = "nearest"
    state: Literal["same", "float32", "float8"] = "same"
    in_backward: bool = False
    most_skips: int = 25

    def __post_init__(self) -> None:
        within(
            "optimizer", self,
            learning_rate=(0, 1e4), warmup=(0, 10**9), final_ratio=(0, 1), weight_decay=(0, 100),
            epsilon=(1e-30, 1), momentum=(0, 0.99999), clip=(0, 1e9), most_skips=(1, 10**6),
        )  # fmt: skip
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SpecError(f"`optimizer.betas` is {list(self.betas)}", hint="choose two numbers from 0 to below 1.")
        if self.in_backward and self.clip:
            raise SpecError(
                f"`optimizer.in_backward` is on and `optimizer.clip` is {self.clip:g}, a norm known after backward",
                hint="set `optimizer.clip` to 0, or `optimizer.in_backward` to false.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateSpec:
    """When the model is tried on held-out data.

    Attributes:
        every: steps between evaluations; 0 evaluates at the end only.
        batches: global batches in one evaluation.
    """

    __pydantic_config__: ClassVar = FORBID

    every: int = 0
    batches: int = 4

    def __post_init__(self) -> None:
        within("evaluate", self, every=(0, 10**9), batches=(1, 10**6))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillSpec:
    """A fault on purpose: one rank is killed or errs once, to see the run recover, or is slow throughout.

    Attributes:
        kill_step: step after which the rank is killed; 0 for none.
        flip_step: step after which a bit of one of its weights changes, in the first launch; 0 for none.
        rank: the rank that dies, errs or is slow.
        slowness: times as long that the rank takes for its passes; 1 for none.
    """

    __pydantic_config__: ClassVar = FORBID

    kill_step: int = 0
    flip_step: int = 0
    rank: int = 0
    slowness: float = 1.0

    def __post_init__(self) -> None:
        within("drill", self, kill_step=(0, 10**9), flip_step=(0, 10**9), rank=(0, MOST_CARDS), slowness=(1, 100))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """Text that the trained model writes at the end; 0 tokens for none."""

    __pydantic_config__: ClassVar = FORBID

    prompt: str = "def "
    tokens: int = 0
    temperature: float = 0.8

    def __post_init__(self) -> None:
        within("sample", self, tokens=(0, 100_000), temperature=(0, 100))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One training job.

    Attributes:
        name: names the run and its folder.
        model: a preset, a shape, or `file.py:function` that returns an `nn.Module`.
        weights: what to begin from instead of random numbers: a folder or file of safetensors, a checkpoint of
            torch.distributed.checkpoint, or one of ours.
        batch: samples in one step, over all cards.
        gradient_accumulation: micro-batches that one step is cut into on each card; also what fills a pipeline.
        steps: optimizer steps in all.
        seed: every random number follows from it.
        precision: of weights and, unless `arithmetic` says otherwise, of what is computed with them.
        arithmetic: `float32` casts weights of 16 bits up layer by layer; `float8` is for linear layers' products.
        rendezvous: `host:port` where ranks meet; empty meets through a file in the run's folder.
        threads: CPU threads of one rank; 0 shares the cores evenly.
    """

    __pydantic_config__: ClassVar = FORBID

    name: str = "run"
    model: str | DecoderShape = "tiny"
    weights: str = ""
    data: DataSpec = field(default_factory=DataSpec)
    batch: int = 16
    gradient_accumulation: int = 1
    steps: int = 100
    seed: int = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    arithmetic: Literal["same", "float32", "float8"] = "same"
    parallelism: Parallelism = field(default_factory=Parallelism)
    communication: Communication = field(default_factory=Communication)
    balance: Balance = field(default_factory=Balance)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    evaluate: EvaluateSpec = field(default_factory=EvaluateSpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    drill: DrillSpec = field(default_factory=DrillSpec)
    sample: SampleSpec = field(default_factory=SampleSpec)
    rendezvous: str = ""
    threads: int = 0

    def __post_init__(self) -> None:
        if (
            not self.name
            or len(self.name) > 64
            or not all(c.isalnum() or c in "-_." for c in self.name)
            or self.name[0] == "."
        ):
            raise SpecError(
                f"`name` is {self.name!r}",
                hint="use 1 to 64 letters, digits, `-`, `_` and `.`, not starting with a dot.",
            )
        within(
            "", self,
            batch=(1, 10**7), gradient_accumulation=(1, 10**6), steps=(1, 10**9), seed=(0, 2**32 - 1),
            threads=(0, 1024),
        )  # fmt: skip
        if isinstance(self.model, str) and not self.module and self.model not in PRESETS:
            from_presets = ", ".join(PRESETS)
            raise SpecError(
                f"`model` is {self.model!r}, neither a preset nor file.py:function",
                hint=f"presets: {from_presets}. Or give a shape: `model: {{layers: 4, width: 128, heads: 4}}`.",
            )
        self._check_precision()
        self._check_communication()
        if self.rendezvous:
            host, _, port = self.rendezvous.rpartition(":")
            if not host or not port.isdigit() or not 1 <= int(port) <= 65_535:
                raise SpecError(f"`rendezvous` is {self.rendezvous!r}", hint="write `host:port`, or leave it out.")

    def _check_precision(self) -> None:
        optimizer, half = self.optimizer, self.precision == "float16"
        if self.precision == "float32" and optimizer.rounding == "stochastic":
            raise SpecError(
                "`optimizer.rounding` is stochastic and `precision` float32, whose weights are not rounded",
                hint="set `precision` to bfloat16 or float16, or leave `optimizer.rounding` out.",
            )
        if half and optimizer.name == "adamw" and optimizer.state == "same":
            raise SpecError(
                "`precision` is float16 and `optimizer.state` is same; squares of gradients vanish below 6e-8 there",
                hint="set `optimizer.state` to float32 or float8, or `precision` to bfloat16.",
            )
        if half and optimizer.in_backward:
            raise SpecError(
                "`optimizer.in_backward` is on and `precision` float16, where a late overflow must undo the whole step",
                hint="set `precision` to bfloat16, or `optimizer.in_backward` to false.",
            )
        if optimizer.in_backward and self.parallelism.expert > 1:
            raise SpecError(
                f"`parallelism.expert` is {self.parallelism.expert}, whose experts' gradients meet elsewhere than the "
                "rest, and `optimizer.in_backward` sums all alike",
                hint="set `optimizer.in_backward` to false, or `parallelism.expert` to 1.",
            )
        if self.arithmetic == "float8" and self.shape is not None and self.shape.experts:
            raise SpecError(
                f"`arithmetic` is float8 and `model.experts` {self.shape.experts}, whose products stay as they are",
                hint="leave out `arithmetic`, or set `model.experts` to 0.",
            )

    def _check_communication(self) -> None:
        said = self.communication
        if self.parallelism.sharding == "fsdp" and said.compress != "none":
            raise SpecError(
                f"`communication.compress` is {said.compress} and `parallelism.sharding` fsdp, whose gradients travel "
                "as they are",
                hint="set `parallelism.sharding` to replicas or `communication.compress` to none; in plain PyTorch "
                "`compress_fsdp` does both.",
            )
        if self.parallelism.sharding == "fsdp" and said.algorithm != "auto":
            raise SpecError(
                f"`communication.algorithm` is {said.algorithm} and `parallelism.sharding` fsdp, whose sums are "
                "PyTorch's own",
                hint="set `parallelism.sharding` to replicas, or leave out `communication.algorithm`.",
            )
        if self.optimizer.in_backward and said.compress != "none":
            raise SpecError(
                f"`communication.compress` is {said.compress}, which keeps as much as the gradients that "
                "`optimizer.in_backward` lets go",
                hint="set `communication.compress` to none, or `optimizer.in_backward` to false.",
            )
        if self.optimizer.in_backward and said.algorithm != "auto":
            raise SpecError(
                f"`communication.algorithm` is {said.algorithm}, and `optimizer.in_backward` sums each gradient by "
                "gloo's own ring",
                hint="leave out `communication.algorithm`, or set `optimizer.in_backward` to false.",
            )

    @property
    def activations(self) -> Literal["float32", "bfloat16", "float16"]:
        """Precision of what flows between layers."""
        return "float32" if self.arithmetic == "float32" else self.precision

    @property
    def module(self) -> str:
        """`file.py:function` of the user's own model, or empty."""
        if (
            isinstance(self.model, str)
            and ":" in self.model
            and PurePath(self.model.rpartition(":")[0]).suffix == ".py"
        ):
            return self.model
        return ""

    @property
    def shape(self) -> DecoderShape | None:
        """The decoder's shape, unless the model is the user's own."""
        if isinstance(self.model, DecoderShape):
            return self.model
        return None if self.module else PRESETS[self.model]

    @property
    def micro_batch_of(self) -> int:
        """Samples in one micro-batch over the whole data axis."""
        return self.batch // self.gradient_accumulation
