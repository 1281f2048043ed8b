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
from workbench.jobs.deepspeed.sections import SECTIONS

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
"""Top-level keys that DeepSpeed refuses since their features are gone, and what to do instead."""

REMOVED_ZERO: Mapping[str, str] = {
    "mics_hierarchical_params_gather": "delete it",
    "mics_shard_size": "delete it; 'zero_hpz_partition_size' is the nearest thing left",
    "zeropp_loco_param": "delete it; 'zero_quantized_gradients' works without it",
}

REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")

_AUTO_FLAG = FLAG.or_auto()
_AUTO_COUNT = COUNT.or_auto()

_OFFLOAD: Table = {
    "device": words("none", "cpu", "nvme"),
    "nvme_path": TEXT.or_null(),
    "buffer_count": _AUTO_COUNT,
    "pin_memory": _AUTO_FLAG,
}
_OFFLOAD_PARAM = Whole(_OFFLOAD, **dict.fromkeys(("buffer_size", "max_in_cpu"), _AUTO_COUNT))
_OFFLOAD_OPTIMIZER = Whole(
    _OFFLOAD,
    **dict.fromkeys(("pipeline_read", "pipeline_write", "fast_init", "super_offload"), _AUTO_FLAG),
    **dict.fromkeys(("ratio", "cpuadam_cores_perc"), SHARE.or_auto()),
)
_ZENFLOW = Whole(
    dict.fromkeys(("topk_ratio", "auto_ratio", "pt_reserved_cores_perc"), SHARE.or_auto()),
    **dict.fromkeys(("overlap_step", "offload"), _AUTO_FLAG),
    **dict.fromkeys(("select_interval", "update_interval"), WHOLE.or_auto()),
    select_strategy=words("auto", "step", "epoch"),
    full_warm_up_rounds=_AUTO_COUNT,
    steps_per_epoch=_AUTO_COUNT.or_null(),
)

_ZERO_SWITCHES = (
    *("allgather_partitions", "compute_grad_norm", "contiguous_gradients", "elastic_checkpoint"),
    *("enable_sanity_checks", "ignore_unused_parameters", "legacy_stage1", "load_from_fp32_weights"),
    *("log_trace_cache_warnings", "memory_efficient_linear", "override_module_apply", "parameter_alignment"),
    *("pipeline_loading_checkpoint", "reduce_scatter", "round_robin_gradients", "save_muon_momentum_buffer_in_memory"),
    *("stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save"),
    *("stage3_gather_fp16_weights_on_model_save", "stage3_use_all_reduce_for_fetch_params"),
    *("use_multi_rank_bucket_allreduce", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
    "zero_quantized_weights",
)
_ZERO_SIZES = (
    *("allgather_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_model_persistence_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"),
    *("sub_group_size", "zero_hpz_partition_size"),
)
ZERO = Whole(
    dict.fromkeys(_ZERO_SWITCHES, _AUTO_FLAG),
    **dict.fromkeys(
        ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "overlap_comm"), _AUTO_FLAG.or_null()
    ),
    **dict.fromkeys(_ZERO_SIZES, _AUTO_COUNT),
    leaf_module=Whole(classes=TEXTS, names=TEXTS, name_suffixes=TEXTS),
    offload_optimizer=_OFFLOAD_OPTIMIZER,
    offload_param=_OFFLOAD_PARAM,
    reduce_bucket_size=SIZE.or_auto(),
    stage=COUNT,
    stage3_module_granularity_threshold=WHOLE.or_auto(),
    zenflow=_ZENFLOW,
)

_FP16 = Whole(
    dict.fromkeys(("enabled", "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"), _AUTO_FLAG),
    **dict.fromkeys(("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"), WHOLE.or_auto()),
    loss_scale=NUMBER.or_auto(),
)
_BF16_SWITCHES = (
    *("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads"),
    "bf16_optimizer_states",
)
_BF16 = Whole(dict.fromkeys(_BF16_SWITCHES, _AUTO_FLAG))
_OPTIMIZER: Table = {
    "type": TEXT,
    "legacy_fusion": FLAG,
    "params": {
        **dict.fromkeys(("lr", "eps"), POSITIVE.or_auto()),
        **dict.fromkeys(("weight_decay", "momentum"), NUMBER.or_auto()),
        **dict.fromkeys(("nesterov", "amsgrad", "bias_correction", "adam_w_mode", "torch_adam"), FLAG),
        "betas": NUMBERS.or_auto(),
        "dampening": NUMBER,
    },
}
_SCHEDULER: Table = {
    "type": TEXT,
    "params": {
        **dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), POSITIVE.or_auto()),
        **dict.fromkeys(("warmup_num_steps", "total_num_steps"), _AUTO_COUNT),
        **dict.fromkeys(("warmup_min_ratio", "cos_min_ratio"), NUMBER),
        "warmup_type": TEXT,
        "last_batch_iteration": WHOLE,
    },
}
_PROFILER: Table = {
    **dict.fromkeys(("enabled", "detailed"), FLAG),
    **dict.fromkeys(("profile_step", "top_modules"), COUNT),
    "recompute_fwd_factor": POSITIVE,
    "module_depth": WHOLE,
    "output_file": TEXT.or_null(),
}
_ACTIVATION_SWITCHES = (
    *("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "profile"),
    "synchronize_checkpoint_boundary",
)
_ACTIVATIONS: Table = {**dict.fromkeys(_ACTIVATION_SWITCHES, FLAG), "number_checkpoints": COUNT.or_null()}
_FILES = Whole(enabled=FLAG, output_path=TEXT, job_name=TEXT)

_SWITCHES = (
    *("dataloader_drop_last", "disable_allgather", "disable_python_gc", "dump_state", "managed_gradient_accumulation"),
    *("memory_breakdown", "prescale_gradients", "use_data_before_expert_parallelism", "wall_clock_breakdown"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
TOP_LEVEL = Whole(
    {**dict.fromkeys(_SWITCHES, FLAG), **SECTIONS},
    activation_checkpointing=_ACTIVATIONS,
    aio={
        **dict.fromkeys(("block_size", "queue_depth", "intra_op_parallelism"), SIZE),
        **dict.fromkeys(("single_submit", "overlap_events", "use_gds"), FLAG),
    },
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
    comms_logger=Whole(dict.fromkeys(("enabled", "prof_all", "verbose", "debug"), FLAG), prof_ops=TEXTS),
    communication_data_type=TEXT.or_null(),
    csv_monitor=_FILES,
    data_types=dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype"), TEXT.or_null()),
    datastates_ckpt=OBJECT,
    flops_profiler=_PROFILER,
    fp16=_FP16,
    gradient_accumulation_steps=SIZE.or_auto(),
    gradient_allreduce_op=TEXT,
    gradient_clipping=POSITIVE.or_auto(),
    gradient_predivide_factor=NUMBER,
    log_level=TEXT.or_null(),
    optimizer=_OPTIMIZER,
    scheduler=_SCHEDULER,
    seq_parallel_communication_data_type=TEXT.or_null(),
    sequence_parallel_size=SIZE,
    steps_per_print=SIZE.or_null(),
    tensorboard=_FILES,
    torch_autocast={"enabled": FLAG.or_auto(), "dtype": TEXT, "lower_precision_safe_modules": TEXTS.or_null()},
    train_batch_size=SIZE.or_auto(),
    train_micro_batch_size_per_gpu=SIZE.or_auto(),
    vocabulary_size=SIZE.or_null(),
    wandb=Whole(enabled=FLAG, group=TEXT.or_null(), team=TEXT.or_null(), project=TEXT),
    zero_optimization=ZERO,
)
