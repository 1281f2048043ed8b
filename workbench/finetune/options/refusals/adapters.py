"""Refusals of `peft` and `lora`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, get_object
from workbench.finetune.options.adapters import ALL_LINEAR, Lora
from workbench.finetune.options.model.models import config_of
from workbench.finetune.options.refusals.shared import has_experts

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_HEAD = "lm_head"
# Ends of the names of tied embeddings and output layers.
_TIED = (_HEAD, "embed_tokens", "shared", "wte", "embed_in", "embed_out", "word_embeddings")
# Mixtures whose experts are modules of their own, which bitsandbytes packs.
_PACKED = ("nllb-moe", "switch_transformers")
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the format


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


def check_tied(job: FineTuneOptions, config: Json, folder: Path) -> None:
    """Raise ConfigError for adapters of a weight that embeddings and output layer share."""
    is_tied = job.peft != "none" and config.get("tie_word_embeddings") is True
    if not is_tied or job.lora.get("resume_from") or not _lacks_head(folder):
        return
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


def _lacks_head(folder: Path) -> bool:
    """Whether the model's files are known, and hold no output layer of its own."""
    names = weight_names(folder)
    return bool(names) and not any(name.endswith(f"{_HEAD}.weight") for name in names)


def weight_names(folder: Path) -> frozenset[str]:
    """Return the names of the weights in a folder of safetensors; empty if unknown."""
    index = get_object(config_of(str(folder), "model.safetensors.index"), "weight_map")
    if index:
        return frozenset(index)
    try:
        with (folder / "model.safetensors").open("rb") as file:
            # https://huggingface.co/docs/safetensors: the size of the header, then the header.
            size = int.from_bytes(file.read(8), "little")
            if size > _LARGEST_HEADER:
                return frozenset()
            return frozenset(json.loads(file.read(size))) - {"__metadata__"}
    except (OSError, ValueError):
        return frozenset()
