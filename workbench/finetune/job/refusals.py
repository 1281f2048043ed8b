"""Raise ConfigError for combinations of options that cannot work, with a remedy in the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, shortened
from workbench.base.json_values import text
from workbench.finetune.data.rows import Example, Refusal
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.choices import BITSANDBYTES
from workbench.finetune.options.evaluation import check_evaluation
from workbench.finetune.options.groups.adapters import check_adapters_at_submit
from workbench.finetune.options.groups.languages import check_languages, language_options
from workbench.finetune.options.groups.sequence import check_sequence, check_sequence_at_submit
from workbench.finetune.options.groups.tensor import check_tensor, check_tensor_at_submit
from workbench.finetune.options.model.models import (
    TINY_LLAMA,
    TINY_T5,
    Family,
    check_address,
    check_model,
    config_of,
    family_by_name,
    has_chat_template,
    model_family,
)
from workbench.finetune.options.optimizers import OPTIMIZER_OPTIONS
from workbench.finetune.options.training import check_training
from workbench.finetune.techniques.registry import TECHNIQUES, technique_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

# Options that some schedules of transformers require: at least one per schedule.
_SCHEDULE_NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}


def check_together(job: FineTuneOptions) -> None:
    """Raise ConfigError for contradicting options. Opens no file."""
    check_address(job.model)
    if job.model_revision is not None and job.model in (TINY_T5, TINY_LLAMA):
        check_model(job.model, job.model_revision)
    _check_technique(job)
    method_of(job.method).refuse(job)
    _check_peft(job)
    _check_optimizer(job)
    _check_schedule(job)
    check_training(job.training, type(job).model_fields)
    if job.checkpoint_layers and not job.gradient_checkpointing:
        raise ConfigError(
            "checkpoint_layers says which layers are "
            "recomputed: give gradient_checkpointing=True too"
        )
    if job.checkpoint_layers and "activation_checkpointing_kwargs" in job.training:
        raise ConfigError(
            "activation_checkpointing_kwargs are for "
            "transformers' own layers: drop checkpoint_layers"
        )
    _check_policy(job)
    _check_device_map(job)
    if (
        job.packing
        and job.attn_implementation == "flash_attention_2"
        and job.per_device_train_batch_size > 1
    ):
        raise ConfigError(
            "packing with attn_implementation 'flash_attention_2' keeps texts "
            "apart in one row alone, and per_device_train_batch_size is "
            f"{job.per_device_train_batch_size}; use 1 with longer rows, or 'sdpa'"
        )
    check_evaluation(job)
    # Jobs are also read from other users' run directories, so no file is opened.
    check_family(job, family_by_name(job.model))
    _check_prompt(job, False if job.model == TINY_LLAMA else None)


def check_family(job: FineTuneOptions, family: Family | None) -> None:
    """Raise ConfigError for options without support in models of `family`."""
    if job.precision == "fp16" and family == "encoder-decoder":
        raise ConfigError(
            f"precision 'fp16' is refused for {job.model!r}: encoder-decoder models of the "
            "T5 family overflow in it, for their activations leave its range; use 'bf16'"
        )
    if job.training.get("use_liger_kernel") and family == "encoder-decoder":
        raise ConfigError(
            f"training 'use_liger_kernel': Liger has no kernels for the family of {job.model!r}. "
            "Drop it"
        )
    if job.router_aux_loss_coef and (family == "encoder-decoder" or job.model == TINY_LLAMA):
        raise ConfigError(
            "router_aux_loss_coef weighs the load-balancing loss of a "
            f"causal mixture of experts, and {job.model!r} is none. Drop it"
        )
    languages = language_options(job)
    if languages and family == "causal":
        raise ConfigError(
            f"{languages[0]} is for encoder-decoder models, and {job.model!r} is a causal model; "
            f"write the language into the prompt, and drop {languages[0]}"
        )
    if family != "encoder-decoder":
        return
    method = method_of(job.method)
    if method.uses_trl:
        raise ConfigError(method.refusal_of_family(job.model))
    others = {
        "prompt": job.prompt not in (None, "plain"),
        "chat_template": job.chat_template is not None,
        "system": job.system is not None,
        "packing": job.packing,
        "loss_on": job.loss_on != "answer",
    }
    for key, given in others.items():
        if given:
            raise ConfigError(
                f"{key} is for causal models, and {job.model!r} is an encoder-decoder model; "
                f"drop {key}"
            )


def no_template(model: str) -> str:
    """Return the message for a model without a chat template."""
    return (
        f"the model {model!r} has no chat template; set chat_template, or use a model with a "
        "chat template"
    )


def unlearned_turns(row: Example) -> str:
    """Return the message for turns of weight 0 under `loss_on="all"`; empty for other rows."""
    if all(turn.get("weight") != 0 for turn in row.messages):
        return ""
    return "has a turn of weight 0, and loss_on 'all' learns every turn; use loss_on='answer'"


def row_refusal(job: FineTuneOptions) -> Refusal:
    """Return a function that returns the reason why the job's model cannot learn from a row.

    An empty reason means that the model can learn from the row.
    """
    family = model_family(job.model)
    has_template = bool(job.chat_template) or has_chat_template(job.model)

    def refusal(row: Example) -> str:
        if family == "encoder-decoder" and (row.messages or not row.asks):
            kind = "a row of messages" if row.messages else "plain text"
            causal = "with a chat template" if row.messages else "such as 'tiny-llama'"
            return (
                f"is {kind}, and the model answers a source: use a causal model {causal}, or rows "
                "with a source"
            )
        if row.messages and job.prompt not in (None, "chat"):
            return f"is a row of messages, and prompt is {job.prompt!r}; drop prompt, or use 'chat'"
        why = unlearned_turns(row) if job.loss_on == "all" else ""
        if why:
            return why
        if row.messages and has_template is False:
            return f"is a row of messages, and {no_template(job.model)}"
        return ""

    return refusal


def check_at_submit(job: FineTuneOptions, *, gpus: int) -> None:
    """Raise ConfigError for options that the model's folder or the pods do not support."""
    family = model_family(job.model)
    check_family(job, family)
    if family == "encoder-decoder":
        check_languages(job)
    _check_prompt(job, has_chat_template(job.model))
    check_adapters_at_submit(job)
    check_sequence_at_submit(job)
    check_tensor_at_submit(job)
    technique_of(job.technique).refuse_on_pods(job, gpus=gpus)
    missing = [gpu for gpu in job.max_memory if int(gpu) >= gpus]
    if gpus and missing:
        raise ConfigError(
            f"max_memory names GPU {missing[0]}, and a pod has {gpus}, numbered from 0; drop GPU "
            f"{missing[0]}"
        )
    if gpus:
        return
    if job.training.get("use_liger_kernel"):
        raise ConfigError(
            "training 'use_liger_kernel' needs GPUs: Liger's kernels are written in Triton. Drop "
            "it on CPUs, where the loss is computed in pieces anyway"
        )
    if job.attn_implementation == "flash_attention_2":
        raise ConfigError("attn_implementation 'flash_attention_2' needs GPUs; use 'sdpa' on CPUs")
    own = text(config_of(job.model).get("attn_implementation"))
    if own.startswith("flash_attention") and job.attn_implementation is None:
        raise ConfigError(
            f"config.json of {job.model!r} has attn_implementation {shortened(own)}, which needs "
            "GPUs. Give attn_implementation='sdpa' on CPUs"
        )
    adapters = config_of(str(job.lora.get("resume_from")), "adapter_config")
    if adapters.get("trainable_token_indices") and technique_of(job.technique).zero_stage == 3:
        raise ConfigError(
            "the adapters have trainable_token_indices, which need GPUs under ZeRO stage 3: peft "
            "gathers the embeddings on a GPU. Use technique 'zero2' on CPUs"
        )
    if job.precision == "tf32":
        raise ConfigError(
            "precision 'tf32' needs NVIDIA GPUs of the "
            "Ampere generation or later; use 'fp32' on CPUs"
        )
    if job.optimizer in BITSANDBYTES:
        raise ConfigError(f"optimizer '{job.optimizer}' needs GPUs; use 'adamw' on CPUs")


