"""Checks of `sequence_parallel`: which models, options and numbers of ranks can share rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.json_values import items, whole
from workbench.finetune.options.choices import Attention
from workbench.finetune.options.models import TINY_LLAMA, Family, config_of, model_family

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_REST = "sequence_parallel shares a row among ranks"


def check_sequence(job: FineTuneOptions, *, alone: bool, apart: bool) -> None:
    """Raise ConfigError for options that exclude `sequence_parallel`."""
    if job.sequence_parallel == 1:
        return
    if alone or apart:
        raise ConfigError(
            f"{_REST}, and ranks of technique '{job.technique}' train alone; use 'ddp', 'zero1', "
            "'zero2', 'zero3' or 'fsdp'"
        )
    others = {
        "packing": job.packing,
        "torch_compile": job.torch_compile,
        "router_aux_loss_coef": bool(job.router_aux_loss_coef),
    }
    for name, is_set in others.items():
        if is_set:
            raise ConfigError(f"sequence_parallel works without {name}; drop {name}")
    if job.attn_implementation not in (None, Attention.SDPA, Attention.FLASH_ATTENTION_2):
        raise ConfigError(
            f"sequence_parallel needs attn_implementation 'sdpa' or 'flash_attention_2', not "
            f"{job.attn_implementation!r}"
        )
    if model_family(job.model) is Family.ENCODER_DECODER:
        raise ConfigError(
            f"sequence_parallel is for causal models, and {job.model!r} is an encoder-decoder "
            "model; drop sequence_parallel"
        )


def check_sequence_at_submit(job: FineTuneOptions) -> None:
    """Raise ConfigError if the model's folder shows that ranks cannot share its rows."""
    if job.sequence_parallel > 1 and job.model != TINY_LLAMA:
        config = config_of(job.model)
        if config:
            check_model(config, job.sequence_parallel)


def check_ranks(job: FineTuneOptions, ranks: int) -> None:
    """Raise ConfigError if the ranks do not form the groups of shared rows or shared weights."""
    for name in ("sequence_parallel", "tensor_parallel"):
        size = getattr(job, name)
        if ranks % size:
            raise ConfigError(
                f"{name} is {size}, and {ranks} ranks form no groups of {size}; use a "
                f"multiple of {size} ranks, or a {name} that divides {ranks}"
            )


def check_model(config: Mapping[str, object], size: int) -> None:
    """Raise ConfigError if `size` ranks cannot share rows of a model with a configuration."""
    heads = whole(config.get("num_attention_heads")) or 0
    kv_heads = whole(config.get("num_key_value_heads")) or heads
    for name, count in (("attention heads", heads), ("key and value heads", kv_heads)):
        if not count or count % size:
            raise ConfigError(
                f"sequence_parallel is {size}, and the model has {count} {name}; use a number "
                f"that divides {kv_heads or count}"
            )
    kinds = {str(kind) for kind in items(config.get("layer_types"))} - {"full_attention"}
    has_window = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds or (has_window and not config.get("layer_types")):
        raise ConfigError(
            "sequence_parallel works for full attention, and the model has layers of another kind "
            f"({', '.join(sorted(kinds)) or 'sliding_attention'}); drop sequence_parallel"
        )
    if config.get("num_local_experts") or config.get("num_experts"):
        raise ConfigError(
            "sequence_parallel does not support mixtures of experts: their load-balancing loss "
            "needs whole rows; drop sequence_parallel"
        )
