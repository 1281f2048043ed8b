"""Refusals of `peft` and `lora`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json
from workbench.finetune.options.refusals.shared import has_experts

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

# Mixtures whose experts are modules of their own, which bitsandbytes packs.
_PACKED = ("nllb-moe", "switch_transformers")


def check_peft(job: FineTuneOptions) -> None:
    """Raise ConfigError for options of adapters that have no effect or cannot work."""
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


def check_experts(job: FineTuneOptions, config: Json) -> None:
    """Raise ConfigError for a mixture of experts in 4 bits."""
    if job.peft == "qlora" and config.get("model_type") not in _PACKED and has_experts(config):
        raise ConfigError(unpacked(job.model))


def unpacked(model: str) -> str:
    """Return the message for a model whose experts stay out of the packing in 4 bits."""
    return (
        f"peft 'qlora' packs the weights of linear layers, and the stacked experts of {model!r}, "
        "most of its weights, would stay in the arithmetic's format. Use peft='lora' with "
        "precision='bf16', under technique 'fsdp' or 'zero3' for models larger than a GPU"
    )