def _check_prompt(job: FineTuneOptions, has_template: bool | None) -> None:
    if job.chat_template is not None and job.prompt not in (None, "chat"):
        raise ConfigError(
            f"chat_template is for prompt 'chat', and prompt is {job.prompt!r}; drop prompt or "
            "chat_template"
        )
    lacks = job.chat_template is None and has_template is False
    if job.prompt == "chat" and lacks:
        raise ConfigError(f"prompt is 'chat', and {no_template(job.model)}")
    has_system = not lacks if job.prompt in (None, "chat") else job.prompt == "llama2-chat"
    if job.system is not None and not has_system:
        raise ConfigError(
            "system is the system turn of prompt 'chat', for a model with a chat template, or the "
            "system block of prompt 'llama2-chat'; choose 'chat' or 'llama2-chat', or drop system"
        )


def _check_technique(job: FineTuneOptions) -> None:
    # Options that only one technique reads.
    for owner in TECHNIQUES:
        if owner.options and getattr(job, owner.options) and owner.name != job.technique:
            raise ConfigError(
                f"{owner.options} has options, and the technique is '{job.technique}'; choose "
                f"'{owner.name}', or drop {owner.options}"
            )
    technique = technique_of(job.technique)
    technique.refuse(job)
    check_sequence(job, alone=technique.alone, apart=technique.apart)
    check_tensor(
        job,
        alone=technique.alone or technique.apart,
        shards="trained" in technique.spreads,
    )


