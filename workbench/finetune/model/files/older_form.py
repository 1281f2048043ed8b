"""Save configurations and tokenizers so that programs with transformers 4 read them too.

transformers 5 writes keys that transformers 4 passes over without a word: an exported Llama then
has other rotary frequencies. TGI, and installations of vLLM, use transformers 4. The files that are
saved here hold the keys of both versions. Both versions read the same model and the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError

CONFIG = "config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
# This class takes tokenizer.json as it is. Other classes of transformers 4 build parts of the
# tokenizer anew: a Llama tokenizer would put a start token before texts that were learned without.
_PLAIN_CLASS = "PreTrainedTokenizerFast"
# Keys of the angle and of the rotated share, where a kind of model does not use the usual names.
_ROTARY = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_OWN_NAMES = {"gpt_neox": _ROTARY, "gpt_neox_japanese": _ROTARY}
_EXPERTS = {"qwen3_moe": "num_experts"}
# Keys of the angles, for kinds of models with an angle per type of layer.
_GEMMA3 = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
_MODERNBERT = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
_BY_LAYER = {
    "gemma3_text": _GEMMA3,
    "gemma3n_text": _GEMMA3,
    "modernbert": _MODERNBERT,
    "modernbert-decoder": _MODERNBERT,
    "olmo3": {"full_attention": "rope_theta"},
}
# Names of the types of layers, for a kind of model that refuses the names of transformers 5.
_LAYER_TYPES = {
    "granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"},
}
# Kinds of models that refuse a scaling with other keys than these.
_TWO = ("type", "factor")
_THREE = ("type", "short_factor", "long_factor")
_SCALING_KEYS = {
    "chameleon": _TWO,
    "fuyu": _TWO,
    "olmo": _TWO,
    "olmo2": _TWO,
    "phi3": _THREE,
    "phi4_multimodal": _THREE,
}


def save_config(config: Any, folder: Path) -> None:
    """Save a model's configuration for both versions."""
    config.save_pretrained(folder)
    add_older_keys(folder)


def set_ties(config: Any, model: Any) -> None:
    """State in a configuration that the output layer has a weight of its own, if it has one.

    transformers 4 and vLLM believe the configuration, and would drop the weight. T5's key also
    scales the output, and stays as it is.
    """
    head = model.get_output_embeddings()
    if head is None or hasattr(config, "scale_decoder_outputs"):
        return
    if head.weight is model.get_input_embeddings().weight:
        return
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False


def check_one_table(model: Any) -> None:
    """Raise ConfigError for embeddings apart in a kind of model that shares a table.

    transformers 4 reads a single table for encoder and decoder, and drops the others.
    """
    shared = getattr(model.base_model, "shared", None)
    if shared is None:
        return
    for name, part in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        if part.get_input_embeddings().weight is not shared.weight:
            raise ConfigError(
                f"the {name}'s embeddings differ from the shared embeddings, and transformers 4 "
                "reads a single table: the exported model would be another model there. Use the "
                "run's own folder, out/model, with transformers 5"
            )


def add_older_keys(folder: Path) -> None:
    """Add the keys of transformers 4 to a saved configuration."""
    path = folder / CONFIG
    _write(path, _with_older_keys(_read(path)))


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer for both versions."""
    tokenizer.save_pretrained(folder)
    path = folder / _TOKENIZER_CONFIG
    config = _read(path)
    # The own class sets the language of a translation, and fills the gap of a Code Llama.
    has_own_ways = hasattr(tokenizer, "src_lang") or hasattr(tokenizer, "fill_token")
    if (folder / "tokenizer.json").is_file() and not has_own_ways:
        config["tokenizer_class"] = _PLAIN_CLASS
    # The defaults of these options differ between classes and between versions.
    config["model_input_names"] = list(tokenizer.model_input_names)
    config["padding_side"] = tokenizer.padding_side
    config["clean_up_tokenization_spaces"] = bool(tokenizer.clean_up_tokenization_spaces)
    extra = config.pop("extra_special_tokens", None)
    if extra:
        config["additional_special_tokens"] = extra
    template = _template(folder)
    if template:
        config["chat_template"] = template
    _write(path, config)


def _with_older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys of transformers 4, also for the models inside."""
    both = {}
    for key, value in config.items():
        both[key] = _with_older_keys(value) if isinstance(value, dict) else value
    if "time_step_limit" in config:
        both["time_step_limit"] = [_number(limit) for limit in config["time_step_limit"]]
    kind = str(config.get("model_type", ""))
    if "dtype" in config:
        both["torch_dtype"] = config["dtype"]
    # transformers 5 writes for every T5 that its weights are tied. In transformers 4 the key also
    # scales the output, which is not so for T5 1.1 and mT5.
    if config.get("scale_decoder_outputs") is False or kind == "mt5":
        both["tie_word_embeddings"] = False
    if kind in _LAYER_TYPES:
        names = _LAYER_TYPES[kind]
        both["layer_types"] = [names.get(layer, layer) for layer in config["layer_types"]]
    if kind in _EXPERTS:
        both[_EXPERTS[kind]] = config["num_local_experts"]
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and kind in _BY_LAYER:
        both |= _keys_by_layer(kind, rope)
    elif isinstance(rope, dict) and "rope_theta" in rope:
        both |= _rope_keys(kind, rope)
    return both


def _rope_keys(kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding of a model in the keys of transformers 4."""
    keys = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            keys[_OWN_NAMES.get(kind, {}).get(name, name)] = rope[name]
    return {**keys, "rope_scaling": _scaling(kind, rope)}


def _keys_by_layer(kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embeddings per type of layer in the keys of transformers 4.

    A scaling is that of the layers with full attention.
    """
    keys = {key: rope[layer]["rope_theta"] for layer, key in _BY_LAYER[kind].items()}
    return {**keys, "rope_scaling": _scaling(kind, rope["full_attention"])}


def _scaling(kind: str, rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of a rotary embedding. None: the embedding is not scaled."""
    if rope.get("rope_type", "default") == "default":
        return None
    if kind in _SCALING_KEYS:
        whole = {"type": rope["rope_type"], **rope}
        return {key: whole[key] for key in _SCALING_KEYS[kind]}
    return {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}


def _number(value: float | Mapping[str, str]) -> float:
    """Return a number that transformers 5 may have written as `{"__float__": "Infinity"}`."""
    return float(value["__float__"]) if isinstance(value, Mapping) else value


def _template(folder: Path) -> str | list[dict[str, str]]:
    """Return the chat template that was saved, or the templates by name. Empty: there is none."""
    file = folder / _TEMPLATE
    own = file.read_text(encoding="utf-8") if file.is_file() else ""
    more = sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))
    if not more:
        return own
    named = [{"name": "default", "template": own}] if own else []
    for path in more:
        named.append({"name": path.stem, "template": path.read_text(encoding="utf-8")})
    return named


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)  # transformers has just written the file
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
