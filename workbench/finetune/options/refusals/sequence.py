"""Refusals of `sequence_parallel`: models, options and numbers of ranks that cannot share rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, as_list
from workbench.finetune.options.model.models import language_of
from workbench.finetune.options.refusals.shared import (
    check_heads,
    check_others,
    has_experts,
)

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions


def check_sequence(job: FineTuneOptions) -> None:
    """Raise ConfigError for options that exclude `sequence_parallel`."""
    if job.sequence_parallel == 1:
        return
    others = {
        "packing": job.packing,
        "tokens_per_micro_batch": job.tokens_per_micro_batch is not None,
        "torch_compile": job.torch_compile,
        "router_aux_loss_coef": bool(job.router_aux_loss_coef),
    }
    check_others("sequence_parallel", others)
    if job.attn_implementation not in (None, "sdpa", "flash_attention_2"):
        raise ConfigError(
            f"sequence_parallel needs attn_implementation 'sdpa' or 'flash_attention_2', not "
            f"{job.attn_implementation!r}"
        )


def check_ranks(job: FineTuneOptions, ranks: int) -> None:
    """Raise ConfigError if the ranks do not form the groups of shared rows or shared weights."""
    for name in ("sequence_parallel", "tensor_parallel"):
        size = getattr(job, name)
        if ranks % size:
            raise ConfigError(
                f"{name} is {size}, and {ranks} ranks form no groups of {size}; use a "
                f"multiple of {size} ranks, or a {name} that divides {ranks}"
            )


def check_sequence_model(job: FineTuneOptions, config: Json) -> None:
    """Raise ConfigError if ranks cannot share rows of a model with a configuration."""
    size = job.sequence_parallel
    if size == 1:
        return
    config = language_of(config)
    check_heads("sequence_parallel", config, size)
    kinds = {str(kind) for kind in as_list(config.get("layer_types"))} - {"full_attention"}
    has_window = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds or (has_window and not config.get("layer_types")):
        raise ConfigError(
            "sequence_parallel works for full attention, and the model has layers of another kind "
            f"({', '.join(sorted(kinds)) or 'sliding_attention'}); drop sequence_parallel"
        )
    if has_experts(config):
        raise ConfigError(
            "sequence_parallel does not support mixtures of experts: their load-balancing loss "
            "needs whole rows; drop sequence_parallel"
        )
