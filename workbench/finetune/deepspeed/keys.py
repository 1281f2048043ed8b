"""Known and removed keys of DeepSpeed 0.19.8, with kinds of values.

A test compares with DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.finetune.deepspeed.kinds import Table, table_of

AUTO_BATCHES = dict.fromkeys(
    ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto"
)

REMOVED: Mapping[str, str] = {
    "amp": "use 'bf16'",
    "compression_training": "delete it; the model would train uncompressed",
    "curriculum_learning": "use 'data_efficiency.data_sampling.curriculum_learning'",
    "eigenvalue": "delete it",
    "elasticity": "delete it, and let the batch keys be 'auto'",
    "graph_harvesting": "delete it",
    "nebula": "delete it",
    "progressive_layer_drop": "delete it",
    "quantize_training": "delete it",
    "sparse_attention": "delete it",
    "sparse_gradients": "delete it; embeddings made with sparse=True need no key",
}
"""Top-level keys of removed DeepSpeed features, with a remedy."""

REMOVED_ZERO: Mapping[str, str] = {
    "mics_hierarchical_params_gather": "delete it",
    "mics_shard_size": "delete it; 'zero_hpz_partition_size' is the nearest thing left",
    "zeropp_loco_param": "delete it; 'zero_quantized_gradients' works without it",
}

REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")

# Kinds of values and their keys, by section. `!`: DeepSpeed refuses other keys of the section.
TOP_LEVEL: Table = table_of("""
flag: dataloader_drop_last disable_allgather disable_python_gc dump_state managed_gradient_accumulation
    memory_breakdown prescale_gradients use_data_before_expert_parallelism wall_clock_breakdown
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
text,null: communication_data_type log_level seq_parallel_communication_data_type
size,auto: gradient_accumulation_steps train_batch_size train_micro_batch_size_per_gpu
size,null: steps_per_print vocabulary_size
object: datastates_ckpt
text: gradient_allreduce_op
positive,auto: gradient_clipping
number: gradient_predivide_factor
size: sequence_parallel_size
[autotuning]
    size: mp_size min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu
        num_tuning_micro_batch_sizes
    count: start_profile_step end_profile_step tuner_early_stopping tuner_num_trials
    flag: enabled fast overwrite
    text: results_dir exps_dir
    text,null: metric_path model_info_path
    latency/throughput/flops/forward/step: metric
    gridsearch/random/model_based: tuner_type
    object,null: arg_mappings
    size,null: max_train_batch_size
[autotuning.model_info]
    size,null: num_params hidden_size num_layers
    flag: profile
[compile]!
    flag: deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory
        offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce
        sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors
    count: free_activation_threshold
    texts,null: passes
[data_efficiency]
    flag: enabled
    whole: seed
[data_efficiency.data_sampling]
    flag: enabled pin_memory
    size: num_epochs
    count: num_workers
[data_efficiency.data_sampling.curriculum_learning]
    flag: enabled
    text: data_cluster_path
    object: curriculum_metrics
[data_efficiency.data_sampling.dynamic_batching]
    size: min_batch_size max_batch_size max_tokens
    flag: enabled verbose
    linear/sqrt/none: lr_scaling_method
    text: metrics_path
    random/seqlen/dataloader: sequence_picking_order
[data_efficiency.data_routing] flag: enabled
[data_efficiency.data_routing.random_ltd]
    text: model_type hidden_state_order
    flag: enabled
    size: total_layer_num
    count: random_ltd_layer_num
    numbers: random_ltd_layer_id
    text,null: model_mask_name
    object: layer_token_lr_schedule
[data_efficiency.data_routing.random_ltd.random_ltd_schedule]
    count: min_value max_value
    text: schedule_type
[data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config] count: require_steps seq_per_step
[expert_parallel]
    text,null: preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3
        num_experts_attr top_k_attr shared_experts_pattern shared_experts_gate_pattern expert_activation
    flag: enabled validate_folding_routing async_split_plan use_grouped_mm disable_triton_grouped_mm
    size: autoep_size expert_tensor_parallel_size comm_num_sm
    flag,null: route_norm has_shared_experts
    count: comm_qp_margin comm_max_tokens_per_rank
    size,null: num_expert_groups num_limited_groups
    number: route_scale
    number,auto: routed_scaling_factor
    size,auto: top_k
    auto/pre/post: score_apply
    auto/softmax/sigmoid: score_func
    auto/weighted_sum/fused_weighted_sum/legacy_bmm: combine_impl
    auto/eager/fused: row_weighting_impl
    separate/fused: gate_up_impl
    comm/deepep: comm_backend
[hybrid_engine]!
    flag: enabled release_inference_cache pin_parameters enable_cuda_graph
    size: max_out_tokens inference_tp_size tp_gather_partition_size
