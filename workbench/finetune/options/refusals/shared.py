"""Checks that shared rows and shared weights have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.json_values import as_int, get_object
from workbench.finetune.options.model.models import Family

# Numbers of experts in the configurations of transformers.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions


def check_others(option: str, others: Mapping[str, bool]) -> None:
    """Raise ConfigError for a set option that excludes `option`."""
    for name, is_set in others.items():
        if is_set:
            raise ConfigError(f"{option} works without {name}; drop {name}")


def check_causal(job: FineTuneOptions, family: Family) -> None:
    """Raise ConfigError for an encoder-decoder model whose rows or weights ranks would share."""
    for option in ("sequence_parallel", "tensor_parallel"):
        if getattr(job, option) > 1 and family == "encoder-decoder":
            raise ConfigError(
                f"{option} is for causal models, and {job.model!r} is an encoder-decoder "
                f"model; drop {option}"
            )


def check_heads(
    option: str, config: Mapping[str, object], size: int, *, may_lack: bool = False
) -> None:
    """Raise ConfigError if `size` does not divide the model's heads, or the model names none."""
    heads = as_int(config.get("num_attention_heads")) or 0
    kv_heads = as_int(config.get("num_key_value_heads")) or heads
    for name, count in (("attention heads", heads), ("key and value heads", kv_heads)):
        if count % size or not (count or may_lack):
            raise ConfigError(
                f"{option} is {size}, and the model has {count} {name}; use a number that "
                f"divides {kv_heads or count}"
            )


def has_experts(config: Mapping[str, object]) -> bool:
    """Return whether the model is a mixture of experts."""
    # DBRX has the numbers of its experts in a part of its own.
    parts = (config, get_object(config, "text_config"), get_object(config, "ffn_config"))
    return any((as_int(each.get(key)) or 0) > 1 for each in parts for key in _EXPERTS)
