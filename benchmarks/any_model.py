"""Does an ordinary module train alike in parts? Well-known architectures, untouched, at tensor 2 × pipeline 2 × data 2.

Each one is written to a small file as a user would write it, named in a job as `file.py:function`, and trained by the
product on eight ranks. The reference shares the file, the first values and the order of samples with it, and nothing
else: one process, the module as it is, PyTorch's own cross-entropy, clipping and unfused AdamW. Norms over a batch see
one micro-batch at a time in the product, so where there are any the reference takes the same micro-batches one by one.
Dropout is off: parts draw other masks than the whole.

T5 is of version 1.1, whose activation has no kink: at one, a rounding turns a gradient on or off, in one process, too.
ResNet-152 starts with blocks that add nothing, as is usual (Goyal et al., arXiv:1706.02677, section 5.1): without, its
gradient's norm is 6,000 and a unit in the last place grows to percents within a few steps, in one process, too.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import harness
from supernode.control.journal import read
from supernode.control.supernode import SuperNode
from supernode.control.training import start, status
from supernode.data.sampler import Sampler
from supernode.intake.jobfile import job_from
from supernode.parallel.chance import seed_for, seed_generators
from supernode.schema.event import StepDone

STEPS, BATCH, ACCUMULATION, SEED = 10, 16, 2, 5
PARALLELISM = {"tensor": 2, "pipeline": 2, "data": 2}
LEARNING_RATE, DECAY, CLIP, BETAS, EPSILON = 1e-3, 0.1, 1.0, (0.9, 0.95), 1e-8
SAMPLES = 6 * BATCH
"""Of the data set, so that ten steps see an epoch's end."""
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An architecture.

    Attributes:
        build: lines of a function that returns it.
        data: name of the kind of samples that it takes.
        is_normed: it takes statistics over a batch.
    """

    build: str
    data: str = "text"
    is_normed: bool = False


DECODER = "num_hidden_layers=4, hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, " \
          "vocab_size=97, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, use_cache=False"  # fmt: skip
ENCODER = "num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4, " \
          "hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0"  # fmt: skip
MODELS = {
    "gpt2": Model(build="""
        from transformers import GPT2Config, GPT2LMHeadModel
        return GPT2LMHeadModel(GPT2Config(
            n_layer=4, n_embd=64, n_head=4, vocab_size=97, n_positions=64, bos_token_id=1, eos_token_id=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ))
    """),
    "llama": Model(build=f"""
        from transformers import LlamaConfig, LlamaForCausalLM
        return LlamaForCausalLM(LlamaConfig({DECODER}))
    """),
    "qwen3": Model(build=f"""
        from transformers import Qwen3Config, Qwen3ForCausalLM
        return Qwen3ForCausalLM(Qwen3Config({DECODER}, head_dim=16))
    """),
    "mixtral": Model(build=f"""
        from transformers import MixtralConfig, MixtralForCausalLM
        return MixtralForCausalLM(MixtralConfig({DECODER}, num_local_experts=4, num_experts_per_tok=2))
    """),
    "bert": Model(data="masked", build=f"""
        from transformers import BertConfig, BertForMaskedLM
        return BertForMaskedLM(BertConfig({ENCODER}, vocab_size=97, max_position_embeddings=64, pad_token_id=0))
    """),
    "vit": Model(data="images", build=f"""
        from transformers import ViTConfig, ViTForImageClassification
        return ViTForImageClassification(ViTConfig({ENCODER}, image_size=32, patch_size=8, num_labels=10))
    """),
    "t5": Model(data="pairs", build="""
        from torch import nn
        from transformers import T5Config, T5ForConditionalGeneration

        class Translator(nn.Module):
            def __init__(self):
                super().__init__()
                self.t5 = T5ForConditionalGeneration(T5Config(
                    num_layers=3, d_model=64, d_kv=16, num_heads=4, d_ff=128, vocab_size=97, dropout_rate=0.0,
                    feed_forward_proj="gated-gelu",
                    decoder_start_token_id=0, use_cache=False,
                ))

            def forward(self, both):
                return self.t5(input_ids=both[:, :24], decoder_input_ids=both[:, 24:])

        return Translator()
    """),
    "resnet152": Model(data="pictures", is_normed=True, build="""
        from torch import nn
        from transformers import ResNetConfig, ResNetForImageClassification
        from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

        model = ResNetForImageClassification(ResNetConfig(
            depths=[3, 8, 36, 3], embedding_size=16, hidden_sizes=[32, 64, 128, 256], num_labels=10,
        ))
        for part in model.modules():
            if isinstance(part, ResNetBottleNeckLayer):
                nn.init.zeros_(part.layer[-1].normalization.weight)
        return model
    """),
}  # fmt: skip
DATA = '''
import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    """{count} samples that can be learned in part, each drawn from a generator of its own number."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return {count}

    def __getitem__(self, index):
        dice = torch.Generator().manual_seed(index)
        if self.kind in ("images", "pictures"):
            side = 32 if self.kind == "images" else 64
            label = torch.randint(10, (), generator=dice)
            picture = torch.randn(3, side, side, generator=dice)
            picture[:, int(label) * 3 : int(label) * 3 + 3] += 2.0
            return picture, label
        start = int(torch.randint(97, (), generator=dice))
        row = torch.empty(33, dtype=torch.int64)
        for place in range(33):
            row[place] = start
            follows = torch.rand((), generator=dice) < 0.7
            start = (5 * start + 1) % 97 if follows else int(torch.randint(97, (), generator=dice))
        if self.kind == "text":
            return row[:-1], row[1:]
        if self.kind == "masked":
            hidden = torch.rand(32, generator=dice) < 0.25
            hidden[0] = True
            return torch.where(hidden, 3, row[:32]), torch.where(hidden, row[:32], -100)
        target = (row[:16] + 1) % 97
        return torch.cat((row[:24], torch.zeros(1, dtype=torch.int64), target[:-1])), target


