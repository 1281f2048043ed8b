"""Check the TrainingArguments in `training`. Does not import transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from workbench.base.errors import ConfigError, one_of
from workbench.finetune.options.renamed_options import ELSEWHERE, OTHERWISE

ALLOWED = frozenset(
    (
        "activation_checkpointing_kwargs",
        "ddp_broadcast_buffers",
        "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "full_determinism",
        "log_level",
        "log_level_replica",
        "lr_scheduler_kwargs",
        "neftune_noise_alpha",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_empty_cache_steps",
        "use_liger_kernel",
    )
)
"""TrainingArguments passed on unchanged."""


def check_training(given: Mapping[str, object], fields: Collection[str]) -> None:
    """Raise ConfigError for unknown TrainingArguments, and for arguments reserved to the trainer.

    `fields` are the options of the job.

    Example:
        >>> check_training({"bf16": True}, ())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        workbench.base.errors.ConfigError: training 'bf16' is not ...: use precision='bf16'
    """
    for name in given:
        if name in fields:
            raise ConfigError(
                f"training {name!r} is an option of the job itself: give {name}=… beside `training`"
            )
        if name in OTHERWISE:
            raise ConfigError(f"training {name!r} is not for a job to set: {OTHERWISE[name]}")
        if name in ELSEWHERE:
            raise ConfigError(
                f"training {name!r} is no argument of transformers: {ELSEWHERE[name]}"
            )
        if name not in ALLOWED:
            raise one_of("training argument", name, sorted(ALLOWED))


def option_hint(name: str) -> str:
    """Return a hint for an unknown option; empty if no hint is known.

    Example:
        >>> option_hint("num_train_epochs"), option_hint("lr"), option_hint("neftune_noise_alpha")
        ('use epochs', 'use learning_rate', "give it as training={'neftune_noise_alpha': …}")
    """
    if name in ALLOWED:
        return f"give it as training={{{name!r}: …}}"
    return OTHERWISE.get(name) or ELSEWHERE.get(name, "")
