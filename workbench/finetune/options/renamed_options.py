"""Hints for names and values of other libraries. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _by_name(hints: Mapping[str, str]) -> dict[str, str]:
    """Return the hint of each name. The tables below list a hint once for several names."""
    return {name: hint for hint, names in hints.items() for name in names.split()}


_FLOAT8 = "use float8=True, with precision 'bf16'"
OTHERWISE = _by_name(
    {
        "a loss that is not finite ends the run with its step; "
        "`run.stacks` shows where ranks are": "debug",
        "a run is named after its folder: submit(job, path=…)": "run_name",
        "a run uploads nothing; `run.push` uploads its model, and it is in its run directory": (
            "hub_always_push hub_model_id hub_private_repo "
            "hub_revision hub_strategy hub_token push_to_hub"
        ),
        "ask `plan(job)` for the largest micro-batch that fits": "auto_find_batch_size",
        "evaluation is the project's own; see eval_strategy, "
        "metrics and per_device_eval_batch_size": (
            "bf16_full_eval fp16_full_eval eval_accumulation_steps eval_delay "
            "eval_do_concat_batches eval_on_start batch_eval_metrics "
            "eval_use_gather_object include_for_metrics prediction_loss_only"
        ),
        "it serves answers, not training": "use_cache",
        "memory is measured anyway; see peak_memory_gib of the result": "skip_memory_metrics",
        "use optimizer_options": "optim_args",
        "pods train on their GPUs where they have some: PodSpec(gpus=…)": "use_cpu",
        "ranks are started by `launcher`": "local_rank",
        "rows are made into tokens before the first step and "
        "dealt out alike for any number of ranks; leave it out": (
            "remove_unused_columns label_names length_column_name dataloader_drop_last "
            "dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
            "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor"
        ),
        "the loss is the mean over all tokens of the global "
        "batch, the same for any number of ranks; leave it out": ("average_tokens_across_devices"),
        "use_liger_kernel takes all kernels of Liger but its losses": "liger_kernel_config",
        "the panel shows progress": "disable_tqdm",
        "the process group is gloo on CPUs and NCCL on GPUs": "ddp_backend",
        "tokens are counted anyway; see useful_tokens_per_s of the result": (
            "include_num_input_tokens_seen"
        ),
        "use epochs": "num_train_epochs",
        "use optimizer": "optim",
        "use optimizer and lora": "optim_target_modules",
        "use precision='bf16'": "bf16",
        "use precision='fp16'": "fp16",
        "use precision='tf32'": "tf32",
        "use resume with the run directory to continue from": "resume_from_checkpoint",
        "use seed": "data_seed",
        "use technique": "accelerator_config parallelism_config",
        "use activation_checkpointing_kwargs, its new name": "gradient_checkpointing_kwargs",
        "use gradient_checkpointing": "activation_checkpointing",
        "use logging_steps; every rank's output is in `run.logs`": (
            "log_on_each_node logging_first_step logging_nan_inf_filter logging_strategy"
        ),
        "use max_steps, eval_steps and predict_rows": "do_eval do_predict do_train",
        "use predict_rows; a run's model is asked by `run.predict`": (
            "generation_config generation_max_length "
            "generation_num_beams predict_with_generate sortish_sampler"
        ),
        "use report_to": "trackio_bucket_id trackio_space_id trackio_static_space_id",
        "use report_to, with the tracker's own variables in `env`": "project",
        "use save_steps and `checkpoints`, which are alike under every technique": (
            "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint "
            "save_on_each_node save_only_model save_strategy"
        ),
        "use technique 'fsdp' and `fsdp`": "fsdp_config",
        "what a run writes is in its run directory; submit(job, path=…) chooses it": "output_dir",
    }
)
"""TrainingArguments of transformers that would break a promise or do nothing."""

ELSEWHERE = _by_name(
    {
        "a model's own Python code is never run; "
        "take a model that transformers has itself": "trust_remote_code",
        "use model_revision": "revision",
        "adapters are chosen by peft='lora', with lora={'r': "
        "…, 'alpha': …, 'dropout': …, 'target_modules': […]}": (
            "lora_alpha lora_bias lora_config lora_dropout lora_r lora_rank "
            "lora_target_modules peft_config target_modules use_lora use_peft"
        ),
        "use peft='qlora'": "load_in_4bit bnb_4bit_quant_type quantization_config use_qlora",
        "weights of 8 bits are not offered; peft='qlora' holds them in 4 bits": "load_in_8bit",
        "use peft='lora', with lora={'modules_to_save': […]}": "modules_to_save",
        "use per_device_train_batch_size, the rows of one rank in one forward pass; an "
        "optimizer step takes that times gradient_accumulation_steps times the ranks": (
            "batch_size global_batch_size micro_batch_size "
            "per_device_batch_size per_gpu_train_batch_size train_batch_size"
        ),
        "use per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size",
        "use gradient_accumulation_steps": (
            "accumulate_grad_batches accumulation_steps grad_accum gradient_accumulation"
        ),
        "use learning_rate": "lr",
        "use lr_scheduler_type": "lr_scheduler scheduler",
        "use warmup_steps, or warmup_ratio for a share of all steps": "num_warmup_steps warmup",
        "use weight_decay": "wd",
        "use max_grad_norm": "clip_grad_norm gradient_clipping grad_clip",
        "use epochs": "max_epochs n_epochs num_epochs",
        "use max_steps": "steps train_steps total_steps",
        "use max_source_length for what is asked and "
        "max_target_length for the answer; a text has both together": (
            "block_size context_length cutoff_len max_length "
            "max_seq_len max_seq_length model_max_length seq_len"
        ),
        "use max_source_length for what is asked": "max_prompt_length",
        "use max_target_length for the answer": "max_completion_length max_new_tokens",
        "give the options of a method in method_options, as in "
        "method='dpo', method_options={'beta': 0.1}": (
            "beta center_rewards_coefficient desirable_weight epsilon label_smoothing loss_type "
            "num_generations scale_rewards temperature top_p undesirable_weight"
        ),
        "use rewards": "reward_funcs reward_functions",
        "the reference is the model before the training; leave it out": "ref_model reference_model",
        "use precision": "dtype half mixed_precision torch_dtype",
        _FLOAT8: "enable_fp8 fp8 fp8_training use_fp8",
        "use model": "base_model model_id model_name model_name_or_path "
        "model_path pretrained_model_name_or_path",
        "the tokenizer is the model's; chat_template and system change what it writes": (
            "processing_class tokenizer tokenizer_name tokenizer_name_or_path"
        ),
        "use dataset": (
            "data data_path dataset_name dataset_path train_data train_dataset train_file"
        ),
        "evaluation rows belong to dataset, as in "
        "dataset={'kind': 'files', 'train': …, 'eval': …}": (
            "eval_data eval_dataset eval_file validation_file"
        ),
        "name the columns in dataset, as in dataset={'kind': "
        "'files', 'train': …, 'columns': {'text': …}}": ("dataset_text_field text_column"),
        "use source_language": "source_lang src_lang",
        "use target_language": "forced_bos_token target_lang tgt_lang",
        "use loss_on": "assistant_only_loss completion_only_loss train_on_inputs",
        "use eval_strategy": "evaluation_strategy",
        "use early_stopping_patience": "early_stopping",
        "use metrics; a function of yours can be one of them": "compute_metrics",
        "callbacks are the Trainer's: use a Script with a Trainer of your own": "callbacks",
        "use attn_implementation": "attention attn use_flash_attention use_flash_attention_2",
        "use technique": "strategy",
        "use deepspeed with a path or an object": "deepspeed_config ds_config",
        "use seed": "random_seed",
        "use save_steps and `checkpoints`": "checkpointing_steps save_interval",
        "what a run writes is in its run directory; submit(job, path=…) chooses it": (
            "output output_path save_dir"
        ),
        "TensorBoard has the metrics of every run: `run.tensorboard()`": (
            "log_dir logging_dir tensorboard_dir"
        ),
        "pods and GPUs are the cluster's: Cluster(…, PodSpec(gpus=…), count=…)": (
            "devices gpus n_gpu nnodes nproc_per_node num_gpus num_nodes num_processes world_size"
        ),
        "pods train on their GPUs where they have some: PodSpec(gpus=…)": "device no_cuda",
    }
)
"""Names of other programs, and arguments of TRL's and transformers' scripts."""

LORA = _by_name(
    {
        "use r": "lora_r rank lora_rank",
        "use alpha": "lora_alpha",
        "use dropout": "lora_dropout",
        "use bias": "lora_bias",
        "use target_modules": "lora_target lora_target_modules modules",
        "the family of the model says it": "task_type",
        "it is for running a model, not for training one": "inference_mode",
        "a Script with peft can set it": (
            "alpha_pattern exclude_modules init_lora_weights layer_replication layers_pattern "
            "layers_to_transform loftq_config rank_pattern trainable_token_indices"
        ),
    }
)
"""Options of peft's LoraConfig."""

