"""Folders of models without libraries: configuration, tokenizer, and weights of a few bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WORDS = 40
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": WORDS + len(SPECIAL),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def write(folder: Path, **files: object) -> None:
    """Write JSON files; `__` in a name stands for a dot, and None removes the file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if content is None:
            path.unlink()
        else:
            path.write_text(json.dumps(content), encoding="utf-8")


def change(path: Path, **values: object) -> None:
    """Set keys of a JSON file; `...` removes the key."""
    data = {**json.loads(path.read_text()), **values}
    data = {key: value for key, value in data.items() if value is not ...}
    path.write_text(json.dumps(data))


def tokenizer(extra: Mapping[str, int] | None = None) -> dict[str, object]:
    """Return a tokenizer.json with a word per id, special tokens at the end, and `extra`."""
    words = {f"w{number}": number for number in range(WORDS)}
    ids = {
        **{token: WORDS + place for place, token in enumerate(SPECIAL.values())},
        **(extra or {}),
    }
    added = [{"id": number, "content": token, "special": True} for token, number in ids.items()]
    return {
        "version": "1.0",
        "added_tokens": [
            {**each, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for each in added
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {**words, **ids}, "unk_token": "w0"},
    }


def weights(
    path: Path,
    names: Iterable[str] = ("model.embed_tokens.weight",),
    *,
    dtype: str = "F32",
    shape: Iterable[int] = (1,),
) -> None:
    """Write a file of safetensors with four bytes per tensor of any format and shape."""
    shaped(path, {name: [*shape] for name in names}, dtype=dtype)


def shaped(
    path: Path,
    shapes: Mapping[str, Iterable[int]],
    *,
    dtype: str = "F32",
    masks: Iterable[str] = (),
) -> None:
    """Write a file of safetensors with four bytes per tensor, by the tensors' shapes."""
    header = {}
    for place, (name, shape) in enumerate(shapes.items()):
        offsets = [4 * place, 4 * place + 4]
        kind = "U8" if name in masks else dtype
        header[name] = {"dtype": kind, "shape": [*shape], "data_offsets": offsets}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(header)))


def llama_shapes() -> dict[str, list[int]]:
    """Return the shapes of all weights of `LLAMA`, by name."""
    words, hidden, inner = LLAMA["vocab_size"], LLAMA["hidden_size"], LLAMA["intermediate_size"]
    layer = {
        **{f"self_attn.{name}_proj": [hidden, hidden] for name in "qkvo"},
        **{f"mlp.{name}_proj": [inner, hidden] for name in ("gate", "up")},
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    return {
        "model.embed_tokens.weight": [words, hidden],
        **{f"model.layers.0.{name}.weight": shape for name, shape in layer.items()},
        "model.norm.weight": [hidden],
        "lm_head.weight": [words, hidden],
    }


def model(folder: Path, **config: object) -> Path:
    """Write a folder that is accepted, with changes of its configuration."""
    write(
        folder,
        config__json={**LLAMA, **config},
        tokenizer__json=tokenizer(),
        tokenizer_config__json={"tokenizer_class": "TokenizersBackend", **SPECIAL},
        generation_config__json={"eos_token_id": WORDS + 1},
    )
    # Files of torch have no header to compare with another configuration.
    if config.keys() & {"model_type", *LLAMA}:
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x02" + bytes(9))
    else:
        shapes = llama_shapes()
        if config.get("tie_word_embeddings"):
            del shapes["lm_head.weight"]
        shaped(folder / "model.safetensors", shapes)
    return folder
