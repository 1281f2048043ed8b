"""Refuse models that only their own code can load, and weights that are quantized already.

The names of tokenizers are read from the source of the installed transformers, which is not
imported. Without transformers on this machine, the ranks find out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, shortened
from workbench.base.files import read_given
from workbench.base.json_values import Json, as_str
from workbench.finetune.job.weights import quantizations
from workbench.finetune.methods.registry import method_of
from workbench.finetune.techniques.registry import technique_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_PAIR = re.compile(r'\(\s*"([\w-]+)",\s*"(\w+)"')
_NAME = re.compile(r'"([\w-]+)"')
NEVER_RUN = "code that comes with a model is never run"
_BEFORE = "give the model before its quantization"
# transformers computes their tables of positions from whole weights, while it makes the model.
_COMPUTED_TABLES = ("marian", "pegasus", "roformer")
# The class for text saves a configuration of its own, which no class for text reads again.
_NEVER_READ_AGAIN = ("emu3", "mllama", "musicgen", "musicgen_melody")
# The configurations of other encoder-decoders have a default; the languages choose it for mBART.
WITHOUT_START = ("encoder-decoder", "longt5", "switch_transformers", "t5", "t5gemma", "t5gemma2")
"""Types of models whose files must name the token with which an answer begins."""
# Classes of transformers that read weights of a method as whole numbers.
_WHOLE = {
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True)",
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
}


def check_architecture(job: FineTuneOptions, config: Json, source: str) -> None:
    """Raise ConfigError for a model without a type, or a type that cannot train here."""
    kind = as_str(config.get("model_type"))
    if not kind:
        why = ""
        if config.get("auto_map"):
            why = f", and names own code of the model in 'auto_map': {NEVER_RUN}"
        raise ConfigError(
            f"{source} has no 'model_type'{why}. Take the file from the model's author, or give a "
            "folder made by save_pretrained"
        )
    if kind in _COMPUTED_TABLES and technique_of(job.technique).zero_stage == 3:
        raise ConfigError(
            f"{source} has model_type {kind}, whose table of positions transformers computes from "
            f"whole weights, and technique '{job.technique}' cuts the weights up before. Use "
            "technique 'fsdp' or 'zero2'"
        )
    if kind in _NEVER_READ_AGAIN and not method_of(job.method).scores:
        raise ConfigError(
            f"{source} has model_type {kind}, whose language model transformers trains and saves "
            "alone, in a folder that transformers cannot load. Give a language model or use a "
            "Script"
        )


def check_not_quantized(job: FineTuneOptions, config: Json, source: str) -> None:
    """Raise ConfigError for weights that are quantized already, unless `qlora` trains on them."""
    for key, settings in quantizations(config):
        method = as_str(settings.get("quant_method"))
        four = settings.get("load_in_4bit") or settings.get("_load_in_4bit")
        eight = settings.get("load_in_8bit") or settings.get("_load_in_8bit")
        if method == "bitsandbytes" or (not method and (four or eight)):
            _check_bitsandbytes(job, source, key, four=bool(four))
            continue
        remedy = _BEFORE
        if method in _WHOLE:
            remedy += (
                f", or load the model with quantization_config={_WHOLE[method]} and give a folder "
                "made by save_pretrained"
            )
        raise ConfigError(
            f"{source} has {key} with quant_method {shortened(method or 'unknown')}: the weights "
            f"are quantized already and cannot be trained. To train, {remedy}"
        )


def _check_bitsandbytes(job: FineTuneOptions, source: str, key: str, *, four: bool) -> None:
    bits = 4 if four else 8
    found = (
        f"{source} has {key} with quant_method 'bitsandbytes': the weights have {bits} bits already"
    )
    if not four:
        raise ConfigError(f"{found} and cannot be trained. To train, {_BEFORE}")
    if job.peft != "qlora":
        raise ConfigError(
            f"{found}, and peft is '{job.peft}'. Use peft='qlora', which trains adapters on "
            f"weights of 4 bits, or {_BEFORE}"
        )


@lru_cache(maxsize=1)
def tokenizers_by_type() -> Mapping[str, str]:
    """Return the class of tokenizers by the type of models; empty without transformers."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).with_name("models") / "auto"
    try:
        source = read_given(folder / "tokenization_auto.py")
    except (OSError, ValueError):
        return {}
    before, _, after = source.partition("MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS: set[str] = {")
    # Types whose files name a wrong class.
    general = dict.fromkeys(_NAME.findall(after.partition("}")[0]), "TokenizersBackend")
    return {**general, **dict(_PAIR.findall(before))}
