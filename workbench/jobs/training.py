"""Which of transformers' TrainingArguments a job may set by `training`; why not the others. Imports no transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from workbench.base.errors import ConfigError, one_of

ALLOWED = frozenset((
    "activation_checkpointing_kwargs", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters",
    "ddp_static_graph", "full_determinism", "log_level", "log_level_replica", "lr_scheduler_kwargs",
    "neftune_noise_alpha", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps",
))  # fmt: skip
"""What is handed on as it is."""

_INSTEAD = {
    "a loss that is not finite ends the run with its step; `run.stacks` shows where ranks are": "debug",
    "a run is named after its folder: submit(job, path=…)": "run_name",
    "a run uploads nothing; take the model from its run directory": (
        "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token push_to_hub"
    ),
    "ask `plan(job)` for the largest micro-batch that fits": "auto_find_batch_size",
    "evaluation is the project's own; see eval_strategy, metrics and per_device_eval_batch_size": (
        "bf16_full_eval fp16_full_eval eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start "
        "batch_eval_metrics eval_use_gather_object include_for_metrics prediction_loss_only"
    ),
    "it serves answers, not training": "use_cache",
    "memory is measured anyway; see peak_memory_gib of the result": "skip_memory_metrics",
    "none of the update rules of `optimizer` takes any": "optim_args",
    "pods train on their GPUs where they have some: PodSpec(gpus=…)": "use_cpu",
    "ranks are started by `launcher`": "local_rank",
    "rows are made into tokens before the first step and dealt out alike for any number of ranks; leave it out": (
        "remove_unused_columns label_names length_column_name dataloader_drop_last dataloader_in_order "
        "dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers "
        "dataloader_pin_memory dataloader_prefetch_factor"
    ),
    "the loss is the mean over all tokens of the global batch, the same for any number of ranks; leave it out": (
        "average_tokens_across_devices liger_kernel_config use_liger_kernel"
    ),
    "the panel shows progress": "disable_tqdm",
    "the process group is gloo on CPUs and NCCL on GPUs": "ddp_backend",
    "tokens are counted anyway; see useful_tokens_per_s of the result": "include_num_input_tokens_seen",
    "use `epochs`": "num_train_epochs",
    "use `optimizer`": "optim",
    "use `optimizer` and `lora`": "optim_target_modules",
    "use `precision`": "bf16 fp16 tf32",
    "use `resume`": "resume_from_checkpoint",
    "use `seed`": "data_seed",
    "use `technique`": "accelerator_config parallelism_config",
    "use activation_checkpointing_kwargs, its new name": "gradient_checkpointing_kwargs",
    "use gradient_checkpointing": "activation_checkpointing",
    "use logging_steps; every rank's output is in `run.logs`": (
        "log_on_each_node logging_first_step logging_nan_inf_filter logging_strategy"
    ),
    "use max_steps, eval_steps and predict_rows": "do_eval do_predict do_train",
    "use predict_rows; a run's model is asked by `run.predict`": (
        "generation_config generation_max_length generation_num_beams predict_with_generate sortish_sampler"
    ),
    "use report_to": "trackio_bucket_id trackio_space_id trackio_static_space_id",
    "use report_to, with the tracker's own variables in `env`": "project",
    "use save_steps and `checkpoints`, which are alike under every technique": (
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint save_on_each_node "
        "save_only_model save_strategy"
    ),
    "use technique 'fsdp' and `fsdp`": "fsdp_config",
    "what a run writes is in its run directory": "output_dir",
}
OTHERWISE = {name: instead for instead, names in _INSTEAD.items() for name in names.split()}
"""What a job may not set, since it would break a promise or do nothing, and what to use instead."""


def check_training(given: Mapping[str, object], fields: Collection[str]) -> None:
    """Refuse names that are not TrainingArguments', or not for a job to set; `fields` are the job's own options.

    Example:
        >>> check_training({"bf16": True}, ())
        Traceback (most recent call last):
        workbench.base.errors.ConfigError: training 'bf16' is not for a job to set: use `precision`
    """
    for name in given:
        if name in fields:
            raise ConfigError(f"training {name!r} is an option of the job itself: give {name}=… beside `training`")
        if name in OTHERWISE:
            raise ConfigError(f"training {name!r} is not for a job to set: {OTHERWISE[name]}")
        if name not in ALLOWED:
            raise one_of("training argument", name, sorted(ALLOWED))
