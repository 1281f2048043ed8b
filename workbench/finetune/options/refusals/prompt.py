"""Refusals of options that write rows: `prompt`, `chat_template`, `system` and `packing`."""

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


def check_packing(job: FineTuneOptions) -> None:
    """Raise ConfigError for packed rows that an attention would mix."""
    if (
        job.packing
        and job.attn_implementation in ("flash_attention_2", "flash_attention_3")
        and job.per_device_train_batch_size > 1
    ):
        raise ConfigError(
            f"packing with attn_implementation '{job.attn_implementation}' keeps texts "
            "apart in one row alone, and per_device_train_batch_size is "
            f"{job.per_device_train_batch_size}; use 1 with longer rows, or 'sdpa'"
        )
