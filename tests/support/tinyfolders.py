"""Model folders of a few thousand weights, and folders whose files and configuration disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.finetune.data.wikisql.mini import mini_rows

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def tokenizer() -> Any:
    from workbench.finetune.model.tiny import tokenizer_for_all

    return tokenizer_for_all("tiny-llama", list(mini_rows(0, 40)))


def llama(folder: Path, *, tie: bool = False, **config: object) -> Path:
    """Save a Llama whose losses depend on every weight."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return save(folder, LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": tie, **config})


def save(folder: Path, kind: Any, config: Any, options: dict[str, object]) -> Path:
    import torch

    words = tokenizer()
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    torch.manual_seed(0)
    model = kind(config(**{"vocab_size": len(words), **SIZES, **ids, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def change_weights(folder: Path, change: Any) -> Path:
    """Rewrite the one file of weights by a function of its tensors."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


def change_config(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def without_head(folder: Path) -> Path:
    return change_weights(
        llama(folder), lambda state: {n: v for n, v in state.items() if n != "lm_head.weight"}
    )


def with_foreign_names(folder: Path) -> Path:
    """Save a model whose second layer has the names of a wrapped model."""

    def renamed(state: dict[str, Any]) -> dict[str, Any]:
        return {(f"module.{n}" if ".layers.1." in n else n): v for n, v in state.items()}

    return change_weights(llama(folder), renamed)


def with_another_head(folder: Path) -> Path:
    """Save a model with a head of its own, and a configuration that ties the head."""
    return change_config(llama(folder), tie_word_embeddings=True)
