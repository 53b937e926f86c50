"""How do the tables of Megatron-Core, NeMo and Megatron-Bridge read as models, strategies and machines?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from supernode.forecast.efficiency import precision_index
from supernode.registry import lookup
from supernode.validation.case import Case, ways_of
from supernode.validation.tables import Row
from supernode.workload.presets import public_model
from supernode.workload.shape import ModelShape, gpt_shape
from supernode.workload.strategy import INTERLEAVED, NO_RECOMPUTE, ONE_F_ONE_B, Software

MEGATRON_CORE = Software(overlaps_tensor=True, gradient_bytes=4)

# The table leaves the parts of some pipelines of Llama 3 70B open; all its others, and the recipes, have five.
RECIPE_INTERLEAVE = 5.0

BRIDGE_MODELS = {
    "LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": "llama3-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b", "Qwen3_235B_a22B": "qwen3-235b-a22b", "GPT OSS 120B": "gpt-oss-120b",
    "DeepSeekV3": "deepseek-v3-mtp", "DeepSeekV3 (w/o MTP)": "deepseek-v3", "DeepSeekV4 Flash": "deepseek-v4-flash",
    "Nemotron_3_Nano": "nemotron-3-nano", "Nemotron_3_Super": "nemotron-3-super",
    "Nemotron_3_Ultra": "nemotron-3-ultra", "Nemotron_3_5_Lightning": "nemotron-3.5-lightning",
    "GPT OSS 20B": "gpt-oss-20b", "Kimi_K2": "kimi-k2", "Kimi K2": "kimi-k2", "LLAMA2_70B": "llama2-70b",
    "Mixtral_8x7B": "mixtral-8x7b", "GPT3_175B": "gpt3-175b",
    "LLAMA2-13B": "llama2-13b", "LLAMA2-70B": "llama2-70b",
    "LLAMA3-8B": "llama3-8b", "LLAMA2-7B": "llama2-7b", "LLAMA3-70B": "llama3-70b", "LLAMA3-405B": "llama3-405b",
}  # fmt: skip


def bridge_model(name: str) -> str:
    """Return our name of a model in NVIDIA's tables; what stands in brackets is how it was run, save for MTP."""
    return BRIDGE_MODELS.get(name) or lookup(name.partition(" (")[0], BRIDGE_MODELS, kind="model")


def bridge_precision(name: str) -> int:
    """Return the index of a precision as NVIDIA's tables name it: FP8 is scaled by tensor, MXFP8 by blocks of 32."""
    first = name.partition(" ")[0]
    names = {"BF16": "bfloat16", "NVFP4": "nvfp4", "MXFP8": "mxfp8", "FP8-MX": "mxfp8"}
    return precision_index(names.get(first, "float8"))


def _degree(text: str) -> float:
    """Return a parallel degree; `n/a` and nothing mean 1, and what stands in brackets is another recipe's."""
    first = text.partition(" ")[0]
    return max(float(first), 1.0) if first.isdigit() else 1.0


# v0.5.0 of Megatron-Bridge, in NeMo 26.06, brought fused grouped products and whole-iteration graphs.
FUSED_SINCE = (26, 6)
# v0.5.1, in NeMo 26.06.01: "Deepseek-V3 B300 recipe improvement with CuTeDSL fused grouped GEMM ...".
FUSED_SINCE_IN_BOXES = (26, 6, 1)
# Known issue of v0.5.1: "GPT-OSS GB200/GB300 MXFP8 regression due to regressed CuTeDSL fused kernels".
REGRESSED = ("26.06.01", "GPT OSS 120B")


