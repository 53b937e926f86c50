"""How do the tables of FSDP trainers read as models, strategies and machines?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from supernode.forecast.efficiency import precision_index
from supernode.registry import lookup
from supernode.validation.case import Case, ways_of
from supernode.validation.tables import Row
from supernode.workload.presets import public_model
from supernode.workload.shape import gpt_shape
from supernode.workload.strategy import FULL, INTERLEAVED, NO_RECOMPUTE, ONE_F_ONE_B, SELECTIVE, Software

# llm-foundry: eager PyTorch FSDP with a flash kernel; gradients travel in 16 bits.
FOUNDRY = Software(fused=False, gradient_bytes=2, early_stop=True)
# On Hopper, FlashAttention-3 and cuDNN are 1.5 to 2 times as fast forward and 1.5 to 1.75 times backward as kernels
# written for Ampere, such as FlashAttention-2 (Shah et al., arXiv:2407.08608, abstract and section 4).
AMPERE_KERNEL = 0.6
# FSDP2 copies gathered weights into their tensors, forward and backward (2 + 2 bytes each), and gradients into a
# float32 buffer (2 + 4): torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather_copy_out and
# foreach_reduce.
FSDP2_COPIES = 14.0
# torchtitan: eager, compiled, and compiled with asynchronous tensor parallelism; gradients travel in float32. Its
# selective checkpointing keeps the result of every second product (torchtitan/parallelisms/parallelize_llama.py).
COMPILED = Software(shard_bytes=FSDP2_COPIES, attention=AMPERE_KERNEL, early_stop=True, selective=0.5)
EAGER = replace(COMPILED, fused=False)
ASYNC = replace(COMPILED, overlaps_tensor=True)


class Mpt(NamedTuple):
    """Width, heads and layers of an MPT model."""

    width: int
    heads: int
    layers: int


# scripts/train/yamls/pretrain/mpt-*.yaml in github.com/mosaicml/llm-foundry; widths and layers give `params`.
MPT = {
    "125m": Mpt(768, 12, 12), "350m": Mpt(1024, 16, 24), "760m": Mpt(1536, 12, 24), "1b": Mpt(2048, 16, 24),
    "3b": Mpt(2560, 20, 32), "7b": Mpt(4096, 32, 32), "13b": Mpt(5120, 40, 40), "30b": Mpt(7168, 56, 48),
    "70b": Mpt(8192, 64, 80),
}  # fmt: skip
FOUNDRY_CARDS = {"a100_40gb": "A100-40", "a100_80gb": "A100-80", "h100_80gb": "H100"}
FOUNDRY_PRECISIONS = {"bf16": "bfloat16", "amp_bf16": "bfloat16", "amp_fp8": "float8"}


def mosaicml(row: Row) -> Iterable[Case]:
    """Read a row of llm-foundry's benchmarks: MPT models, fully sharded."""
    mpt, sequence, gpus = lookup(row["model"], MPT, kind="model"), float(row["seq"]), float(row["gpus"])
    model = gpt_shape(layers=mpt.layers, width=mpt.width, heads=mpt.heads, vocabulary=50_368, positions=sequence)
    batch = float(row["global_batch"])
    ways = ways_of(
        data=gpus, micro_batch=float(row["micro_batch"]), batch=batch, sequence=sequence,
        sharding=3 if row["sharding"] == "FULL_SHARD" else 2,
        recompute=FULL if row["act_ckpt"] == "True" else NO_RECOMPUTE,
        precision=precision_index(FOUNDRY_PRECISIONS[row["precision"]]),
    )  # fmt: skip
    yield Case(
        table="mosaicml", card=FOUNDRY_CARDS[row["gpu"]],
        software=replace(FOUNDRY, attention=AMPERE_KERNEL if row["gpu"].startswith("h100") else 1.0),
        model=model, ways=ways,
        seconds=batch * sequence / gpus / float(row["tokens_per_s_per_gpu"]), fitting=row["fitting"] == "1",
        label=f"{row['gpu']}×{row['gpus']} {row['model']} s{row['seq']} m{row['micro_batch']} {row['precision']} "
              f"{'full' if row['act_ckpt'] == 'True' else ''}",
    )  # fmt: skip


TITAN_MODELS = {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3-405b"}
TITAN_RECOMPUTE = {"full": FULL, "selective": SELECTIVE, "per-op SAC": SELECTIVE}


def _titan_card(name: str) -> str:
    """Return our name of a card; torchtitan's own H100 has less power than NVIDIA's."""
    whole = {"H200": "H200", "500W": "H100-96 500W", "H100": "H100", "A100": "A100-80", "B200": "B200"}
    return next((card for part, card in whole.items() if part in name), name)


def torchtitan(row: Row) -> Iterable[Case]:
    """Read a row of torchtitan's benchmarks. Its local batch is cut into as many micro-batches as there are stages."""
    degrees = {name: float(size) for name, size in re.findall(r"(FSDP|TP|PP|CP)(\d+)", row["parallel"])}
    local, sequence, gpus = float(row["local_batch"]), float(row["seq"]), float(row["gpus"])
    pipeline = degrees.get("PP", 1.0)
    data = degrees.get("FSDP", gpus / pipeline / degrees.get("TP", 1.0) / degrees.get("CP", 1.0))
    technique = row["technique"].lower()
    is_compiled = "compile" in technique or "async" in technique or "2d" in technique or "tp" in technique
    software = ASYNC if "async" in technique else COMPILED if is_compiled else EAGER
    is_interleaved = "interleaved" in technique
    ways = ways_of(
        tensor=degrees.get("TP", 1.0), context=degrees.get("CP", 1.0), pipeline=pipeline, data=data,
        interleave=2 if is_interleaved else 1, schedule=INTERLEAVED if is_interleaved else ONE_F_ONE_B,
        micro_batch=local / pipeline, batch=local * data, sequence=sequence, sharding=3,
        sequence_parallel=1, recompute=TITAN_RECOMPUTE[row["activation_ckpt"]],
        precision=precision_index("float8" if "FP8" in row["precision"] else "bfloat16"),
    )  # fmt: skip
    yield Case(
        table="torchtitan", card=_titan_card(row["gpu"]), software=software,
        model=public_model(lookup(row["model"].split()[-1], TITAN_MODELS, kind="model")), ways=ways,
        seconds=local * data * sequence / gpus / float(row["tokens_per_s_per_gpu"]), fitting=row["fitting"] == "1",
        label=f"{row['model']} {row['parallel']} s{row['seq']} {row['technique']} {row['precision']}",
    )  # fmt: skip


FSDP_READERS: dict[str, Callable[[Row], Iterable[Case]]] = {
    "mosaicml_fsdp_benchmarks": mosaicml,
    "torchtitan_benchmarks": torchtitan,
}
