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

_LOSS = "the loss is the mean over all tokens of the global batch, the same for any number of ranks; leave it out"
_PRECISION = "use `precision`"
_EVALUATION = "evaluation is the project's own; see eval_strategy, metrics and per_device_eval_batch_size"
_ROWS = "rows are made into tokens before the first step and dealt out alike for any number of ranks; leave it out"
_OUT = "what a run writes is in its run directory"
_CHECKPOINTS = "use save_steps and `checkpoints`, which are alike under every technique"
_HUB = "a run uploads nothing; take the model from its run directory"
_LOGS = "use logging_steps; every rank's output is in `run.logs`"
_ANSWERS = "use predict_rows; a run's model is asked by `run.predict`"
_BACKEND = "the process group is gloo on CPUs and NCCL on GPUs"

OTHERWISE: Mapping[str, str] = {
    "accelerator_config": "use `technique`",
    "activation_checkpointing": "use gradient_checkpointing",
    "auto_find_batch_size": "ask `plan(job)` for the largest micro-batch that fits",
    "average_tokens_across_devices": _LOSS,
    "bf16": _PRECISION,
    "bf16_full_eval": _EVALUATION,
    "data_seed": "use `seed`",
    "ddp_backend": _BACKEND,
    "debug": "a loss that is not finite ends the run with its step; `run.stacks` shows where ranks are",
    "disable_tqdm": "the panel shows progress",
    "enable_jit_checkpoint": _CHECKPOINTS,
    "fp16": _PRECISION,
    "fp16_full_eval": _EVALUATION,
    "fsdp_config": "use technique 'fsdp' and `fsdp`",
    "generation_config": _ANSWERS,
    "generation_max_length": _ANSWERS,
    "generation_num_beams": _ANSWERS,
    "gradient_checkpointing_kwargs": "use activation_checkpointing_kwargs, its new name",
    "ignore_data_skip": _CHECKPOINTS,
    "include_num_input_tokens_seen": "tokens are counted anyway; see useful_tokens_per_s of the result",
    "liger_kernel_config": _LOSS,
    "local_rank": "ranks are started by `launcher`",
    "log_on_each_node": _LOGS,
    "num_train_epochs": "use `epochs`",
    "optim": "use `optimizer`",
    "optim_args": "none of the update rules of `optimizer` takes any",
    "optim_target_modules": "use `optimizer` and `lora`",
    "output_dir": _OUT,
    "parallelism_config": "use `technique`",
    "project": "use report_to, with the tracker's own variables in `env`",
    "remove_unused_columns": _ROWS,
    "restore_callback_states_from_checkpoint": _CHECKPOINTS,
    "resume_from_checkpoint": "use `resume`",
    "run_name": "a run is named after its folder: submit(job, path=…)",
    "skip_memory_metrics": "memory is measured anyway; see peak_memory_gib of the result",
    "tf32": _PRECISION,
    "use_cache": "it serves answers, not training",
    "use_cpu": "pods train on their GPUs where they have some: PodSpec(gpus=…)",
    "use_liger_kernel": _LOSS,
    **dict.fromkeys(("do_eval", "do_predict", "do_train"), "use max_steps, eval_steps and predict_rows"),
    **dict.fromkeys(("logging_first_step", "logging_nan_inf_filter", "logging_strategy"), _LOGS),
    **dict.fromkeys(("predict_with_generate", "sortish_sampler"), _ANSWERS),
    **dict.fromkeys(("label_names", "length_column_name"), _ROWS),
    **dict.fromkeys((f"trackio_{what}_id" for what in ("bucket", "space", "static_space")), "use report_to"),
    **dict.fromkeys((f"save_{what}" for what in ("on_each_node", "only_model", "strategy")), _CHECKPOINTS),
    **dict.fromkeys(
        (f"hub_{what}" for what in ("always_push", "model_id", "private_repo", "revision", "strategy", "token")), _HUB
    ),
    "push_to_hub": _HUB,
    **dict.fromkeys(
        (
            *("eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_on_start"),
            *("batch_eval_metrics", "eval_use_gather_object", "include_for_metrics", "prediction_loss_only"),
        ),
        _EVALUATION,
    ),
    **dict.fromkeys(
        (
            f"dataloader_{what}"
            for what in (
                *("drop_last", "in_order", "multiprocessing_context", "num_workers", "persistent_workers"),
                *("pin_memory", "prefetch_factor"),
            )
        ),
        _ROWS,
    ),
}
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