def _version(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def bridge_software(row: Row) -> Software:
    """Return what Megatron-Bridge did in a row, after its release notes and scripts/performance/configs.

    Mixtures: MXFP8 on Blackwell since 26.06 runs fused experts, recorded whole iterations, 8-bit attention and
    overlapped exchanges (not Nemotron's, whose experts have no gate). GPT-OSS in BF16 and Qwen3 235B on eight-card
    nodes take the plain all-to-all. Token drop has fixed shapes. Some recipes compute mixtures again.
    """
    release, model, system = row["release"].split()[0], row["model"].partition(" (")[0], row["system"]
    software = replace(MEGATRON_CORE, adapters=row["task"].startswith("LoRA"))
    if not public_model(bridge_model(row["model"])).mixtures:
        return software
    is_low = "MX" in row["precision"]
    is_boxed = system in ("DGX-B200", "DGX-B300", "DGX-H100")
    since = FUSED_SINCE_IN_BOXES if is_boxed and model == "DeepSeekV3" else FUSED_SINCE
    is_new = _version(release) >= since and (release, model) != REGRESSED
    if is_low and is_new and system != "DGX-H100" and not model.startswith("Nemotron"):
        is_recorded = not (model == "GPT OSS 120B" and is_boxed)
        return replace(
            software, fused_experts=True, launches=0.0 if is_recorded else 1.0, syncs=not is_recorded,
            low_attention=True, overlaps_expert=True,
        )  # fmt: skip
    is_plain = (model == "GPT OSS 120B" and not is_low) or (model == "Qwen3_235B_a22B" and is_boxed)
    is_redone = model == "Nemotron_3_Nano" and "H100" in system
    is_redone |= model == "Nemotron_3_Super" and system in ("DGX-GB200", "DGX-B200") and row["precision"] != "NVFP4"
    return replace(
        software, fused_dispatch=not is_plain, syncs="tokendrop" not in row["model"], redone_experts=is_redone,
        launches=0.0 if "tokendrop" in row["model"] else 1.0 if system in ("DGX-B200", "DGX-H100") else 0.5,
    )  # fmt: skip


def bridge(row: Row) -> Iterable[Case]:
    """Read a row of Megatron-Bridge's performance summary."""
    tensor, pipeline, context = _degree(row["tp"]), _degree(row["pp"]), _degree(row["cp"])
    gpus, batch, sequence = float(row["gpus"]), float(row["global_batch"]), float(row["seq"])
    interleave = _degree(row["vp"])
    if row["vp"].strip() == "n/a" and row["model"] == "LLAMA3_70B":
        interleave = RECIPE_INTERLEAVE
    ways = ways_of(
        tensor=tensor, pipeline=pipeline, context=context, expert=_degree(row["ep"]),
        data=gpus / tensor / pipeline / context, interleave=interleave if pipeline > 1 else 1,
        micro_batch=float(row["micro_batch"]), batch=batch, sequence=sequence,
        sharding=3 if _degree(row["fsdp"]) > 1 else 1, recompute=NO_RECOMPUTE, sequence_parallel=1,
        schedule=INTERLEAVED if interleave > 1 else ONE_F_ONE_B, precision=bridge_precision(row["precision"]),
    )  # fmt: skip
    yield Case(
        table="bridge", card=row["system"].removeprefix("DGX-"),
        software=bridge_software(row),
        model=public_model(bridge_model(row["model"])), ways=ways,
        seconds=batch * sequence / gpus / float(row["tokens_per_s_per_gpu"]), fitting=row["fitting"] == "1",
        label=f"{row['release'].split()[0]} {row['task'][:4]} {row['model']} {row['system']}×{row['gpus']} "
              f"{row['precision']} b{row['global_batch']} m{row['micro_batch']} t{row['tp']} p{row['pp']} c{row['cp']} "
              f"v{row['vp']} e{row['ep']} f{row['fsdp']}",
    )  # fmt: skip


def model_flops(model: ModelShape, sequence: float) -> float:
    """Return FLOPs per token, forward and backward: 6 for each matrix entry, and causal attention."""
    scores = 6 * float(model.attentions * model.heads * model.head_width) * sequence
    return 6 * float(model.parameters - model.vocabulary * model.width) + scores


def examples(row: Row) -> Iterable[Case]:
    """Read a row of Megatron-LM's Llama example."""
    tensor, pipeline, context = float(row["tp"]), float(row["pp"]), float(row["cp"])
    gpus, batch, sequence = float(row["gpus"]), float(row["global_batch"]), float(row["seq"])
    interleave = float(row["vp"])
    ways = ways_of(
        tensor=tensor, pipeline=pipeline, context=context, data=gpus / tensor / pipeline / context,
        interleave=interleave if pipeline > 1 else 1, micro_batch=float(row["micro_batch"]), batch=batch,
        sequence=sequence, sharding=1, sequence_parallel=1, precision=precision_index("float8"),
        schedule=INTERLEAVED if interleave > 1 else ONE_F_ONE_B,
    )  # fmt: skip
    yield Case(
        table="llama_examples", card="H100", software=MEGATRON_CORE, model=public_model(bridge_model(row["model"])),
        ways=ways, seconds=batch * sequence / gpus / float(row["tokens_per_s_per_gpu"]),
        fitting=row["fitting"] == "1", label=f"{row['model']} on {row['gpus']}",
    )  # fmt: skip


def long_sequence(row: Row) -> Iterable[Case]:
    """Read a row of NeMo's long-sequence table, with the context axis; data × context × tensor is all cards."""
    model = public_model(bridge_model(row["model"]))
    sequence, gpus, batch = float(row["seq_k"]) * 1024, float(row["gpus"]), float(row["global_batch"])
    tensor, context = float(row["tp"]), float(row["cp"])
    ways = ways_of(
        tensor=tensor, context=context, data=gpus / tensor / context, batch=batch, sequence=sequence, sharding=1,
        sequence_parallel=1, precision=precision_index("float8"),
    )  # fmt: skip
    # Its own count of FLOPs does not halve attention for the causal mask.
    flops = model_flops(model, 2 * sequence)
    yield Case(
        table="long_sequence", card=row["gpu"], software=MEGATRON_CORE, model=model, ways=ways,
        seconds=batch * sequence * flops / (float(row["tflops_per_gpu_with_cp"]) * 1e12 * gpus),
        fitting=row["fitting"] == "1", label=f"{row['model']} {row['gpu']} {row['seq_k']}k on {row['gpus']}",
    )  # fmt: skip


def h100_weak_scaling(row: Row) -> Iterable[Case]:
    """Read a row of Megatron-LM's weak scaling on H100: BF16, everything overlapped, as its README says.

    It leaves micro-batch and interleaving open. Pipelines overlap transfers only where they are interleaved, so parts
    of one layer and micro-batches of one are taken; without a pipeline, one micro-batch.
    """
    layers, width, sequence = float(row["layers"]), float(row["hidden"]), float(row["seq"])
    vocabulary, pipeline = float(row["vocab"]), float(row["pp"])
    model = gpt_shape(
        layers=layers, width=width, heads=float(row["attention_heads"]), vocabulary=vocabulary, positions=sequence
    )
    gpus, batch = float(row["gpus"]), float(row["global_batch"])
    ways = ways_of(
        tensor=float(row["tp"]), pipeline=pipeline, data=float(row["dp"]), batch=batch, sequence=sequence, sharding=1,
        micro_batch=1 if pipeline > 1 else batch / float(row["dp"]),
        interleave=layers / pipeline if pipeline > 1 else 1,
        schedule=INTERLEAVED if pipeline > 1 else ONE_F_ONE_B,
        sequence_parallel=1, precision=1,
    )  # fmt: skip
    flops = 72 * layers * width**2 * (1 + sequence / (6 * width) + vocabulary / (12 * layers * width))
    yield Case(
        table="h100_weak", card="H100", software=MEGATRON_CORE, model=model, ways=ways,
        seconds=batch * sequence * flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus),
        fitting=row["fitting"] == "1", label=f"{row['model']} on {row['gpus']}",
    )  # fmt: skip


CORE_READERS: dict[str, Callable[[Row], Iterable[Case]]] = {
    "nemo_megatron_bridge_performance": bridge,
    "megatron_examples_llama_fp8": examples,
    "nemo_long_sequence_cp": long_sequence,
    "megatron_h100_weak_scaling": h100_weak_scaling,
}
