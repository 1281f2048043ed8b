"""Check the TrainingArguments in `training`. Does not import transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, one_of
from workbench.finetune.options.changes import What
from workbench.finetune.options.renamed_options import ELSEWHERE, OTHERWISE

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

ALLOWED: Mapping[str, What | None] = {
    "activation_checkpointing_kwargs": None,
    "ddp_broadcast_buffers": None,
    "ddp_bucket_cap_mb": None,
    "ddp_find_unused_parameters": None,
    "ddp_static_graph": None,
    "full_determinism": None,
    "log_level": None,
    "log_level_replica": None,
    "lr_scheduler_kwargs": None,
    "neftune_noise_alpha": "loss",
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "torch_empty_cache_steps": None,
    "use_liger_kernel": None,
}
"""TrainingArguments passed on unchanged, with the fact of a run that the argument changes."""


def check_training(job: FineTuneOptions) -> None:
    """Raise ConfigError for TrainingArguments that are unknown, or reserved to the trainer."""
    for name in job.training:
        if name in type(job).model_fields:
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
        if name.startswith("torch_compile_") and not job.torch_compile:
            raise ConfigError(
                f"training {name!r} does nothing without torch_compile. Add torch_compile=True"
            )


def option_hint(name: str) -> str:
    """Return a hint for an unknown option; empty if no hint is known.

    Example:
        >>> option_hint("num_train_epochs"), option_hint("lr"), option_hint("neftune_noise_alpha")
        ('use epochs', 'use learning_rate', "give it as training={'neftune_noise_alpha': …}")
    """
    if name in ALLOWED:
        return f"give it as training={{{name!r}: …}}"
    return OTHERWISE.get(name) or ELSEWHERE.get(name, "")
