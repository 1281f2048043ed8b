"""Refuse models without a class in transformers, and weights that are quantized already.

The names of the classes are read from the source of the installed transformers, which is not
imported. Without transformers on this machine, the ranks find out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, shortened
from workbench.base.files import read_given
from workbench.base.json_values import Json, part, text
from workbench.finetune.job.weights import QUANTIZED
from workbench.finetune.methods.registry import method_of
from workbench.finetune.techniques.registry import technique_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_CONFIGS = "CONFIG_MAPPING_NAMES"
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_PAIRS = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
_SCORES = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
_TOKENIZERS = "TOKENIZER_MAPPING_NAMES"
# Types whose files name a wrong class.
_GENERAL_TOKENIZERS = "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"
_FILES = ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py", "tokenization_auto.py")
NEVER_RUN = "code that comes with a model is never run"
_BEFORE = "give the model before its quantization"
# transformers computes their tables of positions from whole weights, while it makes the model.
_COMPUTED_TABLES = ("marian", "pegasus", "roformer")
# The class for text saves a configuration of its own, which no class for text reads again.
_NEVER_READ_AGAIN = ("emu3", "mllama", "musicgen", "musicgen_melody")
# Classes of transformers that read weights of a method as whole numbers.
_WHOLE = {
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True)",
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
}


def check_architecture(job: FineTuneOptions, config: Json, source: str) -> None:
    """Raise ConfigError for a model that only its own code can load, or no class for text."""
    kind = text(config.get("model_type"))
    own = part(config, "auto_map")
    if not kind:
        if own:
            raise ConfigError(
                f"{source} names own code of the model in 'auto_map' and no 'model_type', and "
                f"{NEVER_RUN}. Give a model of transformers"
            )
        raise ConfigError(
            f"{source} has no 'model_type'. Take the file from the model's author, or give a "
            "folder made by save_pretrained"
        )
    names = _mappings()
    configs = names.get(_CONFIGS, {})
    if not configs:
        return
    if kind not in configs:
        why = f"names own code of the model in 'auto_map', and {NEVER_RUN}" if own else ""
        raise ConfigError(
            f"{source} has model_type {shortened(kind)}, which the transformers of this machine "
            f"does not have{f'; the file {why}' if why else ''}. Give a model of transformers. If "
            "a newer transformers has the type, install that version here and on the pods"
        )
    if kind in _COMPUTED_TABLES and technique_of(job.technique).zero_stage == 3:
        raise ConfigError(
            f"{source} has model_type {kind}, whose table of positions transformers computes from "
            f"whole weights, and technique '{job.technique}' cuts the weights up before. Use "
            "technique 'fsdp' or 'zero2'"
        )
    scores = method_of(job.method).scores
    if kind in _NEVER_READ_AGAIN and not scores:
        raise ConfigError(
            f"{source} has model_type {kind}, whose language model transformers trains and saves "
            "alone, in a folder that transformers cannot load. Give a language model or use a "
            "Script"
        )
    what = "scores texts" if scores else "learns to answer"
    wanted = (_SCORES,) if scores else (_CAUSAL, _PAIRS)
    # Several types may share a configuration class.
    fitting = {configs.get(name) for mapping in wanted for name in names.get(mapping, {})}
    if fitting and configs[kind] not in fitting:
        language = text(part(config, "text_config").get("model_type"))
        inner = f", as its part {shortened(language)} alone," if language else ""
        raise ConfigError(
            f"{source} has model_type {shortened(kind)}, of which transformers has no class that "
            f"{what}. Give a language model{inner} or use a Script"
        )


def tokenizer_class(config: Json) -> str:
    """Return the class of tokenizers that transformers has for a type of models; empty without."""
    names = _mappings()
    kind = text(config.get("model_type"))
    general = dict.fromkeys(names.get(_GENERAL_TOKENIZERS, ()), "TokenizersBackend")
    return {**general, **names.get(_TOKENIZERS, {})}.get(kind, "")


def tokenizer_classes() -> set[str]:
    """Return the classes of tokenizers of the installed transformers; empty without it."""
    return set(_mappings().get(_TOKENIZERS, {}).values())


def check_not_quantized(job: FineTuneOptions, config: Json, source: str) -> None:
    """Raise ConfigError for weights that are quantized already, unless `qlora` trains on them."""
    for key in QUANTIZED:
        settings = part(config, key) or part(part(config, "text_config"), key)
        if not settings:
            continue
        method = text(settings.get("quant_method"))
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
def _mappings() -> Mapping[str, Mapping[str, str]]:
    """Return the classes of the installed transformers by mapping and type; empty without it."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    names: dict[str, dict[str, str]] = {}
    folder = Path(found.origin).with_name("models") / "auto"
    for file in _FILES:
        try:
            tree = ast.parse(read_given(folder / file))
        except (OSError, SyntaxError, ValueError):
            return {}
        for node in tree.body:
            for name, value in _mapping_in(node):
                names.setdefault(name, {}).update(_pairs_in(value))
    return names


def _mapping_in(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Yield the name of a mapping and its value, for a definition and for an update."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.AST() as value):
            yield name, value
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update")) as call
        ):
            yield name, call


def _pairs_in(value: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the pairs of texts in a mapping, however the mapping is written."""
    for node in ast.walk(value):
        match node:
            case ast.Dict(keys=keys, values=values):
                for key, each in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield key.value, _first_name(each)
            case ast.Tuple(elts=[ast.Constant(value=str(key)), each]):
                yield key, _first_name(each)
            case ast.Set(elts=keys):
                for key in keys:
                    yield _first_name(key), ""


def _first_name(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(name)) | ast.IfExp(body=ast.Constant(value=str(name))):
            return name
    return ""
