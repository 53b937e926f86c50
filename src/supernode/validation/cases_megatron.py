"""How do the tables of Megatron on A100 read as models, strategies and machines?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from supernode.validation.case import Case, ways_of
from supernode.validation.tables import Row
from supernode.workload.shape import ModelShape, gpt_shape
from supernode.workload.strategy import FULL, INTERLEAVED, ONE_F_ONE_B, SELECTIVE, Software

# Megatron-LM of 2021 and Megatron-DeepSpeed: fused softmax over written scores, dropout, gradients after the backward.
MEGATRON_2021 = Software(
    flash=False, dropout=True, overlaps_data=False, overlaps_pipeline=False, gradient_bytes=2, update_bytes=60,
    accumulate_bytes=6,
)  # fmt: skip
# Megatron-LM of 2022: weights' gradients are summed by the product that makes them.
MEGATRON_2022 = replace(MEGATRON_2021, accumulate_bytes=0)
# What DeepSpeed's collectives over the data axis reached on Selene in 2021: as much as one of a node's eight network
# cards carries. Inferred from the fitting rows of ZeRO-3 alone, whose waiting it explains, and taken for DeepSpeed's
# pipeline as it is; no mechanism is published.
DEEPSPEED_RAILS = 1 / 8
# DeepSpeed's ZeRO-3 of 2021 prefetches weights, but waits for all that went before ahead of each gather, so for the
# sums of gradients (@ab5534fc4, runtime/zero/partition_parameters.py, _allgather_param: torch.cuda.synchronize).
ZERO3_2021 = replace(MEGATRON_2021, overlaps_data=True, overlaps_sums=False, rails=DEEPSPEED_RAILS)
# DeepSpeed's pipeline of 2021 (github.com/microsoft/DeepSpeed @ed3de0c21, runtime/pipe). engine.py: activations go to
# the next stage cut over the tensor axis (is_pipe_partitioned), gradients back whole (is_grad_partitioned is False up
# to e2fdd254e of 29 September 2021); schedule.py and p2p.py: each by a blocking call, one after the other. bfloat16
# gradients are cast to float32 and then added (bf16_optimizer.py @56c522386, update_hp_grads): 2 + 4 and 8 + 4 bytes.
DEEPSPEED_BF16 = replace(
    MEGATRON_2021, gradient_bytes=4, accumulate_bytes=18, serial_transfers=True, whole_gradients=True,
    rails=DEEPSPEED_RAILS,
)  # fmt: skip


def _vtrain(row: Row, table: str, card: str, recompute: int) -> Case:
    layers, width = float(row["# layers"]), float(row["hidden size"])
    sequence = float(row["sequence length"])
    ways = ways_of(
        tensor=float(row["tensor parallelism"]), pipeline=float(row["pipeline parallelism"]),
        data=float(row["data parallelism"]), micro_batch=float(row["micro batch"]), batch=float(row["global batch"]),
        sequence=sequence, recompute=recompute, precision=0,
    )  # fmt: skip
    model = gpt_shape(
        layers=layers, width=width, heads=float(row["attention heads"]), vocabulary=51_200, positions=sequence
    )
    return Case(
        table=table, card=card, software=MEGATRON_2021, model=model, ways=ways,
        seconds=float(row["iteration time (ms)"]) / 1000, fitting=row["fitting"] == "1",
        label=f"{width:.0f}×{layers:.0f} t{row['tensor parallelism']} p{row['pipeline parallelism']} "
              f"d{row['data parallelism']} m{row['micro batch']} b{row['global batch']}",
    )  # fmt: skip


def vtrain_multi(row: Row) -> Iterable[Case]:
    """Read a row of `vtrain_measured_multi`: 64 nodes of eight A100, four 200 Gbit/s network cards each."""
    yield _vtrain(row, "vtrain_multi", "A100-80, 4 NICs", FULL)


def vtrain_single(row: Row) -> Iterable[Case]:
    """Read a row of `vtrain_measured_single`."""
    yield _vtrain(row, "vtrain_single", "A100-80, 4 NICs", FULL)


def _gpt(row: Row) -> ModelShape:
    return gpt_shape(
        layers=float(row["layers"]), width=float(row["hidden"]),
        heads=float(row["attention_heads"] if "attention_heads" in row else row["heads"]),
        vocabulary=float(row.get("vocab", 51_200)), positions=float(row["seq"]),
    )  # fmt: skip


def korthikanti(row: Row) -> Iterable[Case]:
    """Read a row of Korthikanti et al., table 5: two measurements."""
    for column, recompute, spread in (
        ("iter_time_full_recompute_s", FULL, 0), ("iter_time_seqpar_selective_s", SELECTIVE, 1),
    ):  # fmt: skip
        ways = ways_of(
            tensor=float(row["tp"]), pipeline=float(row["pp"]), interleave=float(row["interleave"]),
            data=float(row["dp"]), micro_batch=float(row["micro_batch"]), batch=float(row["global_batch"]),
            sequence=float(row["seq"]), recompute=recompute, sequence_parallel=spread, precision=0,
            schedule=INTERLEAVED if float(row["interleave"]) > 1 else ONE_F_ONE_B,
        )  # fmt: skip
        yield Case(
            table="korthikanti", card="A100-80", software=MEGATRON_2022, model=_gpt(row), ways=ways,
            seconds=float(row[column]), fitting=row["fitting"] == "1", label=f"{row['model']} {column}",
        )  # fmt: skip


def megatron_flops(model: ModelShape, sequence: float) -> float:
    """Return FLOPs per token with full recomputation, as the SC'21 paper counts them: 96 l h² (1 + s/6h + V/16lh)."""
    layers, width = float(model.attentions), float(model.width)
    return 96 * layers * width**2 * (1 + sequence / (6 * width) + float(model.vocabulary) / (16 * layers * width))