def _check_policy(job: FineTuneOptions) -> None:
    if job.checkpoint_policy is None:
        return
    if not job.gradient_checkpointing:
        raise ConfigError(
            "checkpoint_policy chooses what recomputed layers keep. "
            "Give gradient_checkpointing=True too"
        )
    if "activation_checkpointing_kwargs" in job.training:
        raise ConfigError(
            "activation_checkpointing_kwargs are for transformers' own way of recomputing. Drop "
            "checkpoint_policy"
        )
    if job.torch_compile:
        raise ConfigError(
            "checkpoint_policy chooses single operations, and torch_compile fuses operations. "
            "Drop an option"
        )


def _check_device_map(job: FineTuneOptions) -> None:
    if job.max_memory and not job.device_map:
        raise ConfigError(
            "max_memory limits the weights that device_map puts on a GPU: give device_map='auto' "
            "too"
        )
    if job.device_map and job.torch_compile:
        raise ConfigError(
            "torch_compile with device_map is not offered: drop torch_compile or device_map"
        )


def _check_peft(job: FineTuneOptions) -> None:
    if job.lora and job.peft == "none":
        raise ConfigError(
            "lora has options, and peft is 'none'; choose 'lora' or 'qlora', or drop lora"
        )
    names = job.lora.get("target_modules")
    if isinstance(names, list | tuple) and not (names or job.lora.get("target_parameters")):
        raise ConfigError(
            "lora target_modules is empty, and target_parameters too: name modules, or leave "
            "target_modules out for every linear layer"
        )
    if job.peft == "qlora" and job.precision == "fp16":
        raise ConfigError(
            "peft 'qlora' computes in bf16 or fp32 here; fp16 overflows in many models, use 'bf16'"
        )


def _check_schedule(job: FineTuneOptions) -> None:
    if job.warmup_steps is not None and job.warmup_ratio is not None:
        raise ConfigError(
            f"warmup_steps is {job.warmup_steps} and warmup_ratio is {job.warmup_ratio}: both set "
            "the length of the warm-up; drop warmup_steps or warmup_ratio"
        )
    if job.lr_scheduler_type == "constant" and (job.warmup_steps or job.warmup_ratio):
        raise ConfigError(
            "lr_scheduler_type 'constant' is at its peak from the first "
            "step, and a warm-up is asked for; use 'constant_with_warmup'"
        )
    options = job.training.get("lr_scheduler_kwargs") or {}
    needs = _SCHEDULE_NEEDS.get(job.lr_scheduler_type, ())
    if needs and not (isinstance(options, Mapping) and any(name in options for name in needs)):
        raise ConfigError(
            f"lr_scheduler_type {job.lr_scheduler_type!r} needs {' or '.join(needs)}: "
            f"training={{'lr_scheduler_kwargs': {{{needs[0]!r}: …}}}}"
        )


def _check_optimizer(job: FineTuneOptions) -> None:
    optimizer = job.optimizer
    fields = type(job).model_fields
    adams = []
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if getattr(job, name) != fields[name].default:
            adams.append(name)
    if optimizer in ("sgd", "lion") and adams:
        instead = " or use optimizer_options," if optimizer == "lion" else ""
        raise ConfigError(
            f"{adams[0]} is AdamW's, and the optimizer is '{optimizer}'; drop {adams[0]},"
            f"{instead} or choose 'adamw'"
        )
    options = OPTIMIZER_OPTIONS.get(optimizer)
    if options is not None:
        options.from_dict(job.optimizer_options)
    elif job.optimizer_options:
        raise ConfigError(
            f"optimizer_options are for {' and '.join(OPTIMIZER_OPTIONS)}, and the optimizer is "
            f"'{optimizer}'; drop optimizer_options, or choose one of these optimizers"
        )
    if optimizer == "muon" and job.peft != "none":
        raise ConfigError(
            f"optimizer 'muon' orthogonalizes the update of a whole matrix, and peft '{job.peft}' "
            "trains two factors of the update; use 'adamw' or 'lion', or peft 'none'"
        )
    if optimizer == "muon" and job.tensor_parallel > 1:
        raise ConfigError(
            "optimizer 'muon' needs whole matrices, and tensor_parallel cuts the matrices; use "
            "'adamw' or 'lion', or drop tensor_parallel"
        )
