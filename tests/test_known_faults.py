"""Which test holds us against each fault that was reported of another trainer? One line a report, and none left out."""

from __future__ import annotations

import ast
import csv
import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
AREAS = {"grad", "overlap", "ddp", "nan", "config", "plan", "compat"}
GITHUB = "https://github.com/"
SUMS = "training/test_faults.py::test_losses_norms_and_updates_are_one_processs_on_every_layout"
BITS = "training/test_few_bits.py"
EXPERTS = "axes/test_expert.py::test_spread_experts_learn_as_one_process_does"
GRADIENTS = "parallel/test_gradients.py::test_every_pair_of_choices_gives_the_gradients_of_one_process"
KNOWN: dict[str, tuple[str, ...]] = {
    # Sums, means and norms.
    "pytorch/torchtitan/issues/1733": (SUMS, GRADIENTS),
    "pytorch/torchtitan/issues/2972": (SUMS,),
    "deepspeedai/DeepSpeed/issues/7773": (SUMS,),
    "deepspeedai/DeepSpeed/pull/8154": (SUMS, GRADIENTS),
    "pytorch/torchtitan/pull/3412": (
        SUMS, "parallel/test_tensor.py::test_a_split_vocabulary_gives_the_loss_and_the_gradient_of_the_whole",
    ),
    "huggingface/transformers/issues/34242": (SUMS,),
    "pytorch/torchtitan/issues/596": (SUMS,),
    "NVIDIA-NeMo/RL/pull/3788": (
        SUMS,
        "axes/test_expert.py::test_each_expert_is_counted_by_the_ranks_that_hold_it_and_weighs_what_the_plan_says",
    ),
    # Shared parameters.
    "NVIDIA/Megatron-LM/issues/656": (SUMS,),
    "uw-syfi/piper/issues/13": (
        "training/test_faults.py::test_shared_parameters_of_a_cut_sequence_sum_their_gradients",
        "splitting/test_cut.py::test_stages_of_an_encoder_and_decoder_have_the_modules_output_gradients_and_buffers",
    ),
    # Further axes.
    "huggingface/transformers/issues/48687": (EXPERTS, GRADIENTS),
    "pytorch/pytorch/issues/160285": (EXPERTS, GRADIENTS),
    "NVIDIA/Megatron-LM/issues/673": (
        "axes/test_context.py::test_a_ring_attends_as_one_process_does_forward_and_backward",
        "axes/test_long_sequences.py::test_shared_sequences_give_one_processes_loss_and_gradients",
    ),
    "allenai/OLMo-core/pull/828": ("parallel/test_recompute.py::test_gradients_are_the_same_bit_for_bit",),
    # Overlap.
    "NVIDIA/Megatron-LM/pull/4609": (
        "syncing/test_buckets.py::test_copies_get_one_processs_gradients_and_overlap_changes_no_bit",
        "training/test_overlap.py::test_a_run_is_the_same_to_the_bit_with_and_without_overlap",
    ),
    "NVIDIA/Megatron-LM/issues/663": (f"{BITS}::test_too_many_skipped_steps_in_a_row_end_the_run",),
    # Copies that differ.
    "pytorch/pytorch/issues/128949": (
        "syncing/test_buckets.py::test_a_parameter_that_one_copy_does_not_use_still_gets_the_others_gradient",
        "training/test_overlap.py::test_what_a_step_waits_for_is_told_as_sync_and_idle_parameters_are_named",
    ),
    "pytorch/pytorch/issues/33148": ("training/test_data.py::test_all_ranks_together_read_each_sample_of_a_step_once",),
    "NVIDIA-NeMo/Automodel/pull/2468": (
        "run/test_user_model.py::test_a_sample_that_fails_on_one_rank_ends_the_run_on_all",
    ),
    # Numbers that are none.
    "deepspeedai/DeepSpeed/pull/8035": (f"{BITS}::test_a_gradient_that_is_not_finite_changes_nothing",),
    "deepspeedai/DeepSpeed/pull/7839": (
        "precision/test_scaling.py::test_what_is_scaled_is_unscaled_by_the_same_number",
    ),
    "dylanyunlon/Neuron_SP/issues/2": (
        f"{BITS}::test_float16_learns_with_its_scale_and_skips_on_all_ranks_together",
    ),
    # What nobody asked for.
    "deepspeedai/DeepSpeed/pull/8068": ("training/test_faults.py::test_what_is_not_asked_for_is_off",),
    # Plans.
    "NVIDIA/Megatron-LM/issues/1304": (
        "training/test_faults.py::test_seven_layers_are_all_somewhere_on_two_and_three_stages",
    ),
    "pytorch/torchtitan/issues/775": (
        "planning/test_layout.py::test_a_pipeline_needs_as_many_micro_batches_as_stages",
    ),
    "pytorch/pytorch/issues/126600": (
        "planning/test_layout.py::test_a_batch_that_does_not_divide_gets_two_ways_out",
        SUMS,  # whose last micro-batch is short, and counts by its positions
    ),
    "hpcaitech/ColossalAI/issues/6167": (
        "training/test_faults.py::test_odd_sizes_are_saved_whole_and_load_on_any_number_of_ranks",
    ),
    "pytorch/pytorch/issues/110762": (
        "training/test_faults.py::test_odd_sizes_are_saved_whole_and_load_on_any_number_of_ranks",
    ),
}  # fmt: skip
OBSERVED: dict[str, tuple[str, ...]] = {
    # Reports without an address, by a word of their symptom.
    "bf16_compress_hook": ("syncing/test_hooks.py::test_every_compressor_averages_gradients_in_the_mean_over_steps",),
    "Stable wheel needs a nightly": ("test_versions.py::test_a_torch_that_was_never_tried_is_refused_with_the_range",),
}


def names_in(path: Path) -> set[str]:
    """Return the names of a file's tests."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("where", sorted({one for found in (*KNOWN.values(), *OBSERVED.values()) for one in found}))
def test_every_test_that_is_named_exists(where: str) -> None:
    file, _, name = where.partition("::")

    assert name in names_in(TESTS / file)


def test_no_report_is_left_out() -> None:
    default = TESTS.parents[1] / "shared" / "data"
    path = Path(os.environ.get("SUPERNODE_DATA", default)) / "training-faults.csv"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the project")
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["area"] in AREAS]

    assert len(rows) > 20
    left = [
        row["id"]
        for row in rows
        if row["url"].removeprefix(GITHUB) not in KNOWN and not any(word in row["symptom"] for word in OBSERVED)
    ]
    assert left == []