_ATTENTION = (
    "use 'sdpa', or 'flash_attention_2' where the pods have flash-attn; a Script can load others"
)
_TRACKER = (
    "transformers reports to no such tracker; TensorBoard has the metrics anyway, and a Script can "
    "use any tracker"
)
_METHOD = "use method='{}', and choose how ranks share the work as technique"
_SCRIPT = "FineTune has no such method; a Script with TRL can do it"
_VALUES: Mapping[str, Mapping[str, str]] = {
    "report_to": {
        "tensorboard": "TensorBoard has the metrics of every run; leave it out",
        "none": "leave it out: no tracker is the default",
        "all": "name the trackers, as in ['wandb', 'trackio']",
        "aim": _TRACKER,
        "codecarbon": "it measures energy and writes files beside the checkpoints of transformers; "
        "use a Script with a Trainer",
        "flyte": "it draws in a task of Flyte, and a rank is none; use a Script in a Flyte task",
        "kubeflow": "a handed-over TrainJob reports to Kubeflow by itself; leave it out",
    },
    "optimizer": {
        "lion_32bit": "use 'lion'",
        **dict.fromkeys(
            ("lion_8bit", "paged_lion_32bit", "paged_lion_8bit"),
            "use 'lion', whose one state per weight has 32 bits",
        ),
    },
    "attn_implementation": {
        **dict.fromkeys(("flash_attention_4", "xformers"), _ATTENTION),
    },
    "precision": _by_name(
        {
            "use 'bf16'": "bfloat16 torch.bfloat16",
            "use 'fp16'": "float16 half torch.float16",
            "use 'fp32'": "float32 no torch.float32",
            _FLOAT8: "float8 fp8 torch.float8_e4m3fn",
        }
    ),
    "peft": _by_name(
        {
            "use 'none', which trains all weights": "full freeze",
            "use 'lora' with lora={'use_dora': True}": "dora",
            "use 'lora' with lora={'use_rslora': True}": "rslora",
            **{
                f"write technique={name!r}; peft chooses the weights to train": name
                for name in ("single", "ddp", "zero1", "zero2", "zero3", "zero3-offload", "fsdp")
            },
        }
    ),
    "technique": {
        **{name: _METHOD.format(name) for name in ("sft", "dpo", "grpo", "kto", "orpo", "reward")},
        **dict.fromkeys(("ppo", "rloo"), _SCRIPT),
        "deepspeed": "name the ZeRO stage: zero1, zero2 or zero3",
        **{name: f"adapters are peft={name!r}, with any technique" for name in ("lora", "qlora")},
        "dora": "adapters are peft='lora' with lora={'use_dora': True}, with any technique",
    },
    "method": {
        **dict.fromkeys(("ppo", "rloo", "cpo", "online_dpo", "gkd"), _SCRIPT),
        "lora": "adapters are peft='lora', with any method",
        "rm": "use 'reward'",
    },
}


def value_hint(option: str, value: object) -> str:
    """Return the value to use instead of a value of another library; empty if unknown.

    Example:
        >>> value_hint("report_to", ["tensorboard"])
        'TensorBoard has the metrics of every run; leave it out'
        >>> hint = value_hint("attn_implementation", "kernels-community/flash-attn2")
        >>> hint.startswith("use 'sdpa', or")
        True
    """
    texts: list[object] = []
    if isinstance(value, str):
        texts = [value]
    elif isinstance(value, Sequence):
        texts = list(value)
    for text in texts:
        if option == "attn_implementation" and "/" in str(text):  # kernel of the hub
            return _ATTENTION
        if isinstance(text, str):
            hint = _VALUES.get(option, {}).get(text)
            if hint:
                return hint
    return ""
