# ruff: noqa: E501
"""Cases that `make test` leaves to `make test-all`, each with the quicker test that holds the same fact.

A case is a test, or the parameters of one. `test_slow_cases.py` fails if a case or the test that stands for it is gone.
"""

SLOW_CASES = {
    # Several processes: the same law with two of them, or the same end by another signal.
    "run/test_sharded_runs.py::test_one_run_by_one_by_several_and_by_one_again[4-*]":
        "run/test_sharded_runs.py::test_one_run_by_one_by_several_and_by_one_again[2-*]",
    "training/test_layout_invariance.py::test_neither_the_number_of_processes_matters_nor_what_they_shard[4]":
        "run/test_sharded_runs.py::test_one_run_by_one_by_several_and_by_one_again[2-*]",
    "run/test_sharded_runs.py::test_adapters_over_sharded_weights_learn_and_export_as_in_one_process":
        "training/test_layout_invariance.py::test_neither_the_number_of_processes_matters_nor_what_they_shard[2]",
    "run/test_sharded_runs.py::test_weights_may_be_offloaded_for_a_part_of_the_run":
        "training/test_layout_invariance.py::test_neither_the_number_of_processes_matters_nor_what_they_shard[2]",
    "run/test_sigkill.py::test_one_of_two_processes_is_killed":
        "launch/test_launch_verb.py::test_a_program_that_crashes_is_restarted_and_its_exit_code_passed_on",
    "launch/test_multi_node.py::test_a_run_on_two_machines_restarts_after_a_process_is_killed":
        "launch/test_multi_node.py::test_machines_with_other_data_are_refused",
    "launch/test_launch_command.py::test_a_failure_that_repeats_in_the_same_step_is_not_restarted":
        "launch/test_restart_policy.py",
    "launch/test_launch_command.py::test_a_signal_stops_a_launch_with_75_and_resume_finishes_it[2]":
        "launch/test_launch_command.py::test_a_signal_stops_a_launch_with_75_and_resume_finishes_it[10]",
    "launch/test_launch_command.py::test_a_stop_file_ends_a_launch_without_a_restart[2]":
        "launch/test_launch_command.py::test_a_stop_file_ends_a_launch_without_a_restart[1]",
    "launch/test_launch_command.py::test_wrong_input_is_reported_and_not_restarted[2]":
        "launch/test_launch_command.py::test_wrong_input_is_reported_and_not_restarted[1]",
    "launch/test_launch_command.py::test_a_second_launch_of_a_run_is_refused_and_names_the_owner":
        "core/test_run_folder.py",
    "launch/test_worker_failures.py::test_a_signal_to_torchrun_leaves_75_in_the_status[15]":
        "launch/test_launch_command.py::test_a_signal_stops_a_launch_with_75_and_resume_finishes_it[10]",
    "run/test_planted_faults.py::test_where_gradients_of_one_conversation_cannot_be_had_the_message_says_so_and_the_replay_finds_it":
        "run/test_planted_faults.py::test_two_processes_stop_together_and_name_the_conversation",
    "run/test_planted_faults.py::test_sharded_weights_roll_back_and_skip_as_whole_ones_do":
        "run/test_planted_faults.py::test_a_rollback_passes_over_the_steps_since_the_checkpoint",
    "run/test_quantized_runs.py::test_two_processes_give_the_first_losses_of_one[True]":
        "run/test_quantized_runs.py::test_two_processes_give_the_first_losses_of_one[False]",
    "launch/test_launch_command.py::test_a_run_saves_and_stops_when_whet_launch_is_killed":
        "core/test_signals.py::test_a_process_gets_sigterm_when_its_parent_is_killed",
    "run/test_watching.py::test_a_resumed_run_ends_early_where_an_uninterrupted_one_does":
        "run/test_watching.py::test_patience_counts_evaluations_since_the_best",
    # Exports for GPT-NeoX of other shapes, and by one rank.
    "convert/test_export_neox.py::test_files_are_neox_s_and_read_back[llama-*]":
        "convert/test_export_neox.py::test_files_are_neox_s_and_read_back[llama, fewer keys, biases-2]",
    "convert/test_export_neox.py::test_files_are_neox_s_and_read_back[llama, tied-2]":
        "convert/test_export_neox.py::test_files_are_neox_s_and_read_back[llama, fewer keys, biases-2]",
    "convert/test_export_neox.py::test_a_run_goes_to_neox_and_back":
        "convert/test_export_neox.py::test_files_are_neox_s_and_read_back[llama, fewer keys, biases-2]",
    "convert/test_export_neox.py::test_files_are_neox_s_and_read_back[neox, sequential-2]":
        "convert/test_export_neox.py::test_files_are_neox_s_and_read_back[neox, parallel residual-2]",
    # Whole runs: the same with other weights, or a shorter way to the same state.
    "run/test_resume.py::test_a_killed_run_continues_bit_for_bit[lora with dropout]":
        "run/test_kill_everywhere.py::test_a_run_killed_at_a_bad_moment_ends_like_an_uninterrupted_one",
    "run/test_resume.py::test_a_killed_run_continues_bit_for_bit[full]":
        "run/test_kill_everywhere.py::test_a_run_killed_at_a_bad_moment_ends_like_an_uninterrupted_one",
    "run/test_trial.py::test_a_paused_run_continues_as_if_uninterrupted":
        "run/test_adapter_runs.py::test_a_paused_run_continues_bit_for_bit[dora]",
    "run/test_pinned_losses.py::test_two_processes_give_the_losses_and_norms_of_one[best-fit]":
        "run/test_sharded_runs.py::test_one_run_by_one_by_several_and_by_one_again[2-*]",
    "run/test_stop.py::test_a_stop_signal_at_any_moment_ends_with_75_and_the_run_resumes[loading]":
        "run/test_stop.py::test_a_stop_signal_at_any_moment_ends_with_75_and_the_run_resumes[first step]",
    "run/test_resume.py::test_sigterm_ends_with_75_after_a_checkpoint_and_the_run_can_be_finished":
        "run/test_stop.py::test_a_stop_signal_at_any_moment_ends_with_75_and_the_run_resumes",
    "run/test_adapter_runs.py::test_peft_and_transformers_load_it_alone":
        "run/test_export_run.py::test_export_run_and_transformers_give_the_same_answer[tiny_run]",
    "run/test_adapter_runs.py::test_it_exports_and_answers[in 4 bits]":
        "run/test_quantized_runs.py::test_its_adapter_is_loaded_over_4_bits_and_over_16",
    "run/test_adapter_runs.py::test_a_paused_run_continues_bit_for_bit[in 4 bits]":
        "run/test_quantized_runs.py::test_it_continues_bit_for_bit",
    "run/test_adapter_runs.py::test_it_chats_beside_its_base[in 4 bits]":
        "run/test_adapter_runs.py::test_it_chats_beside_its_base[dora]",
    "run/test_quantized_runs.py::test_its_losses_are_those_of_a_plain_loop_over_the_numbers_that_4_bits_leave[bf16-0.002]":
        "run/test_quantized_runs.py::test_its_losses_are_those_of_a_plain_loop_over_the_numbers_that_4_bits_leave[fp32-1e-05]",
    "run/test_mixed_precision_runs.py::test_sixteen_bits_learn_what_fp32_learns[train.precision=bf16 model.dtype=fp32]":
        "run/test_mixed_precision_runs.py::test_sixteen_bits_learn_what_fp32_learns[train.precision=bf16]",
    "run/test_mixed_precision_runs.py::test_they_continue_bit_for_bit[options0]":
        "run/test_mixed_precision_runs.py::test_they_continue_bit_for_bit[options1]",
    "run/test_pinned_losses.py::test_packing_and_micro_batches_change_nothing_but_speed[train.micro_rows=2]":
        "run/test_pinned_losses.py::test_packing_and_micro_batches_change_nothing_but_speed[train.micro_rows=4]",
    "run/test_pinned_losses.py::test_packing_and_micro_batches_change_nothing_but_speed[data.packing=none train.micro_rows=8]":
        "run/test_pinned_losses.py::test_packing_and_micro_batches_change_nothing_but_speed[data.packing=none]",
    "run/test_optimizer_runs.py::test_a_run_continues_bit_for_bit_and_learns_like_fp32[16 bits]":
        "run/test_optimizer_runs.py::test_a_run_continues_bit_for_bit_and_learns_like_fp32[8 bits]",
    "run/test_optimizer_runs.py::test_a_run_continues_bit_for_bit_and_learns_like_fp32[muon, adapters]":
        "run/test_optimizer_runs.py::test_a_run_continues_bit_for_bit_and_learns_like_fp32[muon]",
    "run/test_damaged_checkpoints.py::test_damage_is_detected_and_the_previous_checkpoint_used[*-truncated]":
        "run/test_damaged_checkpoints.py::test_damage_is_detected_and_the_previous_checkpoint_used[*-altered]",
    "run/test_damaged_checkpoints.py::test_damage_is_detected_and_the_previous_checkpoint_used[*-unlink]":
        "run/test_damaged_checkpoints.py::test_damage_is_detected_and_the_previous_checkpoint_used[*-altered]",
    "cli/test_inspect.py::test_the_batches_are_the_plan[none]":
        "cli/test_inspect.py::test_the_batches_are_the_plan[best-fit]",
    "cli/test_inspect.py::test_the_batches_are_the_plan[k-bin]":
        "cli/test_inspect.py::test_the_batches_are_the_plan[best-fit]",
    "run/test_mixed_precision_runs.py::test_sixteen_bits_learn_what_fp32_learns[train.precision=fp16]":
        "run/test_mixed_precision_runs.py::test_an_overflow_of_fp16_leaves_the_step_out_and_halves_the_scale",
    "run/test_startup.py::test_a_run_reports_the_time_to_its_first_step_by_phase":
        "run/test_startup.py::test_a_resumed_run_measures_itself_again",
    # Waiting for a time limit.
    "launch/test_worker_failures.py::test_a_process_that_hangs_is_named_with_its_phase[1]":
        "core/test_watchdog.py::test_the_message_names_the_lagging_rank_and_its_phase",
    "inference/test_sandbox.py::test_generated_functions_are_scored_by_their_tests[*time.sleep(99)-0]":
        "inference/test_sandbox.py::test_a_program_that_ignores_signals_is_killed[*]",
    "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(0, *]":
        "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(2, 1, 0)]",
    "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(1, *]":
        "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(2, 1, 0)]",
    "data/read/test_bombs.py::test_a_table_of_gigabytes_in_a_few_kilobytes_is_refused":
        "data/read/test_bombs.py::test_a_record_without_end_is_named",
    # Compiling takes seconds: one case of each kind.
    "execution/test_recompute.py::test_selective_saves_less_than_none_and_full_the_least[lora]":
        "execution/test_recompute.py::test_compiled_layers_save_less_than_by_default_and_full_the_least",
    "execution/test_recompute.py::test_selective_saves_less_than_none_and_full_the_least[whole]":
        "execution/test_recompute.py::test_compiled_layers_save_less_than_by_default_and_full_the_least",
    "execution/test_recompute.py::test_compiled_layers_recompute_the_same_gradients[lora]":
        "execution/test_recompute.py::test_compiled_layers_recompute_the_same_gradients[whole]",
    "execution/test_recompute.py::test_compiled_layers_recompute_the_same_gradients[dropout]":
        "execution/test_recompute.py::test_compiled_layers_recompute_the_same_gradients[whole]",
    "execution/test_recompute.py::test_a_run_with_recompute_has_the_same_losses[selective]":
        "execution/test_recompute.py::test_a_run_with_recompute_has_the_same_losses[full]",
    "execution/test_fused_lora_compiled.py::test_gradients_are_those_of_peft_uncompiled[Qwen2-*]":
        "execution/test_fused_lora_compiled.py::test_gradients_are_those_of_peft_uncompiled[Llama-*]",
    "execution/test_fused_lora_compiled.py::test_gradients_are_those_of_peft_uncompiled[Llama-eager-True-full-none-aot_eager]":
        "execution/test_fused_lora_compiled.py::test_gradients_are_those_of_peft_uncompiled[Llama-eager-True-none-none-aot_eager]",
    "execution/test_fused_lora_compiled.py::test_gradients_are_those_of_peft_uncompiled[Llama-eager-True-selective-activations-aot_eager]":
        "execution/test_fused_lora_compiled.py::test_gradients_are_those_of_peft_uncompiled[Llama-eager-True-none-none-aot_eager]",
    "execution/test_fused_lora_compiled.py::test_a_compiled_layer_saves_gate_and_up_but_neither_their_product_nor_norm_outputs[False]":
        "execution/test_fused_lora_compiled.py::test_a_compiled_layer_saves_gate_and_up_but_neither_their_product_nor_norm_outputs[True]",
    "execution/test_quantized_layers.py::test_4_bit_layers_share_one_compilation_and_compute_the_same":
        "execution/test_fused_lora_4bit.py::test_layers_share_one_compilation_except_the_first",
    "execution/test_fused_lora_4bit.py::test_gradients_are_those_of_the_dequantized_model[True]":
        "execution/test_fused_lora_4bit.py::test_gradients_are_those_of_the_dequantized_model[False]",
    "execution/test_compile.py::test_graph_breaks_at_attention_cause_no_recompilation[lora]":
        "execution/test_compile.py::test_graph_breaks_at_attention_cause_no_recompilation[whole]",
    "execution/test_compile.py::test_layers_of_a_kind_share_one_compilation_for_all_batches[Gemma3Text]":
        "execution/test_compile.py::test_layers_of_a_kind_share_one_compilation_for_all_batches[Llama]",
    "execution/test_fp8_layers.py::test_compiled_layers_differ_by_the_order_of_sums[full]":
        "execution/test_fp8_layers.py::test_compiled_layers_differ_by_the_order_of_sums[none]",
    "training/test_no_device_sync.py::test_forward_backward_and_norm_do_not_wait_for_the_device[compile-lora-varlen]":
        "training/test_no_device_sync.py::test_forward_backward_and_norm_do_not_wait_for_the_device[compile-whole-varlen]",
    "training/test_step.py::test_a_loss_scale_changes_nothing_in_fp64[3.0]":
        "training/test_step.py::test_a_loss_scale_changes_nothing_in_fp64[1024.0]",
    "training/test_adamw.py::test_few_bits_learn_like_many[*-0.95]":
        "training/test_adamw.py::test_few_bits_learn_like_many[8-0.999]",
    "model/lora/test_fused_lora.py::test_operators_pass_opcheck[(0, 32)]":
        "model/lora/test_fused_lora.py::test_operators_pass_opcheck[(2, 3, 32)]",
    "model/lora/test_fused_lora_fp8.py::test_operators_pass_opcheck[0]":
        "model/lora/test_fused_lora_fp8.py::test_operators_pass_opcheck[5]",
    "execution/test_compile.py::test_layers_of_a_kind_share_one_compilation_for_all_batches[Qwen3]":
        "execution/test_compile.py::test_layers_of_a_kind_share_one_compilation_for_all_batches[Llama]",
    "execution/test_compile.py::test_layers_of_a_kind_share_one_compilation_for_all_batches[GPTNeoX]":
        "execution/test_compile.py::test_layers_of_a_kind_share_one_compilation_for_all_batches[GPT2]",
    "execution/test_compile.py::test_compiled_layers_compute_the_same_gradients[eager-none-none]":
        "execution/test_compile.py::test_compiled_layers_compute_the_same_gradients[eager-selective-activations]",
    "execution/test_recompute.py::test_a_compiled_layer_recomputes_only_what_its_backward_pass_needs[selective-0]":
        "execution/test_recompute.py::test_a_compiled_layer_recomputes_only_what_its_backward_pass_needs[full-6]",
    "launch/test_slurm_verbs.py::test_an_array_prepares_the_store_of_one_process":
        "data/test_prepare_workers.py::test_shards_killed_and_repeated_give_the_store_of_one_process",
    "launch/test_worker_failures.py::test_the_other_ranks_name_the_rank_that_failed_first":
        "run/test_planted_faults.py::test_two_processes_stop_together_and_name_the_conversation",
    "cli/test_check_model.py::test_a_modified_store[validation-tokens.bin-ids]":
        "cli/test_check_model.py::test_a_modified_store[train-tokens.bin-ids]",
    "cli/test_check_model.py::test_a_modified_store[validation-loss.bin-mask]":
        "cli/test_check_model.py::test_a_modified_store[train-loss.bin-mask]",
    "data/test_prepare_workers.py::test_the_number_of_processes_does_not_matter[{'too_long': 'split', 'deduplicate': False}]":
        "data/test_prepare_workers.py::test_the_number_of_processes_does_not_matter[{'too_long': 'split', 'deduplicate': True}]",
    "cli/test_prepare.py::test_a_killed_preparation_leaves_no_orphans_and_no_store_and_continues":
        "cli/test_prepare.py::test_a_killed_worker_ends_with_3_and_the_next_start_continues",
    "cli/test_missing_sources.py::test_a_run_can_be_used_when_its_files_are_gone[fraction]":
        "cli/test_missing_sources.py::test_a_run_can_be_used_when_its_files_are_gone[sources]",
    "run/test_fp8_runs.py::test_a_killed_run_continues_bit_for_bit":
        "run/test_kill_everywhere.py::test_a_run_killed_at_a_bad_moment_ends_like_an_uninterrupted_one",
    "run/test_stop.py::test_twenty_mixed_signals_leave_a_true_status[0]":
        "run/test_stop.py::test_a_stop_signal_at_any_moment_ends_with_75_and_the_run_resumes[first step]",
    "launch/test_launch_command.py::test_a_run_restarts_from_its_checkpoint_after_a_rank_is_killed":
        "launch/test_launch_verb.py::test_a_program_that_crashes_is_restarted_and_its_exit_code_passed_on",
    "execution/test_cuda_graphs.py::test_compiled_layers_are_not_compiled_again":
        "execution/test_compile.py::test_layers_of_a_kind_share_one_compilation_for_all_batches[Llama]",
    "run/test_planted_faults.py::test_a_checkpoint_before_the_first_step_that_was_taken_can_be_resumed":
        "run/test_planted_faults.py::test_a_rollback_passes_over_the_steps_since_the_checkpoint",
    "run/test_planted_faults.py::test_a_spike_meets_its_policy[warn-0]":
        "run/test_planted_faults.py::test_a_spike_meets_its_policy[skip-0]",
    "run/test_optimizer_runs.py::test_a_schedule_counts_what_the_run_has_seen[token]":
        "run/test_optimizer_runs.py::test_a_schedule_counts_what_the_run_has_seen[epoch]",
    "bench/test_bench_command.py::test_failure_of_whet_is_exit_code_3_and_the_folder_can_be_reused":
        "bench/test_bench_command.py::test_a_failing_peer_does_not_stop_the_others",
    "model/lora/test_fused_lora.py::test_operators_pass_opcheck[(1, 5, 32)]":
        "model/lora/test_fused_lora.py::test_operators_pass_opcheck[(2, 3, 32)]",
    "model/lora/test_fused_lora.py::test_operators_pass_opcheck[(5, 32)]":
        "model/lora/test_fused_lora.py::test_operators_pass_opcheck[(2, 3, 32)]",
    "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(0*":
        "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(2, 1, 0)]",
    "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(1*":
        "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(2, 1, 0)]",
    "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(2, 0, 1)]":
        "data/test_prepare_workers.py::test_machines_may_make_their_shards_in_any_order[(2, 1, 0)]",
    "data/test_prepare_workers.py::test_of_several_bad_lines_the_first_is_named[2]":
        "data/test_prepare_workers.py::test_of_several_bad_lines_the_first_is_named[3]",
    "execution/test_compile.py::test_compiled_layers_compute_the_same_gradients[sdpa-full-activations]":
        "execution/test_compile.py::test_compiled_layers_compute_the_same_gradients[eager-selective-activations]",
    "run/test_export_run.py::test_export_run_and_transformers_give_the_same_answer[lora_run]":
        "run/test_export_run.py::test_export_run_and_transformers_give_the_same_answer[tiny_run]",
    "training/test_adamw.py::test_few_bits_learn_like_many[16-0.999]":
        "training/test_adamw.py::test_few_bits_learn_like_many[8-0.999]",
    "run/test_stop.py::test_a_stop_file_stops_like_a_signal_and_only_once":
        "launch/test_launch_command.py::test_a_stop_file_ends_a_launch_without_a_restart[1]",
    "run/test_planted_faults.py::test_a_spike_meets_its_policy[rollback-0]":
        "run/test_planted_faults.py::test_a_rollback_passes_over_the_steps_since_the_checkpoint",
    "run/test_export_run.py::test_exports_load_without_whet":
        "run/test_export_run.py::test_export_run_and_transformers_give_the_same_answer[tiny_run]",
    "run/test_sigkill.py::test_kills_of_every_kind":
        "run/test_kill_everywhere.py::test_a_run_killed_at_a_bad_moment_ends_like_an_uninterrupted_one",
    "execution/test_fused_lora_compiled.py::test_a_fused_mlp_is_recomputed_without_its_last_product":
        "execution/test_fused_lora_compiled.py::test_a_compiled_layer_saves_gate_and_up_but_neither_their_product_nor_norm_outputs[True]",
    "execution/test_fused_lora_compiled.py::test_fused_layers_are_compiled_once_for_training_and_once_for_evaluation":
        "execution/test_fused_lora_4bit.py::test_layers_share_one_compilation_except_the_first",
    "training/test_no_device_sync.py::test_forward_backward_and_norm_do_not_wait_for_the_device[compile-lora-short]":
        "training/test_no_device_sync.py::test_forward_backward_and_norm_do_not_wait_for_the_device[compile-whole-varlen]",
    "model/lora/test_fused_lora_fp8.py::test_compiled_it_computes_the_same":
        "execution/test_fp8_layers.py::test_compiled_layers_differ_by_the_order_of_sums[none]",
    "run/test_planted_faults.py::test_a_stopped_run_resumed_with_skip_equals_one_that_skipped_at_once":
        "run/test_planted_faults.py::test_a_rollback_passes_over_the_steps_since_the_checkpoint",
    "run/test_model_reference.py::test_a_smoke_test_keeps_no_best":
        "run/test_trial.py::test_a_smoke_test_goes_the_whole_way_in_five_steps_and_leaves_the_run_alone",
    "run/test_stop.py::test_a_run_folder_that_disappears_ends_the_run_with_a_plain_error[moved]":
        "run/test_stop.py::test_a_run_folder_that_disappears_ends_the_run_with_a_plain_error[deleted]",
    # trl's variants for training differ by their generation tags; each is still compared with the mask on the fixed
    # conversations.
    "data/test_trl_templates.py::test_outcome_of_every_template_and_conversation[*_training]":
        "data/test_generation_tags.py::test_generation_tags_cover_the_mask_plus_header_or_trailing_text",
    "data/test_trl_templates.py::test_ids_match_transformers_and_only_answers_are_supervised[*_training]":
        "data/test_generation_tags.py::test_generation_tags_cover_the_mask_plus_header_or_trailing_text",
    "data/test_trl_templates.py::test_the_cache_changes_nothing[*_training]":
        "data/test_trl_templates.py::test_the_cache_changes_nothing[qwen3]",
    "data/test_chat_template.py::test_a_shipped_template_is_rendered_as_transformers_renders_it[*_training]":
        "data/test_generation_tags.py::test_generation_tags_cover_the_mask_plus_header_or_trailing_text",
    # Relatives of an architecture that is still tried: the same code with other numbers.
    "inference/test_engine.py::test_greedy_completions_are_those_of_transformers[Qwen2]":
        "inference/test_engine.py::test_greedy_completions_are_those_of_transformers[Qwen3]",
    "inference/test_engine.py::test_greedy_completions_are_those_of_transformers[Mistral]":
        "inference/test_engine.py::test_greedy_completions_are_those_of_transformers[Gemma3Text]",
    "inference/test_engine.py::test_greedy_completions_are_those_of_transformers[Granite]":
        "inference/test_engine.py::test_greedy_completions_are_those_of_transformers[Llama]",
    "inference/test_engine.py::test_greedy_completions_are_those_of_transformers[GPTNeoX]":
        "inference/test_engine.py::test_greedy_completions_are_those_of_transformers[GPT2]",
    "exporting/test_export_gguf.py::test_transformers_loads_an_f32_file_bit_for_bit[llama, tied]":
        "exporting/test_export_gguf.py::test_transformers_loads_an_f32_file_bit_for_bit[llama]",
    "exporting/test_export_gguf.py::test_transformers_loads_an_f32_file_bit_for_bit[mistral]":
        "exporting/test_export_gguf.py::test_transformers_loads_an_f32_file_bit_for_bit[llama]",
    "exporting/test_export_gguf.py::test_transformers_loads_an_f32_file_bit_for_bit[qwen2]":
        "exporting/test_export_gguf.py::test_transformers_loads_an_f32_file_bit_for_bit[qwen3]",
    "model/attention/test_attention_compiled.py::test_other_documents_do_not_recompile[Mistral-sdpa]":
        "model/attention/test_attention_compiled.py::test_other_documents_do_not_recompile[Mistral-eager]",
    "model/attention/test_attention_compiled.py::test_other_documents_do_not_recompile[Mistral-varlen]":
        "model/attention/test_attention_compiled.py::test_other_documents_do_not_recompile[Llama-varlen]",
    "cli/test_check.py::test_the_recipe_passes[['train.precision=bf16']]":
        "cli/test_check.py::test_the_recipe_passes[[]]",
    "cli/test_check.py::test_the_recipe_passes[['data.train_on=last']]":
        "cli/test_check.py::test_the_recipe_passes[[]]",
    # Models that are more than a language model: every weight trained, by the one with adapters.
    "run/test_multimodal_models.py::test_the_language_model_is_trained_and_nothing_else[qwen3_5-full]":
        "run/test_multimodal_models.py::test_the_language_model_is_trained_and_nothing_else[qwen3_5-lora]",
    # One of two choices that the same code treats alike.
    "model/lora/test_adapter_methods.py::test_loss_and_gradients_are_those_of_pefts_own_forward[*-no tokens-untied]":
        "model/lora/test_adapter_methods.py::test_loss_and_gradients_are_those_of_pefts_own_forward[*-no tokens-tied]",
    "model/lora/test_adapter_methods.py::test_loss_and_gradients_are_those_of_pefts_own_forward[*-tokens-tied]":
        "model/lora/test_adapter_methods.py::test_loss_and_gradients_are_those_of_pefts_own_forward[*-tokens-untied]",
    "execution/test_merge_linears.py::test_merged_layers_compute_the_same[Qwen2-*]":
        "execution/test_merge_linears.py::test_merged_layers_compute_the_same[Llama-counts2-*]",
    "data/read/test_bombs.py::test_a_record_without_end_is_named[a.jsonl.gz*":
        "data/read/test_bombs.py::test_a_record_without_end_is_named[a.json.zst*",
    "run/test_optimizer_runs.py::test_a_run_continues_bit_for_bit_and_learns_like_fp32[nanochat's muon]":
        "run/test_optimizer_runs.py::test_a_run_continues_bit_for_bit_and_learns_like_fp32[muon]",
    "run/test_optimizer_runs.py::test_a_schedule_counts_what_the_run_has_seen[conversation]":
        "run/test_optimizer_runs.py::test_a_schedule_counts_what_the_run_has_seen[epoch]",
    "registry/test_registry.py::test_a_death_in_any_call_leaves_a_registry[alias]":
        "registry/test_registry.py::test_a_death_in_any_call_leaves_a_registry[add]",
    "run/test_base_models.py::test_a_named_template_adds_trains_and_exports_its_tokens[full]":
        "run/test_base_models.py::test_a_named_template_adds_trains_and_exports_its_tokens[lora]",
    "serve/test_openai_client.py::test_adapters_mixed_in_a_batch_answer_as_each_alone[in turns]":
        "serve/test_openai_client.py::test_adapters_mixed_in_a_batch_answer_as_each_alone[mixed]",
    "execution/test_cuda_graphs.py::test_every_weight_can_be_trained[dtype0-True]":
        "execution/test_cuda_graphs.py::test_every_weight_can_be_trained[dtype1-True]",
    "execution/test_cuda_graphs.py::test_every_weight_can_be_trained[dtype1-False]":
        "execution/test_cuda_graphs.py::test_every_weight_can_be_trained[dtype0-False]",
    "run/test_export_run.py::test_a_gguf_file_holds_the_weights_of_the_merged_folder[lora_run]":
        "run/test_export_run.py::test_a_gguf_file_holds_the_weights_of_the_merged_folder[tiny_run]",
    "data/test_prepare_workers.py::test_the_number_of_processes_does_not_matter[{'too_long': 'truncate'*":
        "data/test_prepare_workers.py::test_the_number_of_processes_does_not_matter[{'too_long': 'split', 'deduplicate': True}]",
    "training/test_no_device_sync.py::test_forward_backward_and_norm_do_not_wait_for_the_device[compile-whole-short]":
        "training/test_no_device_sync.py::test_forward_backward_and_norm_do_not_wait_for_the_device[compile-whole-varlen]",
    "run/test_hybrid_families.py::test_two_packed_steps_are_a_plain_loop[granitemoehybrid]":
        "run/test_hybrid_families.py::test_two_packed_steps_are_a_plain_loop[bamba]",
    "core/test_yaml.py::test_what_is_not_yaml_is_an_error_with_file_line_and_column['[[[*":
        "core/test_config_regressions.py::test_a_yaml_bomb_is_refused_at_once[brackets]",
    "run/test_damaged_checkpoints.py::test_damage_is_detected_and_the_previous_checkpoint_used[model/.metadata-altered]":
        "run/test_damaged_checkpoints.py::test_damage_is_detected_and_the_previous_checkpoint_used[manifest.json-altered]",
    "run/test_damaged_checkpoints.py::test_damage_is_detected_and_the_previous_checkpoint_used[optimizer/*.distcp-altered]":
        "run/test_damaged_checkpoints.py::test_damage_is_detected_and_the_previous_checkpoint_used[model/*.distcp-altered]",
    "run/test_export_run.py::test_check_finds_changes_that_logits_do_not_show[settings1-*":
        "run/test_export_run.py::test_check_finds_changes_that_logits_do_not_show[settings0-*",
    "cli/test_check.py::test_the_files_of_a_folder_are_compared[folder]":
        "cli/test_check.py::test_the_files_of_a_folder_are_compared[folder/*.jsonl]",
    "compat/test_torch_compiler.py::test_no_table_of_compile_times_is_made_at_exit":
        "compat/test_torch_compiler.py::test_dynamo_makes_no_table_at_exit",
}  # fmt: skip


_BY_NAME: dict[str, list[str]] = {}
for _case in SLOW_CASES:
    _BY_NAME.setdefault(_case.partition("[")[0], []).append(_case)


def is_slow_case(nodeid: str) -> bool:
    """Whether a test is one of SLOW_CASES."""
    name = nodeid.removeprefix("tests/").partition("[")[0]
    in_question = (*_BY_NAME.get(name, ()), *_BY_NAME.get(name.partition("::")[0], ()))
    return any(matches(case, nodeid) for case in in_question)


def matches(case: str, nodeid: str) -> bool:
    """Whether a test is one of a case: the whole function, one set of parameters, or those that begin or end alike."""
    nodeid = nodeid.removeprefix("tests/")
    name, bracket, parameters = case.partition("[")
    if (
        nodeid == case
        or (not bracket and nodeid.split("[")[0] == name)
        or (not bracket and nodeid.split("::")[0] == name)
    ):
        return True
    if not bracket or "*" not in parameters:
        return False
    start, _, end = parameters.partition("*")
    return nodeid.startswith(f"{name}[{start}") and nodeid.endswith(end)