# examples/sc21/run_table_1.sh in github.com/NVIDIA/Megatron-LM: micro-batch and parts per pipeline rank by width.
SC21_TABLE1 = {
    2304: (16, 1), 3072: (16, 1), 4096: (16, 1), 6144: (8, 1), 8192: (4, 1), 10240: (2, 3), 12288: (2, 2),
    16384: (1, 2), 20480: (1, 3), 25600: (1, 1),
}  # fmt: skip


def sc21_table1(row: Row) -> Iterable[Case]:
    """Read a row of the SC'21 paper's weak scaling."""
    model, sequence = _gpt(row), float(row["seq"])
    micro, interleave = SC21_TABLE1.get(int(row["hidden"]), (1, 1))
    gpus, batch = float(row["gpus"]), float(row["global_batch"])
    ways = ways_of(
        tensor=float(row["tp"]), pipeline=float(row["pp"]), data=float(row["dp"]), micro_batch=micro, batch=batch,
        sequence=sequence, recompute=FULL, interleave=interleave, precision=0,
    )  # fmt: skip
    seconds = batch * sequence * megatron_flops(model, sequence) / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
    yield Case(
        table="sc21", card="A100-80", software=MEGATRON_2021, model=model, ways=ways, seconds=seconds,
        fitting=row["fitting"] == "1", label=f"table 1, {row['params_B']}B",
    )  # fmt: skip


def sc21_table2(row: Row) -> Iterable[Case]:
    """Read a row of the SC'21 paper's comparison with ZeRO-3; the three-dimensional ones run 1F1B without parts."""
    big = float(row["params_B"]) > 500
    layers, width, heads = (105, 20480, 128) if big else (96, 12288, 96)
    model = gpt_shape(layers=layers, width=width, heads=heads, vocabulary=51_200, positions=2048)
    gpus, batch = float(row["gpus"]), float(row["global_batch"])
    tensor, pipeline = float(row["tp"]), float(row["pp"])
    is_zero = row["scheme"].startswith("ZeRO")
    ways = ways_of(
        tensor=tensor, pipeline=pipeline, data=gpus / tensor / pipeline, micro_batch=float(row["micro_batch"]),
        batch=batch, sequence=2048, recompute=FULL, sharding=3 if is_zero else 0, precision=0,
    )  # fmt: skip
    seconds = batch * 2048 * megatron_flops(model, 2048) / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
    yield Case(
        table="sc21_zero3" if is_zero else "sc21", card="A100-80", software=ZERO3_2021 if is_zero else MEGATRON_2021,
        model=model, ways=ways, seconds=seconds, fitting=row["fitting"] == "1",
        label=f"table 2, {row['scheme']} {row['params_B']}B {gpus:.0f}",
    )  # fmt: skip


def mt_nlg(row: Row) -> Iterable[Case]:
    """Read a row of the Megatron-Turing paper: DeepSpeed's 1F1B, micro-batches of one."""
    ways = ways_of(
        tensor=float(row["tp"]), pipeline=float(row["pp"]), data=float(row["dp"]), micro_batch=1,
        batch=float(row["global_batch"]), sequence=float(row["seq"]), recompute=FULL, precision=1,
    )  # fmt: skip
    yield Case(
        table="mt_nlg", card="A100-80", software=DEEPSPEED_BF16, model=_gpt(row), ways=ways,
        seconds=float(row["iter_time_s"]), fitting=row["fitting"] == "1", label=f"530B on {row['gpus']}",
    )  # fmt: skip


MEGATRON_READERS: dict[str, Callable[[Row], Iterable[Case]]] = {
    "vtrain_measured_multi": vtrain_multi,
    "vtrain_measured_single": vtrain_single,
    "korthikanti_table5_iteration_time": korthikanti,
    "megatron_sc21_table1": sc21_table1,
    "megatron_sc21_table2_zero3_vs_ptd": sc21_table2,
    "mt_nlg_530b": mt_nlg,
}
