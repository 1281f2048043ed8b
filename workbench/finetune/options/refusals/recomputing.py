"""Refusals of `checkpoint_layers` and `checkpoint_policy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions


def check_layers(job: FineTuneOptions) -> None:
    """Raise ConfigError for `checkpoint_layers` that have no effect or cannot work."""
    if not job.checkpoint_layers:
        return
    if not job.gradient_checkpointing:
        raise ConfigError(
            "checkpoint_layers says which layers are "
            "recomputed: give gradient_checkpointing=True too"
        )
    if "activation_checkpointing_kwargs" in job.training:
        raise ConfigError(
            "activation_checkpointing_kwargs are for "
            "transformers' own layers: drop checkpoint_layers"
        )


def check_policy(job: FineTuneOptions) -> None:
    """Raise ConfigError for a `checkpoint_policy` that has no effect or cannot work."""
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
