"""Which test holds us against each fault that was reported of another trainer? One line a report, and none left out."""

from __future__ import annotations

import ast
import csv
import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
AREAS = {
    "grad", "overlap", "ddp", "nan", "config", "plan", "compat", "ckpt", "rng", "data", "crash", "fail",
}  # fmt: skip
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
    # Checkpoints.
    "pytorch/torchtitan/issues/474": (
        "checkpoint/test_snapshot.py::test_what_ranks_hold_under_one_name_must_be_alike",
        "run/test_kinds.py::test_an_interleaved_pipeline_learns_what_one_process_learns",
    ),
    "pytorch/torchtitan/pull/816": (
        "run/test_resume.py::test_resumed_on_fewer_cards_the_curve_goes_on",
        "run/test_reshard.py::test_a_run_goes_on_in_another_layout_and_from_one_to_eight_ranks",
    ),
    "deepspeedai/DeepSpeed/issues/2898": (
        "training/test_faults.py::test_odd_sizes_are_saved_whole_and_load_on_any_number_of_ranks",
        "checkpoint/test_storage.py::test_fsdp_saves_on_four_ranks_and_goes_on_with_two_and_with_one",
    ),
    "NVIDIA/Megatron-LM/issues/1490": (
        "run/test_reshard.py::test_a_run_goes_on_in_another_layout_and_from_one_to_eight_ranks",
        "training/test_faults.py::test_odd_sizes_are_saved_whole_and_load_on_any_number_of_ranks",
    ),
    "deepspeedai/DeepSpeed/issues/6691": (
        "run/test_reshard.py::test_a_run_goes_on_in_another_layout_and_from_one_to_eight_ranks",
        "storing/test_saves.py::test_no_damage_is_ever_read_and_the_file_is_named",
    ),
    "deepspeedai/DeepSpeed/issues/1896": (
        "run/test_user_model.py::test_shared_and_frozen_parameters_are_so_on_every_layout",
        "foreign/test_match.py::test_ties_may_stand_twice_if_they_are_alike",
    ),
    "pytorch/pytorch/issues/143828": (
        "checkpoint/test_state.py::test_an_optimizer_goes_on_as_if_it_had_not_been_away",
        "checkpoint/test_storage.py::test_a_state_dict_comes_back_with_its_objects_and_only_what_changed_is_written",
    ),
    "pytorch/pytorch/issues/126881": (
        "checkpoint/test_storage.py::test_names_that_are_left_over_and_bytes_that_changed_are_told",
        "checkpoint/test_state.py::test_a_checkpoint_of_another_model_is_refused_and_the_tensor_named",
    ),
    "pytorch/pytorch/issues/75666": (
        "run/test_compressed.py::test_a_resumed_run_equals_the_unbroken_one_to_the_bit",
    ),
    "pytorch/pytorch/issues/144657": (
        "checkpoint/test_snapshot.py::test_passes_change_nothing_of_a_snapshot_and_what_they_move_is_learnt",
    ),
    "Lightning-AI/pytorch-lightning/issues/1772": (
        "run/test_resume.py::test_resumed_on_the_same_layout_it_is_as_if_it_had_not_stopped",
    ),
    "NVIDIA/Megatron-LM/pull/6920": (
        "run/test_resume.py::test_resumed_on_the_same_layout_it_is_as_if_it_had_not_stopped",
        "run/test_parity.py::test_a_rank_killed_between_steps_changes_nothing",
    ),
    "pytorch/torchtitan/issues/809": (
        "run/test_resume.py::test_resumed_on_the_same_layout_it_is_as_if_it_had_not_stopped",
        "run/test_reshard.py::test_a_run_goes_on_in_another_layout_and_from_one_to_eight_ranks",
    ),
    "NVIDIA-NeMo/Megatron-Bridge/issues/5257": (
        "run/test_user_model.py::test_what_a_data_set_draws_at_random_is_the_same_on_every_layout",
    ),
    "NVIDIA/Megatron-LM/pull/206": (
        "run/test_user_model.py::test_what_a_data_set_draws_at_random_is_the_same_on_every_layout",
    ),
    "PrimeIntellect-ai/prime-diloco/issues/97": (
        "run/test_resume.py::test_resumed_on_fewer_cards_the_curve_goes_on",
        "run/test_resume.py::test_a_run_goes_on_with_the_data_that_it_began_with",
    ),
    "KempnerInstitute/KempnerForge/issues/102": (
        "storing/test_power.py::test_power_cuts_between_all_calls_of_saves_and_deletions",
        "storing/test_saves.py::test_collectors_at_once_beside_a_save_leave_what_is_kept",
    ),
    "vllm-project/speculators/pull/739": (
        "run/test_resume.py::test_a_changed_byte_is_found_and_an_older_checkpoint_goes_on",
        "run/test_parity.py::test_a_checkpoint_that_rots_on_the_way_gives_way_to_the_one_before",
    ),
    "pytorch/torchtitan/issues/4011": (
        "storing/test_saves.py::test_no_damage_is_ever_read_and_the_file_is_named",
    ),
    "verl-project/verl/issues/7952": (
        "run/test_command_line.py::test_a_controller_killed_without_warning_leaves_no_rank_and_a_run_to_go_on_with",
        "scheduling/test_controller.py::test_a_save_that_nobody_told_of_is_gone_on_from_once_the_known_checkpoint_is_gone",
    ),
    "NVIDIA/Megatron-LM/issues/1154": (
        "keeping/test_keepers.py::test_a_save_that_fails_is_told_and_the_next_one_is_whole",
        "run/test_recovery.py::test_of_ranks_that_hang_the_one_that_the_others_wait_for_is_named",
    ),
    "KempnerInstitute/KempnerForge/issues/104": (
        "keeping/test_keepers.py::test_state_outlives_its_ranks_and_goes_to_disk",
        "keeping/test_keepers.py::test_memory_is_used_again_save_after_save_and_launch_after_launch",
    ),
    "pytorch/torchtitan/issues/909": (
        "storing/test_saves.py::test_as_many_disks_as_are_promised_may_be_lost_or_damaged",
        "storing/test_saves.py::test_collectors_at_once_beside_a_save_leave_what_is_kept",
    ),
    "NVIDIA/Megatron-LM/issues/1435": (
        "keeping/test_keepers.py::test_a_save_that_fails_is_told_and_the_next_one_is_whole",
        "run/test_command_line.py::test_a_disk_that_fills_up_ends_the_run_which_goes_on_once_there_is_room",
    ),
    "marin-community/marin/issues/8534": (
        "run/test_recovery.py::test_of_ranks_that_hang_the_one_that_the_others_wait_for_is_named",
    ),
    "pytorch/pytorch/issues/170163": (
        "keeping/test_keepers.py::test_memory_is_used_again_save_after_save_and_launch_after_launch",
    ),
    "pytorch/elastic/issues/134": (
        "run/test_recovery.py::test_a_frozen_rank_is_found_within_the_time_stated",
        "run/test_parity.py::test_a_rank_killed_between_steps_changes_nothing",
    ),
    "pytorch/pytorch/issues/167288": (
        "run/test_recovery.py::test_twenty_losses_cost_a_healthy_rank_neither_its_process_nor_memory",
    ),
    "meta-pytorch/torchft/pull/196": (
        "scheduling/test_controller.py::test_after_a_loss_those_who_live_begin_again_from_the_newest_checkpoint",
        "run/test_recovery.py::test_twenty_losses_cost_a_healthy_rank_neither_its_process_nor_memory",
    ),
    "meta-pytorch/torchft/issues/329": (
        "run/test_recovery.py::test_twenty_losses_cost_a_healthy_rank_neither_its_process_nor_memory",
    ),
    "pytorch/torchtitan/pull/4663": (
        "run/test_resume.py::test_resumed_on_fewer_cards_the_curve_goes_on",
    ),
    "NVIDIA/Megatron-LM/issues/5281": (
        "keeping/test_keepers.py::test_a_node_that_is_lost_is_made_good_from_its_partner_and_a_bad_copy_is_not_used",
        "keeping/test_keepers.py::test_what_changed_in_memory_is_not_taken_for_state_and_what_was_kept_before_is",
        "scheduling/test_controller.py::test_too_many_losses_without_a_checkpoint_end_the_run_with_a_remedy",
    ),
    "NVIDIA/nvidia-resiliency-ext/issues/348": (
        "run/test_recovery.py::test_a_spare_takes_the_place_of_a_card_that_fails_twice_and_a_smaller_layout_that_of_the_next",
    ),
}  # fmt: skip
OBSERVED: dict[str, tuple[str, ...]] = {
    # Reports without an address, by a word of their symptom.
    "bf16_compress_hook": ("syncing/test_hooks.py::test_every_compressor_averages_gradients_in_the_mean_over_steps",),
    "leaves a lock file": (
        "run/test_command_line.py::test_a_controller_killed_without_warning_leaves_no_rank_and_a_run_to_go_on_with",
    ),
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

    assert len(rows) > 55
    left = [
        row["id"]
        for row in rows
        if row["url"].removeprefix(GITHUB) not in KNOWN and not any(word in row["symptom"] for word in OBSERVED)
    ]
    assert left == []
