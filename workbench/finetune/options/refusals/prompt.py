"""Refusals of options that write rows: `prompt`, `system` and `tokens_per_micro_batch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions


def check_prompt(job: FineTuneOptions, has_template: bool | None = None) -> None:
    """Raise ConfigError for a template or a system turn that the prompt lacks."""
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


def no_template(model: str) -> str:
    """Return the message for a model without a chat template."""
    return (
        f"the model {model!r} has no chat template; set chat_template, or use a model with a "
        "chat template"
    )


def check_tokens(job: FineTuneOptions) -> None:
    """Raise ConfigError for a number of tokens of a micro-batch beside other limits of a batch."""
    tokens = job.tokens_per_micro_batch
    if tokens is None:
        return
    if job.packing:
        raise ConfigError(
            "tokens_per_micro_batch packs rows already, to another length than packing; drop "
            "packing"
        )
    if job.per_device_train_batch_size > 1:
        raise ConfigError(
            "tokens_per_micro_batch decides the rows of a micro-batch, and "
            f"per_device_train_batch_size is {job.per_device_train_batch_size}; leave "
            "per_device_train_batch_size out"
        )
    longest = (job.max_source_length or 0) + (job.max_target_length or 0)
    if longest > tokens:
        raise ConfigError(
            f"tokens_per_micro_batch is {tokens}, and a row may have {longest} tokens by "
            f"max_source_length and max_target_length; use {longest} or more"
        )
