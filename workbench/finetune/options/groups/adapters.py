"""Checks of adapters against the configuration of their model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.files import user_path
from workbench.base.json_values import part
from workbench.finetune.options.adapters import ALL_LINEAR, Lora
from workbench.finetune.options.groups.shared import has_experts, known_config
from workbench.finetune.options.model.models import config_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_HEAD = "lm_head"
# Ends of the names of tied embeddings and output layers.
_TIED = (_HEAD, "embed_tokens", "shared", "wte", "embed_in", "embed_out", "word_embeddings")
# Mixtures whose experts are modules of their own, which bitsandbytes packs.
_PACKED = ("nllb-moe", "switch_transformers")
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the format


def check_adapters_at_submit(job: FineTuneOptions) -> None:
    """Raise ConfigError if the model's folder shows that the adapters cannot be made."""
    if job.peft == "none":
        return
    config = known_config(job)
    check_experts(job, config)
    ties = config.get("tie_word_embeddings") is True
    if ties and not job.lora.get("resume_from") and _lacks_head(job.model):
        _check_tied(job)


def check_experts(job: FineTuneOptions, config: Mapping[str, object]) -> None:
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


def _check_tied(job: FineTuneOptions) -> None:
    options = Lora.from_dict(job.lora)
    named = {"modules_to_save": options.modules_to_save}
    if options.target_modules != ALL_LINEAR:
        named["target_modules"] = options.target_modules
    for option, names in named.items():
        for name in names:
            if name.rpartition(".")[2] in _TIED:
                raise ConfigError(
                    f"lora {option} names {name!r}, and config.json of {job.model!r} ties the "
                    "embeddings and the output layer (tie_word_embeddings): both are one weight. "
                    "Drop the name, or train all weights with peft='none'"
                )


def _lacks_head(model: str) -> bool:
    """Whether the model's files are known, and hold no output layer of its own."""
    names = weight_names(model)
    return bool(names) and not any(name.endswith(f"{_HEAD}.weight") for name in names)


def weight_names(model: str) -> frozenset[str]:
    """Return the names of the weights in a folder of safetensors; empty if unknown."""
    index = part(config_of(model, "model.safetensors.index"), "weight_map")
    if index:
        return frozenset(index)
    try:
        with (user_path(model) / "model.safetensors").open("rb") as file:
            # https://huggingface.co/docs/safetensors: the size of the header, then the header.
            size = int.from_bytes(file.read(8), "little")
            if size > _LARGEST_HEADER:
                return frozenset()
            return frozenset(json.loads(file.read(size))) - {"__metadata__"}
    except (OSError, ValueError):
        return frozenset()
