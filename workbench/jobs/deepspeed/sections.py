"""The keys of the sections of a DeepSpeed 0.19.8 configuration that are seldom written; a test compares with it."""

from __future__ import annotations

from workbench.jobs.deepspeed.kinds import (
    COUNT,
    FLAG,
    NUMBER,
    NUMBERS,
    OBJECT,
    SIZE,
    TEXT,
    TEXTS,
    WHOLE,
    Table,
    Whole,
    words,
)

_SIZES = ("num_params", "hidden_size", "num_layers")

_AUTOTUNING: Table = {
    **dict.fromkeys(("enabled", "fast", "overwrite"), FLAG),
    **dict.fromkeys(("results_dir", "exps_dir"), TEXT),
    **dict.fromkeys(("metric_path", "model_info_path"), TEXT.or_null()),
    **dict.fromkeys(("start_profile_step", "end_profile_step", "tuner_early_stopping", "tuner_num_trials"), COUNT),
    "metric": words("latency", "throughput", "flops", "forward", "step"),
    "tuner_type": words("gridsearch", "random", "model_based"),
    "arg_mappings": OBJECT.or_null(),
    "model_info": {"profile": FLAG, **dict.fromkeys(_SIZES, SIZE.or_null())},
    "mp_size": SIZE,
    "max_train_batch_size": SIZE.or_null(),
    "min_train_batch_size": SIZE,
    "max_train_micro_batch_size_per_gpu": SIZE,
    "min_train_micro_batch_size_per_gpu": SIZE,
    "num_tuning_micro_batch_sizes": SIZE,
}

_COMPILE_SWITCHES = (
    *("deepcompile", "autoep_non_moe", "free_activation", "offload_activation", "offload_activation_pin_memory"),
    *("offload_opt_states", "double_buffer", "symmetric_memory", "debug_log", "offload_parameters"),
    *("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather"),
    *("keep_int_input_tensors", "keep_all_input_tensors"),
)
_COMPILE = Whole(dict.fromkeys(_COMPILE_SWITCHES, FLAG), free_activation_threshold=COUNT, passes=TEXTS.or_null())

_DYNAMIC_BATCHING: Table = {
    "enabled": FLAG,
    "lr_scaling_method": words("linear", "sqrt", "none"),
    "min_batch_size": SIZE,
    "max_batch_size": SIZE,
    "metrics_path": TEXT,
    "sequence_picking_order": words("random", "seqlen", "dataloader"),
    "max_tokens": SIZE,
    "verbose": FLAG,
}
_RANDOM_LTD: Table = {
    "enabled": FLAG,
    "total_layer_num": SIZE,
    "random_ltd_layer_num": COUNT,
    "random_ltd_layer_id": NUMBERS,
    "model_mask_name": TEXT.or_null(),
    "model_type": TEXT,
    "hidden_state_order": TEXT,
    "random_ltd_schedule": {
        "min_value": COUNT,
        "max_value": COUNT,
        "schedule_type": TEXT,
        "schedule_config": {"require_steps": COUNT, "seq_per_step": COUNT},
    },
    "layer_token_lr_schedule": OBJECT,
}
_DATA_EFFICIENCY: Table = {
    "enabled": FLAG,
    "seed": WHOLE,
    "data_sampling": {
        "enabled": FLAG,
        "num_epochs": SIZE,
        "num_workers": COUNT,
        "pin_memory": FLAG,
        "curriculum_learning": {"enabled": FLAG, "data_cluster_path": TEXT, "curriculum_metrics": OBJECT},
        "dynamic_batching": _DYNAMIC_BATCHING,
    },
    "data_routing": {"enabled": FLAG, "random_ltd": _RANDOM_LTD},
}

_EXPERT_SWITCHES = (
    *("enabled", "validate_folding_routing", "async_split_plan", "use_grouped_mm", "disable_triton_grouped_mm"),
)
_EXPERT_NAMES = (
    *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2", "expert_w3"),
    *("num_experts_attr", "top_k_attr", "shared_experts_pattern", "shared_experts_gate_pattern", "expert_activation"),
)
_EXPERT_PARALLEL: Table = {
    **dict.fromkeys(_EXPERT_SWITCHES, FLAG),
    **dict.fromkeys(_EXPERT_NAMES, TEXT.or_null()),
    **dict.fromkeys(("route_norm", "has_shared_experts"), FLAG.or_null()),
    **dict.fromkeys(("autoep_size", "expert_tensor_parallel_size", "comm_num_sm"), SIZE),
    **dict.fromkeys(("comm_qp_margin", "comm_max_tokens_per_rank"), COUNT),
    **dict.fromkeys(("num_expert_groups", "num_limited_groups"), SIZE.or_null()),
    "route_scale": NUMBER,
    "routed_scaling_factor": NUMBER.or_auto(),
    "top_k": SIZE.or_auto(),
    "score_apply": words("auto", "pre", "post"),
    "score_func": words("auto", "softmax", "sigmoid"),
    "combine_impl": words("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"),
    "row_weighting_impl": words("auto", "eager", "fused"),
    "gate_up_impl": words("separate", "fused"),
    "comm_backend": words("comm", "deepep"),
}

_HYBRID_ENGINE = Whole(
    dict.fromkeys(("enabled", "release_inference_cache", "pin_parameters", "enable_cuda_graph"), FLAG),
    **dict.fromkeys(("max_out_tokens", "inference_tp_size", "tp_gather_partition_size"), SIZE),
)

_PIPELINE: Table = {
    "stages": SIZE.or_auto(),
    "partition": TEXT,
    "seed_layers": FLAG,
    "activation_checkpoint_interval": COUNT,
    "pipe_partitioned": FLAG,
    "grad_partitioned": FLAG,
    "use_reentrant": FLAG,
}

_SPLIT = Whole(tp_size=SIZE, tp_grain_size=SIZE)
_TENSOR_PARALLEL = Whole(
    autotp_size=COUNT,
    tp_overlap_comm=FLAG,
    vocab_parallel_lm_head=FLAG.or_null(),
    vocab_parallel_ce_backend=words("torch", "liger"),
    tensor_parallel=_SPLIT,
    tp=_SPLIT,
    injection_policy_tuple=TEXTS.or_null(),
    partition_config=OBJECT.or_null(),
    preset_model=TEXT.or_null(),
    keep_module_on_host=FLAG,
    replace_with_kernel_inject=FLAG,
    kernel_inject=FLAG,
)

_TIMERS: Table = {"throughput": Whole(enabled=FLAG, synchronized=FLAG)}

_WEIGHT_QUANTIZATION = Whole(
    enabled=FLAG,
    num_bits=SIZE,
    q_type=words("asymmetric", "symmetric"),
    q_groups=SIZE,
    quantized_initialization=OBJECT,
    post_init_quant=OBJECT,
)

SECTIONS: Table = {
    "autotuning": _AUTOTUNING,
    "compile": _COMPILE,
    "data_efficiency": _DATA_EFFICIENCY,
    "expert_parallel": _EXPERT_PARALLEL,
    "hybrid_engine": _HYBRID_ENGINE,
    "pipeline": _PIPELINE,
    "tensor_parallel": _TENSOR_PARALLEL,
    "timers": _TIMERS,
    "weight_quantization": _WEIGHT_QUANTIZATION,
}
