"""The keys of a DeepSpeed configuration: which DeepSpeed 0.19.8 knows, and which it has removed.

Written down from its source (`runtime/config.py`, `runtime/constants.py`, `runtime/zero/config.py` and what they
import), so that a configuration can be judged without importing DeepSpeed. A test compares them with the installed
one.
"""

from __future__ import annotations

from collections.abc import Mapping

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
"""The same for keys of `zero_optimization`."""

REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizer types, in lower case, that are gone."""

TOP_LEVEL = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""Every top-level key that DeepSpeed reads."""

ZERO = frozenset(
    {
        "allgather_bucket_size",
        "allgather_partitions",
        "compute_grad_norm",
        "contiguous_gradients",
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "elastic_checkpoint",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "leaf_module",
        "legacy_stage1",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory",
        "stage",
        "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
        "zenflow",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    }
)
"""Every key of `zero_optimization`."""
