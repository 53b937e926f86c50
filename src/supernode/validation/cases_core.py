"""How do the tables of Megatron-Core, NeMo and Megatron-Bridge read as models, strategies and machines?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from supernode.forecast.efficiency import card_model, precision_index
from supernode.forecast.memory import memory_parts
from supernode.registry import lookup
from supernode.validation.case import Case, ways_of
from supernode.validation.recipes import degree, recipe_of
from supernode.validation.tables import Row
from supernode.workload.presets import public_model
from supernode.workload.shape import ModelShape, gpt_shape
from supernode.workload.strategy import INTERLEAVED, NO_RECOMPUTE, ONE_F_ONE_B, PRECISIONS, Software

MEGATRON_CORE = Software(overlaps_tensor=True, gradient_bytes=4)

# Megatron-Bridge's benchmarks: gradients travel in 16 bits (scripts/performance/utils/overrides.py,
# grad_reduce_in_fp32 = False).
MEGATRON_BRIDGE = replace(MEGATRON_CORE, gradient_bytes=2)

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


def bridge_software(row: Row, recipe: Row | None) -> Software:
    """Return what Megatron-Bridge did in a row, after the published recipe; the plain settings where there is none.

    A whole recorded iteration and token drop have fixed shapes, so that the host need not learn how many tokens an
    expert got.
    """
    software = replace(MEGATRON_BRIDGE, adapters=row["task"].startswith("LoRA"))
    has_drop = "tokendrop" in row["model"]
    if recipe is None:
        return replace(software, syncs=not has_drop)
    graphs, again = recipe["graphs"].split(), recipe["recompute"].split()
    is_whole = "full_iteration" in graphs
    return replace(
        software, launches=0.0 if is_whole else 1.0, records_attention="attn" in graphs, records_mlp="mlp" in graphs,
        records_router="moe_preprocess" in graphs, records_mamba="mamba" in graphs, syncs=not (is_whole or has_drop),
        fused_dispatch=recipe["dispatcher"] != "", fused_experts=recipe["fused_experts"] == "1",
        overlaps_expert=recipe["overlap"] == "1", low_attention=recipe["low_attention"] == "1",
        redone_experts="moe" in again, redone_activations="moe_act" in again, redone_norms="layernorm" in again,
    )  # fmt: skip


def bridge(row: Row) -> Iterable[Case]:
    """Read a row of Megatron-Bridge's performance summary."""
    tensor, pipeline, context = degree(row["tp"]), degree(row["pp"]), degree(row["cp"])
    gpus, batch, sequence = float(row["gpus"]), float(row["global_batch"]), float(row["seq"])
    name, card = bridge_model(row["model"]), row["system"].removeprefix("DGX-")
    precision = bridge_precision(row["precision"])
    recipe = recipe_of(row, model=name.removesuffix("-mtp"), card=card, precision=PRECISIONS[precision])
    is_open = row["vp"].strip() == "n/a" and recipe is not None and degree(recipe["pp"]) == pipeline
    interleave = degree(recipe["vp"] if is_open and recipe else row["vp"])
    ways = ways_of(
        tensor=tensor, pipeline=pipeline, context=context, expert=degree(row["ep"]),
        data=gpus / tensor / pipeline / context, interleave=interleave if pipeline > 1 else 1,
        micro_batch=float(row["micro_batch"]), batch=batch, sequence=sequence,
        sharding=3 if degree(row["fsdp"]) > 1 else 1, recompute=NO_RECOMPUTE, sequence_parallel=1,
        schedule=INTERLEAVED if interleave > 1 and pipeline > 1 else ONE_F_ONE_B, precision=precision,
    )  # fmt: skip
    yield Case(
        table="bridge", card=card, software=bridge_software(row, recipe), model=public_model(name), ways=ways,
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


# What is left of a card's memory for weights, optimizer and activations, beside libraries and allocator.
USABLE = 0.92


def h100_weak_scaling(row: Row) -> Iterable[Case]:
    """Read a row of Megatron-LM's weak scaling on H100: BF16, everything overlapped, as its README says.

    It leaves micro-batch and interleaving open. Pipelines overlap transfers only where they are interleaved, so parts
    of one layer are taken; and the largest micro-batch that fits, of which there are as many as stages.
    """
    layers, width, sequence = float(row["layers"]), float(row["hidden"]), float(row["seq"])
    vocabulary, pipeline = float(row["vocab"]), float(row["pp"])
    model = gpt_shape(
        layers=layers, width=width, heads=float(row["attention_heads"]), vocabulary=vocabulary, positions=sequence
    )
    gpus, batch, copies = float(row["gpus"]), float(row["global_batch"]), float(row["dp"])
    for micro_batch in (8, 4, 2, 1):
        ways = ways_of(
            tensor=float(row["tp"]), pipeline=pipeline, data=copies, batch=batch, sequence=sequence, sharding=1,
            micro_batch=micro_batch, interleave=layers / pipeline if pipeline > 1 else 1,
            schedule=INTERLEAVED if pipeline > 1 else ONE_F_ONE_B, sequence_parallel=1, precision=1,
        )  # fmt: skip
        held = float(memory_parts(model, ways, MEGATRON_CORE).total)
        if ways.micro_batches >= pipeline and held < USABLE * card_model("H100").memory:
            break
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
