"""The keys that DeepSpeed 0.19.8 knows, what they may be, and which it has removed; a test compares with it."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.jobs.deepspeed.kinds import (
    COUNT,
    FLAG,
    NUMBER,
    NUMBERS,
    OBJECT,
    POSITIVE,
    SHARE,
    SIZE,
    TEXT,
    TEXTS,
    WHOLE,
    Table,
    Whole,
    words,
)
from workbench.jobs.deepspeed.sections import (
    AUTOTUNING,
    COMPILE,
    DATA_EFFICIENCY,
    EXPERT_PARALLEL,
    HYBRID_ENGINE,
    PIPELINE,
    TENSOR_PARALLEL,
    TIMERS,
    WEIGHT_QUANTIZATION,
)

__all__ = ["REMOVED", "REMOVED_OPTIMIZERS", "REMOVED_ZERO", "TOP_LEVEL", "ZERO"]

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
"""Top-level keys that DeepSpeed refuses since their features are gone, and what to do instead."""

REMOVED_ZERO: Mapping[str, str] = {
    "mics_hierarchical_params_gather": "delete it",
    "mics_shard_size": "delete it; 'zero_hpz_partition_size' is the nearest thing left",
    "zeropp_loco_param": "delete it; 'zero_quantized_gradients' works without it",
}

REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")

_OFFLOAD: Table = {
    "device": words("none", "cpu", "nvme"),
    "nvme_path": TEXT.or_null(),
    "buffer_count": COUNT.or_auto(),
    "pin_memory": FLAG.or_auto(),
}
_OFFLOAD_PARAM = Whole(_OFFLOAD, buffer_size=COUNT.or_auto(), max_in_cpu=COUNT.or_auto())
_OFFLOAD_OPTIMIZER = Whole(
    _OFFLOAD,
    pipeline_read=FLAG.or_auto(),
    pipeline_write=FLAG.or_auto(),
    fast_init=FLAG.or_auto(),
    ratio=SHARE.or_auto(),
    super_offload=FLAG.or_auto(),
    cpuadam_cores_perc=SHARE.or_auto(),
)
_ZENFLOW = Whole(
    topk_ratio=SHARE.or_auto(),
    select_strategy=words("auto", "step", "epoch"),
    select_interval=WHOLE.or_auto(),
    update_interval=WHOLE.or_auto(),
    overlap_step=FLAG.or_auto(),
    offload=FLAG.or_auto(),
    auto_ratio=SHARE.or_auto(),
    full_warm_up_rounds=COUNT.or_auto(),
    pt_reserved_cores_perc=SHARE.or_auto(),
    steps_per_epoch=COUNT.or_auto().or_null(),
)

ZERO = Whole(
    allgather_bucket_size=COUNT.or_auto(),
    allgather_partitions=FLAG.or_auto(),
    compute_grad_norm=FLAG.or_auto(),
    contiguous_gradients=FLAG.or_auto(),
    cpu_offload=FLAG.or_auto().or_null(),
    cpu_offload_param=FLAG.or_auto().or_null(),
    cpu_offload_use_pin_memory=FLAG.or_auto().or_null(),
    elastic_checkpoint=FLAG.or_auto(),
    enable_sanity_checks=FLAG.or_auto(),
    ignore_unused_parameters=FLAG.or_auto(),
    leaf_module=Whole(classes=TEXTS, names=TEXTS, name_suffixes=TEXTS),
    legacy_stage1=FLAG.or_auto(),
    load_from_fp32_weights=FLAG.or_auto(),
    log_trace_cache_warnings=FLAG.or_auto(),
    memory_efficient_linear=FLAG.or_auto(),
    offload_optimizer=_OFFLOAD_OPTIMIZER,
    offload_param=_OFFLOAD_PARAM,
    overlap_comm=FLAG.or_auto().or_null(),
    override_module_apply=FLAG.or_auto(),
    parameter_alignment=FLAG.or_auto(),
    pipeline_loading_checkpoint=FLAG.or_auto(),
    reduce_bucket_size=SIZE.or_auto(),
    reduce_scatter=FLAG.or_auto(),
    round_robin_gradients=FLAG.or_auto(),
    save_muon_momentum_buffer_in_memory=FLAG.or_auto(),
    stage=COUNT,
    stage3_allgather_sequential=FLAG.or_auto(),
    stage3_gather_16bit_weights_on_model_save=FLAG.or_auto(),
    stage3_gather_fp16_weights_on_model_save=FLAG.or_auto(),
    stage3_max_live_parameters=COUNT.or_auto(),
    stage3_max_reuse_distance=COUNT.or_auto(),
    stage3_model_persistence_threshold=COUNT.or_auto(),
    stage3_module_granularity_threshold=WHOLE.or_auto(),
    stage3_param_persistence_threshold=COUNT.or_auto(),
    stage3_prefetch_bucket_size=COUNT.or_auto(),
    stage3_use_all_reduce_for_fetch_params=FLAG.or_auto(),
    sub_group_size=COUNT.or_auto(),
    use_multi_rank_bucket_allreduce=FLAG.or_auto(),
    zenflow=_ZENFLOW,
    zero_hpz_partition_size=COUNT.or_auto(),
    zero_quantized_gradients=FLAG.or_auto(),
    zero_quantized_nontrainable_weights=FLAG.or_auto(),
    zero_quantized_weights=FLAG.or_auto(),
)

_FP16 = Whole(
    enabled=FLAG.or_auto(),
    auto_cast=FLAG.or_auto(),
    loss_scale=NUMBER.or_auto(),
    initial_scale_power=WHOLE.or_auto(),
    loss_scale_window=WHOLE.or_auto(),
    hysteresis=WHOLE.or_auto(),
    consecutive_hysteresis=FLAG.or_auto(),
    min_loss_scale=WHOLE.or_auto(),
    fp16_master_weights_and_grads=FLAG.or_auto(),
)
_BF16 = Whole(
    enabled=FLAG.or_auto(),
    immediate_grad_update=FLAG.or_auto(),
    check_grad_overflow=FLAG.or_auto(),
    bf16_master_weights_and_grads=FLAG.or_auto(),
    bf16_optimizer_states=FLAG.or_auto(),
)
_OPTIMIZER: Table = {
    "type": TEXT,
    "legacy_fusion": FLAG,
    "params": {
        "lr": POSITIVE.or_auto(),
        "betas": NUMBERS.or_auto(),
        "eps": POSITIVE.or_auto(),
        "weight_decay": NUMBER.or_auto(),
        "momentum": NUMBER.or_auto(),
        "dampening": NUMBER,
        "nesterov": FLAG,
        "amsgrad": FLAG,
        "bias_correction": FLAG,
        "adam_w_mode": FLAG,
        "torch_adam": FLAG,
    },
}
_SCHEDULER: Table = {
    "type": TEXT,
    "params": {
        "warmup_min_lr": POSITIVE.or_auto(),
        "warmup_max_lr": POSITIVE.or_auto(),
        "warmup_num_steps": COUNT.or_auto(),
        "total_num_steps": COUNT.or_auto(),
        "warmup_type": TEXT,
        "warmup_min_ratio": NUMBER,
        "cos_min_ratio": NUMBER,
        "last_batch_iteration": WHOLE,
    },
}
_PROFILER: Table = {
    "enabled": FLAG,
    "recompute_fwd_factor": POSITIVE,
    "profile_step": COUNT,
    "module_depth": WHOLE,
    "top_modules": COUNT,
    "detailed": FLAG,
    "output_file": TEXT.or_null(),
}
_ACTIVATIONS: Table = {
    "partition_activations": FLAG,
    "contiguous_memory_optimization": FLAG,
    "cpu_checkpointing": FLAG,
    "number_checkpoints": COUNT.or_null(),
    "synchronize_checkpoint_boundary": FLAG,
    "profile": FLAG,
}
_FILES = Whole(enabled=FLAG, output_path=TEXT, job_name=TEXT)

TOP_LEVEL = Whole(
    activation_checkpointing=_ACTIVATIONS,
    aio={
        "block_size": SIZE,
        "queue_depth": SIZE,
        "intra_op_parallelism": SIZE,
        "single_submit": FLAG,
        "overlap_events": FLAG,
        "use_gds": FLAG,
    },
    autotuning=AUTOTUNING,
    bf16=_BF16,
    bfloat16=_BF16,
    checkpoint={
        "tag_validation": TEXT,
        "load_universal": FLAG,
        "use_node_local_storage": FLAG,
        "parallel_write": {"pipeline_stage": FLAG},
    },
    comet=Whole(
        dict.fromkeys(("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"), TEXT.or_null()),
        enabled=FLAG,
        samples_log_interval=SIZE,
        online=FLAG.or_null(),
    ),
    comms_logger=Whole(enabled=FLAG, prof_all=FLAG, prof_ops=TEXTS, verbose=FLAG, debug=FLAG),
    communication_data_type=TEXT.or_null(),
    compile=COMPILE,
    csv_monitor=_FILES,
    data_efficiency=DATA_EFFICIENCY,
    data_types={"grad_accum_dtype": TEXT.or_null(), "param_dtype": TEXT.or_null(), "buffer_dtype": TEXT.or_null()},
    dataloader_drop_last=FLAG,
    datastates_ckpt=OBJECT,
    disable_allgather=FLAG,
    disable_python_gc=FLAG,
    dump_state=FLAG,
    expert_parallel=EXPERT_PARALLEL,
    flops_profiler=_PROFILER,
    fp16=_FP16,
    gradient_accumulation_steps=SIZE.or_auto(),
    gradient_allreduce_op=TEXT,
    gradient_clipping=POSITIVE.or_auto(),
    gradient_predivide_factor=NUMBER,
    hybrid_engine=HYBRID_ENGINE,
    log_level=TEXT.or_null(),
    managed_gradient_accumulation=FLAG,
    memory_breakdown=FLAG,
    optimizer=_OPTIMIZER,
    pipeline=PIPELINE,
    prescale_gradients=FLAG,
    scheduler=_SCHEDULER,
    seq_parallel_communication_data_type=TEXT.or_null(),
    sequence_parallel_size=SIZE,
    steps_per_print=SIZE.or_null(),
    tensor_parallel=TENSOR_PARALLEL,
    tensorboard=_FILES,
    timers=TIMERS,
    torch_autocast={"enabled": FLAG.or_auto(), "dtype": TEXT, "lower_precision_safe_modules": TEXTS.or_null()},
    train_batch_size=SIZE.or_auto(),
    train_micro_batch_size_per_gpu=SIZE.or_auto(),
    use_data_before_expert_parallelism=FLAG,
    vocabulary_size=SIZE.or_null(),
    wall_clock_breakdown=FLAG,
    wandb=Whole(enabled=FLAG, group=TEXT.or_null(), team=TEXT.or_null(), project=TEXT),
    weight_quantization=WEIGHT_QUANTIZATION,
    zero_allow_untested_optimizer=FLAG,
    zero_force_ds_cpu_optimizer=FLAG,
    zero_optimization=ZERO,
)
