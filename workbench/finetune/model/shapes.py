"""Shape of a job's model: its config.json, found without a download and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import user_path
from workbench.finetune.job.given_files import read_object
from workbench.finetune.options.model.limits import too_many_parts
from workbench.finetune.options.model.models import (
    TINY_LLAMA,
    TINY_T5,
    cached_folder,
    model_kind,
)


def _t5(width: int, inner: int, heads: int, layers: int, head: int = 64) -> Mapping[str, object]:
    return {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": width,
        "d_kv": head,
        "d_ff": inner,
        "num_heads": heads,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "decoder_start_token_id": 0,
    }


def _llama(
    width: int,
    inner: int,
    heads: int,
    layers: int,
    kv_heads: int | None = None,
) -> Mapping[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "float16",
    }


KNOWN: Mapping[str, Mapping[str, object]] = {
    # https://arxiv.org/abs/1910.10683, section 3.7, and the config.json of every model.
    "t5-small": _t5(512, 2048, 8, 6),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 16, 24),
    "t5-3b": _t5(1024, 16384, 32, 24, head=128),
    # https://arxiv.org/abs/2302.13971, table 2; Llama 2 has twice the context.
    "llama-2-7b": _llama(4096, 11008, 32, 32),
    "llama-2-13b": _llama(5120, 13824, 40, 40),
    # https://arxiv.org/abs/2307.09288, table 1
    "llama-2-70b": _llama(8192, 28672, 64, 80, kv_heads=8),
    # Built-in models, with the vocabulary that their tokenizers learn from the bundled questions.
    TINY_T5: {
        **_t5(128, 256, 8, 2, head=16),
        "vocab_size": 4096,
        "feed_forward_proj": "gated-gelu",
        # Without dropout, runs with other numbers of ranks follow the same curve.
        "dropout_rate": 0.0,
    },
    # The inner size is 8/3 of the hidden size, rounded up to a multiple of 32, as Llama's are.
    TINY_LLAMA: {
        **_llama(128, 352, 8, 2),
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "dtype": "float32",
    },
}


def model_config(model: str, revision: str | None = None) -> Mapping[str, object]:
    """Return the shape of the model that a job names.

    Example:
        >>> model_config("google-t5/t5-large")["num_layers"]
        24
        >>> model_config("meta-llama/Llama-2-7b-hf")["hidden_size"]
        4096
    """
    kind = model_kind(model)
    if kind == "folder":
        return _read(user_path(model) / "config.json")
    short = model.rpartition("/")[2].lower()
    for ending in ("-hf", "-chat"):
        short = short.removesuffix(ending)
    if short in KNOWN and (kind == "builtin" or model == short or "/" in model):
        return KNOWN[short]
    cached = cached_folder(model, revision)
    if cached:
        return _read(cached / "config.json")
    raise ConfigError(
        f"the planner does not know the shape of {model!r}: it is in no local cache "
        "of the hub; load its configuration once (AutoConfig.from_pretrained), "
        f"give a folder with its config.json, or plan one of {', '.join(KNOWN)}"
    )


def _read(path: Path) -> Mapping[str, object]:
    config = read_object(path)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path} names no model_type; give a folder made by save_pretrained")
    too_large = too_many_parts(config)
    if too_large:
        raise ConfigError(f"{path} has {too_large}; take the file from the model's author")
    return dict(config)
