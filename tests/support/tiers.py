"""Which tests run when: a fast tier, the default, what only CI and whole runs do, and the rest.

    pytest -m fast          under a minute on two cores: every rule once, one of each kind
    pytest -n 2             in two processes; 10 minutes are the aim
    pytest -m exhaustive    what the default leaves out: more of the same kind
    pytest -m nightly       what takes longest of that, for which CI has no time

Patterns are searched in the ids of tests, as ``pytest --collect-only -q`` prints them.
"""

from __future__ import annotations

import re

FAST = re.compile(
    "|".join(
        [
            r"^tests/test_(architecture|docs)\.py",
            r"^tests/unit/test_(layout|buffers|gradients|gradient_ownership|npu_gradients)\.py",
            r"^tests/unit/test_(schedules|params|constructor_words)\.py",
            r"^tests/unit/test_(state_contract|mailbox|seed_examples)\.py",
            r"^tests/distributed/test_norms\.py::test_(clipping|overflow_on_one_rank)",
            r"^tests/distributed/test_clip_option\.py::test_option",
            r"test_scaler_overflow\.py::test_costs_nothing_in_a_normal_step",
            # Every rule, at each world and in small and large buckets.
            r"test_elementwise\.py::test_sharded_is_unsharded\[((sgd-nesterov|adam-amsgrad|adamw-decay|"
            r"bert-linear)-3-0\.01|adam-2-25)\]",
            r"test_family\.py::test_sharded_is_unsharded\[((rmsprop-all|rmsproptf-all|adadelta-decay)"
            r"-3-0\.01|adadelta-plain-2-25)\]",
            r"test_lamb\.py::test_sharded_is_unsharded\[((npu|google)-3-0\.01|npu-2-25)\]",
            r"test_lamb\.py::test_follows_the_oracle\[npu-(decay|global-norm)-3\]",
            r"test_adamp\.py::test_sharded_is_unsharded\[(3-0\.01|2-25)\]",
            r"test_paddle\.py::test_sharded_is_unsharded\[(0\.01-groups-clips|25-norm)",
            r"test_new_rule\.py::test_a_new_rule_is_sharded",
            r"test_low_precision\.py::test_masters_follow_the_oracle\[(adamw|lamb)-dtype0",
            r"test_quantized_wires\.py::test_gradients_that_8_bits_hold_are_exact\[ShardedAdam-2\]",
            r"test_quantized_wires\.py::test_ranks_are_equal.*\[ShardedLamb-2-4\]",
            r"test_mesh_faults\.py::test_an_error_on_one_rank_reaches_all\[lr later",
            r"test_param_wire\.py::test_is_the_rounded_result_of_none\[adamw-3-wire0",
            # Each kind of thing that ranks do.
            r"test_communication\.py::test_collectives_per_step\[(adam|lamb)-3-2\]",
            r"test_pairwise\.py::test_collectives\[(2-float32|3-bfloat16)\]",
            r"test_disagreement\.py::test_every_rank_hears_of_it\[another_lr-(auto|native)\]",
            r"test_checkpoint\.py::test_saved_at_two\[sgd-3",
            r"test_torch_state_dict\.py::test_other_world_sizes\[sgd-2-3",
            r"test_extending\.py",
            r"test_overlap\.py::test_(same_bits\[(plain|twice)-2|collectives)",
            r"test_partitioned\.py::test_same_bits\[(one|three)-3\]",
            r"test_overlap_readers\.py::test_nobody.*(forward|EMA)",
            r"test_fuzz\.py::test_a_seed_is_a_program",
            r"test_resharding\.py::test_two_to_three.*\[(ShardedAdamW|ShardedLamb)\]",
            r"test_damage\.py::test_(no_whole|a_damaged|nothing_is_run)",
            r"test_checkpoint_async_save\.py::test_(the_state_of_the_call\[adam|never)",
            r"^tests/unit/test_(imports|deepspeed_files)\.py",
            r"^tests/distributed/test_imports\.py::test_torch\[adamw",
            # Of pytest --device npu.
            r"^tests/distributed/test_stand_in_npu\.py",
            r"test_host_syncs\.py::test_(no_optimizer_waits\[(Adam|Lamb|BertAdam|AdamP)-fp32|no_option|what)",
        ]
    )
)