def data():
    return Samples("{kind}")
'''


def write(model: Model, folder: Path) -> Path:
    """Write the user's file: a function that returns the model, and one that returns the data."""
    body = textwrap.indent(textwrap.dedent(model.build).strip("\n"), "    ")
    path = folder / "mine.py"
    path.write_text(DATA.format(count=SAMPLES, kind=model.data) + f"\n\ndef build():\n{body}\n")
    return path


def job_for(path: Path, parallelism: dict[str, Any]) -> dict[str, Any]:
    """Return the job of a user's file."""
    return {
        "name": "any-model",
        "model": f"{path}:build",
        "data": {"dataset": f"{path}:data"},
        "batch": BATCH,
        "gradient_accumulation": ACCUMULATION,
        "steps": STEPS,
        "seed": SEED,
        "parallelism": parallelism,
        "optimizer": {
            "name": "adamw", "learning_rate": LEARNING_RATE, "warmup": 0, "decay": "none", "weight_decay": DECAY,
            "clip": CLIP, "betas": list(BETAS), "epsilon": EPSILON,
        },
        "checkpoint": {"every": STEPS},
        "threads": 1,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Losses and the gradient's norms before clipping, by step."""

    losses: dict[int, float]
    norms: dict[int, float]


def train_by_product(job: dict[str, Any], folder: Path) -> tuple[Curve, dict[str, str]]:
    """Return what a run on forked ranks came to, and what it said of the parts."""
    degrees = job["parallelism"]
    ranks = math.prod(degrees.get(axis, 1) for axis in ("tensor", "pipeline", "data"))
    start(SuperNode.discover(cards=ranks).pool, job_from(job), folder=folder)
    steps = [event for _, event in read(folder / "journal.db") if isinstance(event, StepDone)]
    curve = Curve(losses={e.step: e.loss for e in steps}, norms={e.step: e.norm for e in steps})
    return curve, dict(status(folder).notes)


def train_plainly(path: Path, *, is_normed: bool) -> Curve:
    """Train in this process; one pass a step, or one for each micro-batch of each copy."""
    spec = importlib.util.spec_from_file_location(f"mine_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    seed_generators(seed_for(SEED, "model"))
    model, data = mine.build().train(), mine.data()
    shared = {id(parameter): parameter for parameter in model.parameters()}.values()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in shared if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in shared if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, foreach=False, fused=False,
    )  # fmt: skip
    sampler = Sampler(SAMPLES, BATCH, SEED, False)
    curve = Curve(losses={}, norms={})
    for step in range(1, STEPS + 1):
        samples = [data[int(index)] for index in sampler.indices(step - 1)]
        x, y = (torch.stack(each) for each in zip(*samples, strict=True))
        pieces = ACCUMULATION * PARALLELISM["data"] if is_normed else 1
        optimizer.zero_grad()
        total, counted = 0.0, int((y != -100).sum())
        for inputs, targets in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            output = model(inputs)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / counted
            loss.backward()
            total += loss.item()
        for parameter in shared:  # What a loss does not reach decays all the same.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        curve.norms[step] = float(torch.nn.utils.clip_grad_norm_(shared, CLIP))
        optimizer.step()
        curve.losses[step] = total
    return curve


def gap(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Return the largest relative difference; infinite where one has a step that the other lacks."""
    if ours.keys() != theirs.keys():
        return math.inf
    return max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in theirs)


def main() -> None:
    """Train each and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", help="names of architectures, with commas")
    parser.add_argument("--degrees", type=json.loads, default=PARALLELISM, help="JSON; others than the benchmark's")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    for name in flags.only.split(",") if flags.only else MODELS:
        begun = time.perf_counter()
        with harness.scratch() as folder:
            path = write(MODELS[name], folder)
            ours, notes = train_by_product(job_for(path, flags.degrees), folder / "run")
            theirs = train_plainly(path, is_normed=MODELS[name].is_normed)
        rows[name] = {
            "loss_rel": gap(ours.losses, theirs.losses), "norm_rel": gap(ours.norms, theirs.norms),
            "share_split": float(notes.get("split over tensor", "0%").partition("%")[0]) / 100,
            "whole": notes.get("whole on every tensor rank", "").split("; "),
            "first_loss": theirs.losses[1], "last_loss": theirs.losses[STEPS], "notes": notes,
            "seconds": round(time.perf_counter() - begun, 1),
        }  # fmt: skip
        row = rows[name]
        harness.say(f"{name:10} loss {row['loss_rel']:.1e}  norm {row['norm_rel']:.1e}  {row['seconds']} s")
    good = [name for name, row in rows.items() if row["loss_rel"] <= TOLERANCE]
    result = {
        "architectures": len(good),
        "worst_loss_rel": max(row["loss_rel"] for row in rows.values()),
        "worst_norm_rel": max(row["norm_rel"] for row in rows.values()),
        "parallelism": flags.degrees,
        "steps": STEPS,
        "models": rows,
        "machine": harness.machine("torch", "transformers"),
    }
    harness.finish(result, flags)


if __name__ == "__main__":
    sys.exit(main())