[pipeline]
    flag: seed_layers pipe_partitioned grad_partitioned use_reentrant
    size,auto: stages
    text: partition
    count: activation_checkpoint_interval
[tensor_parallel]!
    flag: tp_overlap_comm keep_module_on_host replace_with_kernel_inject kernel_inject
    count: autotp_size
    flag,null: vocab_parallel_lm_head
    torch/liger: vocab_parallel_ce_backend
    texts,null: injection_policy_tuple
    object,null: partition_config
    text,null: preset_model
[tensor_parallel.tensor_parallel,tensor_parallel.tp]! size: tp_size tp_grain_size
[timers.throughput]! flag: enabled synchronized
[weight_quantization]!
    size: num_bits q_groups
    object: quantized_initialization post_init_quant
    flag: enabled
    asymmetric/symmetric: q_type
[activation_checkpointing]
    flag: partition_activations contiguous_memory_optimization cpu_checkpointing profile
        synchronize_checkpoint_boundary
    count,null: number_checkpoints
[aio]
    size: block_size queue_depth intra_op_parallelism
    flag: single_submit overlap_events use_gds
[bf16,bfloat16]!
    flag,auto: enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
[checkpoint]
    flag: load_universal use_node_local_storage
    text: tag_validation
[checkpoint.parallel_write] flag: pipeline_stage
[comet]!
    text,null: project workspace api_key experiment_name experiment_key mode
    flag: enabled
    size: samples_log_interval
    flag,null: online
[comms_logger]!
    flag: enabled prof_all verbose debug
    texts: prof_ops
[data_types] text,null: grad_accum_dtype param_dtype buffer_dtype
[flops_profiler]
    flag: enabled detailed
    count: profile_step top_modules
    positive: recompute_fwd_factor
    whole: module_depth
    text,null: output_file
[fp16]!
    flag,auto: enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads
    whole,auto: initial_scale_power loss_scale_window hysteresis min_loss_scale
    number,auto: loss_scale
[optimizer]
    text: type
    flag: legacy_fusion
[optimizer.params]
    flag: nesterov amsgrad bias_correction adam_w_mode torch_adam set_grad_none fp32_optimizer_states per_head_muon
    positive,auto: lr eps muon_lr adam_lr
    gram/standard: ns_method
    number,auto: weight_decay momentum
    numbers,auto: betas
    number: dampening
[scheduler] text: type
[scheduler.params]
    positive,auto: warmup_min_lr warmup_max_lr
    count,auto: warmup_num_steps total_num_steps
    number: warmup_min_ratio cos_min_ratio
    text: warmup_type
    whole: last_batch_iteration
    positive: cycle_min_lr cycle_max_lr lr_range_test_min_lr lr_range_test_step_rate
    number: decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate
    count: cycle_first_step_size cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size
        lr_range_test_step_size
    flag: cycle_momentum lr_range_test_staircase
[tensorboard,csv_monitor]!
    text: output_path job_name
    flag: enabled
[torch_autocast]
    flag,auto: enabled
    text: dtype
    texts,null: lower_precision_safe_modules
[wandb]!
    text,null: group team
    flag: enabled
    text: project
[zero_optimization]!
    flag,auto: allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint enable_sanity_checks
        ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings
        memory_efficient_linear override_module_apply parameter_alignment pipeline_loading_checkpoint reduce_scatter
        round_robin_gradients save_muon_momentum_buffer_in_memory stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zero_quantized_gradients
        zero_quantized_nontrainable_weights zero_quantized_weights
    count,auto: allgather_bucket_size stage3_max_live_parameters stage3_max_reuse_distance
        stage3_model_persistence_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
        sub_group_size zero_hpz_partition_size
    flag,auto,null: cpu_offload cpu_offload_param cpu_offload_use_pin_memory overlap_comm
    size,auto: reduce_bucket_size
    count: stage
    whole,auto: stage3_module_granularity_threshold
[zero_optimization.leaf_module]! texts: classes names name_suffixes
[zero_optimization.offload_optimizer]!
    flag,auto: pin_memory pipeline_read pipeline_write fast_init super_offload
    share,auto: ratio cpuadam_cores_perc
    none/cpu/nvme: device
    text,null: nvme_path
    count,auto: buffer_count
[zero_optimization.offload_param]!
    count,auto: buffer_count buffer_size max_in_cpu
    none/cpu/nvme: device
    text,null: nvme_path
    flag,auto: pin_memory
[zero_optimization.zenflow]!
    share,auto: topk_ratio auto_ratio pt_reserved_cores_perc
    flag,auto: overlap_step offload
    whole,auto: select_interval update_interval
    auto/step/epoch: select_strategy
    count,auto: full_warm_up_rounds
    count,auto,null: steps_per_epoch
""")