NIGHTLY = re.compile(
    "|".join(
        [
            r"test_bert_kills\.py::test_killed_again_and_again\[[3-9]\]",
            r"test_ops_in_flight\.py::test_every_op\[[1-7]\]",
            r"test_readers_over_sockets\.py::test_(.*long|.*2\])",
            r"test_replaced_ddp\.py::.*(pairwise|native)",
            r"test_moved_scripts\.py::.*(native|pairwise-3)",
            r"test_compiled\.py::test_trains_as_eagerly\[(closure|function|update|blocks)",
            r"test_bert_phases\.py::test_killed.*\[0-(?!handing over-moments)",
            r"test_bert_phases\.py::test_killed.*\[1-.*-all\]",
            r"test_bert_data\.py::test_(two_gigabytes|memory_does_not_grow)",
            r"test_acceptance\.py::test_(whole_on_two_ranks|quick_on_the_stand_in)",
            r"test_dead_ranks\.py::.*\b16\b",
            r"test_sixteen_ranks\.py::test_an_error_reaches_all",
            r"test_overlap\.py::test_random_schedules\[[3-9][0-9]",
            # Of each one other world, rank or state is in the default.
            r"test_quantized_wires\.py::test_ranks_are_equal.*-(3|4)-",
            r"test_npu_scaler\.py::test_overflow_on_one_rank\[.*(3|4)",
            r"test_participation\.py::test_any_rank_may_lack_any_gradient\[[1-6]-",
            # At worlds 3 and 4 the oracle is followed, and sharded is unsharded at worlds 1 to 4.
            r"test_(elementwise|family|lamb|adamp|paddle)\.py::test_follows_the_oracle\[.*-[12]\]",
        ]
    )
)

EXHAUSTIVE = re.compile(
    "|".join(
        [
            r"test_told_causes\.py::test_(saving_on_one_rank\[(?!plain)|cast_after_building)",
            r"test_fsdp\.py::test_(collectives_do_not_grow|table_of_methods)",
            r"test_dead_ranks\.py::.*\[(8|16)-",
            r"test_sixteen_ranks\.py::test_the_bits",
            # Long ones, of which the default has a shorter one of the same kind.
            r"test_bert_command\.py::test_a_killed_rank_ends_the_job",
            r"test_bert_config\.py::test_ranks_all_exit_with_code_2",
            r"test_npu_scripts\.py::test_paths_are_from_where_the_user_is",
            r"test_kept_ddp_memory\.py::test_freed_memory_is_given_back_once",
            r"test_checkpoint_async_save\.py::test_a_rank_that_dies_in_a_save\[1-",
            r"test_fuzz\.py::test_random_programs\[3\]",
            r"test_fuzz\.py::test_programs_(over_fsdp|of_muon)\[[34]\]",
            r"test_(fsdp|muon)_kills\.py::.*\[20",
            r"test_upstream_defects_on_ranks\.py::test_5_c_late_none_and_unused.*-2\]$",
            r"test_same_as_unsharded_interface\.py::.*-3\]$",
            r"test_checkpoint_forged\.py::test_forged\[(?!0\])",
            # One of nine situations with each of two of four ends is in the default.
            r"test_checkpoint_cuts\.py::test_every_call_is_cut\[(?!Replaced-killed|Run-reader)",
            r"test_edited_state_dicts\.py::test_one_edit_at_a_random_place\[(?!0-|60-)",
            r"test_edited_state_dicts\.py::test_one_rank_has_a_bad_dict\[(NpuFusedSGD|ShardedLamb)",
            r"test_edited_state_dicts\.py::test_an_edited_group_on_one_rank\[(?!lr-nan)",
            r"test_hyper_parameters\.py::.*\[NpuFused",
            r"test_told_causes\.py::test_a_model_with_other_parameters\[(?!assign|one rank)",
            r"test_told_causes\.py::test_cast_on_one_rank\[.*pairwise",
            # Torch's whole database of ops; readers of each kind are in the default.
            r"test_ops_in_flight\.py::test_every_op",
            r"test_readers_over_sockets\.py::test_(layers|collectives|forked|.*(long|2\]))",
            r"test_replaced_ddp\.py::.*(dropped|handed over|pairwise|native)",
            r"test_moved_scripts\.py",
            r"test_module_buffers\.py::test_all_tensors_are_equal\[3-",
            r"test_readers_over_sockets\.py::test_threads\[2-5\]",
            # Each kind of mesh, and each way to send under backward, is in the default once.
            r"test_slow_readers\.py::test_(memory_along_one_axis.*overlap|.*\[\(4, 2\))",
            r"test_slow_readers\.py::test_ranks_may_end.*\[\(2, 2\)",
            r"test_groups_saved\.py::.*(unfrozen.*by_torch|lr_may.*by_shardfuse)",
            r"test_clip_then_edit\.py::test_unscaling.*stage 1-1\]",
            # What variants of LAMB switch is independent of each other.
            r"test_lamb\.py::test_follows_the_oracle\[(apex|nvlamb|google|paddle|deepspeed)-"
            r"(?!plain|decay|undecayed)",
            r"test_lamb\.py::test_sharded_is_unsharded\[(apex|nvlamb|google|paddle)-[124]-",
            r"test_(elementwise|family)\.py::test_sharded_is_unsharded\[.*-4-",
            r"test_(elementwise|family|adamp)\.py::test_follows_the_oracle\[.*-[12]\]",
            r"test_lamb\.py::test_follows_the_oracle\[npu-.*-[12]\]",
            r"test_participation\.py::test_any_rank_may_lack_any_gradient\[[1-6]-",
            r"test_participation\.py::test_ranks_launch.*\[(?!by_sharded_scaler-(None-2|hccl-4))\w+-"
            r"(None-|hccl-[34])",
            r"test_state\.py::test_resume\[.*-(1-2|1-4|2-1|3-2|4-1)-",
            r"test_torch_state_dict\.py::test_set_continues\[(sgd|sgd-plain|bert|rmsprop-tf)-",
            r"test_npu_scaler\.py::test_overflow_on_one_rank\[.*(3|4)",
            r"test_overlap\.py::test_random_schedules\[[1-9]",
            r"test_partitioned\.py::test_random_schedules\[[1-4]\]",
            r"test_partitioned\.py::test_same_bits\[.*-[24]\]",
            r"test_partitioned_memory\.py::test_by_(dtype|resident).*\[4\]",
            r"test_mesh\.py::test_modes_have.*\[(auto|native)\]",
            r"test_mesh\.py::test_shapes_and_transports\[shape[23]-",
            r"test_quantized_wires\.py::test_.*(exact|kept)\[.*-(1|3)\]",
            r"test_quantized_wires\.py::test_ranks_are_equal.*-(3|4)-",
            r"test_overlap_ends\.py::test_a_rank_(leaves|dies).*\[(just ends|auto|native)",
            r"test_overlap_ends\.py::test_a_rank_that_fails_under_backward\[native",
            r"test_overlap\.py::test_same_bits\[.*-3\]",
            r"test_gradient_programs\.py::test_random_programs\[(sgd-2|npu-1|reduced-1)\]",
            r"test_gradient_programs\.py::test_every_short_program\[(zero|step)\]",
            r"test_participation\.py::test_(any_rank_may_lack_any_gradient|lamb_too)\[.*-4",
            r"test_elementwise\.py::test_sharded_is_unsharded\[.*-1-",
            r"test_paddle\.py::test_compiled_clip",
            r"test_compiled\.py::test_(inductor|trains_as_eagerly\[(?!step-2))",
            r"test_adamp\.py::test_follows_the_oracle\[(always|never|some|eps)-",
            r"test_communication\.py::test_collectives_per_step\[.*-300-2\]",
            r"test_lamb\.py::test_follows_the_oracle\[(apex|nvlamb|google|paddle|deepspeed)-.*-[124]\]",
            r"test_lamb\.py::test_follows_the_oracle\[(apex|nvlamb|paddle|deepspeed)-(decay|undecayed)",
            r"test_(elementwise|family)\.py::test_(sharded_is_unsharded\[.*-2-25\]|.*-1-)",
            r"test_npu\.py::test_unused_parameters_are_absent\[.*-1\]",
            r"test_npu_scaler\.py::test_overflow_on_one_rank\[.*-static-.*-1\]",
            r"test_torch_state_dict\.py::test_set_continues\[.*(flattened|on the CPU)-0\]",
            r"test_state\.py::test_resume\[.*-1-1-",
            r"test_same_as_unsharded_numerics\.py::test_formulas_hold.*-3\]",
            r"test_pairwise\.py::test_a_missing_peer_is_an_error\[False-auto",
            r"test_memory\.py::test_no_full_size_temporary\[.*-1-dtype1\]",
            r"test_memory\.py::test_states_are_freed_with_the_optimizer\[Sharded(SGD|Adam)-",
            r"test_(overlap|partitioned)\.py::test_every_optimizer\[.*bfloat16",
            r"test_partitioned\.py::test_random_schedules",
            r"test_partitioned\.py::test_over_gloo\[3-",
            r"test_mesh_faults\.py::test_a_rank_that_(dies|sends_later.*(pairwise-True|native-False)|differs.*-(pairwise|native)\]|differs.*bad)",
            r"test_mesh\.py::test_shapes_and_transports\[shape1-(auto|native)",
            r"test_overlap_ends\.py::test_a_rank_(leaves|that_fails).*-1\]",
            r"test_gradient_programs\.py::test_random_programs\[(npu|reduced)-2\]",
            r"test_model_files\.py::test_accelerate_save_state",
            r"test_pairwise\.py::test_a_missing_peer_is_an_error\[True",
            # One world size, dtype, transport or size of buckets of each is left.
            r"test_elementwise\.py::test_follows_the_oracle\[bert-(constant|cosine|poly|undecayed|"
            r"linear-no-warmup)-clip",
            r"test_(elementwise|family)\.py::test_sharded_is_unsharded\[.*-2-0\.01\]",
            r"test_lamb\.py::test_sharded_is_unsharded\[(npu|deepspeed)-4-",
            r"test_adamp\.py::test_sharded_is_unsharded\[4-",
            r"test_family\.py::test_resume\[.*-bf16\]",
            r"test_paddle\.py::test_follows_the_oracle\[.*-[12]\]",
            r"test_communication\.py::test_collectives_per_step\[(adamw|rmsprop|rmsproptf|adadelta|"
            r"bert|lamb-apex|lamb-adam)-(300-3|3-2)\]",
            r"test_npu\.py::test_unused_parameters_are_absent\[.*-2\]",
            r"test_npu_scaler\.py::test_overflow_on_one_rank\[(adam|adamp)-.*-2\]",
            r"test_disagreement\.py::test_every_rank_hears_of_it\[(?!another_lr).*-native\]",
            r"test_torch_state_dict\.py::test_set_continues\[adamw-bf16-(full|.* flat|.* on)",
            r"test_partitioned\.py::test_a_model\[.*-2\]",
            r"test_partitioned\.py::test_over_gloo\[4-(auto|native)\]",
            r"test_quantized_wires\.py::test_over_gloo\[(3-1|2-2)\]",
            r"test_quantized_wires\.py::test_ranks_are_equal.*\[(?!ShardedLamb|ShardedAdam-).*-2-8\]",
            r"test_pairwise\.py::test_collectives\[4-(?!float32)",
            r"test_pairwise\.py::test_(large_parts|bytes_on_the_wire)\[(2|3)-",
            r"test_checkpoint\.py::test_saved_at_two\[(lamb|adam-bf16)-1\]",
            r"test_memory\.py::test_no_full_size_temporary\[(?!ShardedLamb).*-2-dtype1\]",
            r"test_memory\.py::test_states_are_freed_with_the_optimizer\[Sharded(AdamW|BertAdam)-",
            r"test_state\.py::test_resume\[(amsgrad|bert|sgd-plain|adam-bf16)-.*after a step\]",
            # Checkpoints: more kills, flips, optimizers and sizes of the same kind.
            r"test_bert_phases\.py::test_killed.*(\[0-|-weights\]|-all\])",
            r"test_study\.py::test_a_(study_that_is_killed|run_that_fails)",
            r"test_bert_norms\.py::test_(an_interrupted|norms_change|a_clip_that|tensorboard)",
            r"test_bert_data\.py::test_(memory_does_not_grow|one_rank_and_two)",
            r"test_bert_phases\.py::test_hand_over\[ShardedLamb-(moments|all)",
            r"test_bert_transformers\.py::test_the_page_s_commands_run",
            r"test_slurm",
            r"test_bert_kills\.py::test_(killed_again_and_again|torchrun_restarts_it|"
            r"fewer|torchrun_itself)",
            r"test_damage\.py::test_any_bit_and_any_end\[(?!0\])",
            r"test_resharding\.py::test_two_to_three.*\[(?!ShardedLamb\]|ShardedAdamW\]|ShardedSGD|bert)",
            r"test_resharding\.py::test_other_configurations\[(larger|bf16)",
            r"test_export\.py::test_peak_memory",
            r"^tests/unit/test_distribution\.py",
            r"test_torch_state_dict\.py::test_save_and_load_of.*(torch's-(bert|adamw-bf16-3)|ours-(adamw|bert-2))",
            r"test_job\.py::test_(torchrun_restarts_it|ranks_that_outlive)",
            r"test_doctor\.py::(test_one_rank_is_ill\[(?!sums)|test_behind.*from the start)",
            # Plans against real ranks, but for one of each kind.
            r"test_plan\.py::test_memory.*\[adamw-(stage 1-4|stage 2-2|no|native-4|native,|b|few)",
            r"test_plan\.py::test_memory.*\[lamb-(stage|no|native-|native.*4|bf16 wires-4|few.*4)",
            r"test_plan\.py::test_every_kind.*\[(a|lamb-d|sgd|rows-n|bert-dtype0|.*norm-dtype1)",
            r"test_plan_times\.py::.*(stage 2|no overlap|200mbit-DDP|1gbit-shardfuse lamb)",
            r"test_checkpoint_alone\.py::.*\[(?!(saves|fails in load)-auto)",
            r"test_checkpoint_async_save\.py::test_the_state_of_the_call\[lamb",
            # Whole jobs by their real commands, of which the default has one of each kind.
            r"test_acceptance\.py::test_(whole|quick|the_stand_in_is_built|nothing_is_left|ranks_that_take_too_long)",
            r"test_npu_scripts\.py::test_(a_signal|deepspeed|several_nodes|refused\[(devices|memory))",
            r"test_doctor\.py::test_(behind.*after|on_what.*\[1\]|more_checks|alone)",
            r"test_job\.py::test_one_rank_fails_alone\[3\]",
            r"test_bert_phases\.py::test_hand_over\[ShardedAdamW",
            r"test_doctor\.py::test_on_what_stands_in_for_hccl\[0",
            r"test_npu_scripts\.py::test_(it_runs|sixteen|a_variable)",
            r"test_npu_scripts\.py::test_one_node\[(?!bert-large\])",
            r"test_npu_scripts\.py::test_refused\[(?!devices|no master|memory)",
            r"test_npu_scripts\.py::test_deepspeed_refuses\[(?!worker-0 slots)",
            r"test_examples\.py::test_(it_trains\[(?!plain_loop)|two_|one_rank_goes_on)",
            r"test_bert_folders\.py::test_a_late_rank_of_torchrun_shares",
            r"test_bert_runs\.py::test_a_run_resumes_on_another_number_of_ranks"
            r"\[(adamw|bertadam|sgd)\]",
            r"test_bert_runs\.py::test_two_ranks_train_as_one_with_the_doubled_batch"
            r"\[(adamw|bertadam|sgd)\]",
            r"test_bert_runs\.py::test_a_stopped_run_resumes.*fewer-bits",
            r"test_deepspeed_command\.py::test_what_cannot_be_run_is_one_line\[.*options[0245]-",
            r"test_trainer\.py::test_equals_fp64_math_on_all_samples",
            r"test_deepspeed_command\.py::test_other_optimizers_train",
            r"test_bert_folders\.py::test_torchrun_s_report",
            r"test_bert_folders\.py::test_a_folder_that.*\[(below-file|proc|data-full|seq-len)\]",
            r"test_bert_folders\.py::test_text_that_is_gone_or_damaged_is_one_line\[(text|index)\]",
            r"test_bert_command\.py::test_a_signal_to_torchrun_saves_and_stops",
            r"test_bert_faults\.py::test_a_late_rank_trains_in_the_same_default",
            r"test_bert_transformers\.py::test_a_checkpoint_that_cannot_be_taken"
            r"\[(?!damaged weights|other model|gone)",
            r"test_bert_transformers\.py::test_(heads_that_it_lacks_are_drawn\[BertModel|weights_in|"
            r"a_checkpoint_made_elsewhere\[0)",
            r"test_bert_translate_faults\.py::test_the_page_s_commands_run\[[0-2]",
            r"test_bert_recipes\.py::test_a_dry_run_shows_it\[(?!mlperf-8192|nvidia-large)",
            r"test_bert_faults\.py::test_latest_stays_where_a_part_is_not_whole\[(0-m|1-t)",
            r"test_bert_faults\.py::test_resume_without_latest.*\[(empty|dangling)\]",
            r"test_bert_faults\.py::test_resume_passes_by.*\[(truncated|missing|listing|old, no)",
            r"test_bert_faults\.py::test_a_part_that_cannot_be_written.*\[0\]",
            r"test_bert_runs\.py::test_other_worlds_and_micro_batches.*\[[34]\]",
            r"test_bert_runs\.py::test_(a_run_resumes|two_ranks_train_as_one).*\[adam\]",
            r"test_bert_runs\.py::test_low_precision_follows_full_precision\[bf16",
            r"test_bert_fsdp\.py::test_(two_phases|losses.*\[(bf16|fp16)\])",
            r"test_fsdp_checkpoint\.py::test_a_stopped_job\[False",
            r"test_bench\.py::test_update_and_comm_leave_their_files",
            r"test_lamb_warnings\.py::test_the_bert_job_does_not_warn",
            r"test_trainer\.py::test_ranks_agree_and_states_are_sharded\[(class|unclipped|bf16|epoch)",
            r"test_trainer\.py::test_(checkpoints_have_whole_states\[(best|epoch)|bf16_autocast)",
            r"test_bench\.py::test_step_leaves_tables",
            r"test_bench_links\.py::test_quick",
            r"test_trainer\.py::test_equals_fp64_math_on_all_samples\[(?!instance)",
            r"test_model_files\.py::test_accelerate_save_state\[2\]",
            r"test_lamb_compare\.py::test_table_of_the_readme",
            r"test_mlperf_bert\.py::test_params_are_the_same\[(plain|clipped|accumulated)\]",
            r"test_mlperf_bert\.py::test_(params_of_the_fp32|params_under_a).*\[1\]",
            r"test_mlperf_bert\.py::test_(bytes_over_sockets\[3|a_scaler_and)",
        ]
    )
)
