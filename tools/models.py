"""Print five models to start with and the GPU that each needs: `python -m tools.models`.

The models are shapes alone, so nothing is downloaded. `docs/choose-model.md` has the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from workbench import FineTune, gpus_for

__all__ = ["MODELS", "row_of"]

_LLAMA = {"model_type": "llama", "vocab_size": 128256}
_QWEN = {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2}
# Shapes from the config.json of each model on the hub: layers, hidden size, inner size, heads.
MODELS: Mapping[str, tuple[tuple[int, int, int, int], Mapping[str, object]]] = {
    "HuggingFaceTB/SmolLM2-135M": (
        (30, 576, 1536, 9),
        {"model_type": "llama", "vocab_size": 49152, "num_key_value_heads": 3},
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": ((24, 896, 4864, 14), _QWEN),
    "Qwen/Qwen2.5-1.5B-Instruct": ((28, 1536, 8960, 12), _QWEN),
    "meta-llama/Llama-3.2-3B-Instruct": (
        (28, 3072, 8192, 24),
        {**_LLAMA, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        (32, 4096, 14336, 32),
        {**_LLAMA, "num_key_value_heads": 8, "tie_word_embeddings": False},
    ),
}
_WAYS: Mapping[str, Literal["none", "lora", "qlora"]] = {
    "whole": "none",
    "LoRA": "lora",
    "QLoRA": "qlora",
}
_TOKENS = 1024
_GPU = {"a GPU without limit": (10_000.0, True)}


def main() -> None:
    print("| model | parameters |", *(f" {way} |" for way in _WAYS), sep="")
    print("|---|---|", "---|" * len(_WAYS), sep="")
    for name in MODELS:
        print(row_of(name))


def row_of(name: str) -> str:
    """Return a model's line: its parameters, and GiB of a single GPU for each way of training."""
    (layers, hidden, inner, heads), others = MODELS[name]
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        **others,
    }
    cells = []
    parameters = 0
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for peft in _WAYS.values():
            job = FineTune(
                model=folder,
                peft=peft,
                precision="bf16",
                per_device_train_batch_size=1,
                gradient_checkpointing=True,
                max_source_length=_TOKENS,
            )
            table = gpus_for(
                job,
                gpus_on_pod=1,
                most_pods=1,
                techniques=["single"],
                kinds=_GPU,
                lengths=(_TOKENS - 1, 1),
            )
            needed = table.rows[0].plan
            assert needed is not None
            cells.append(f"{needed.gpu_gib:.1f}")
            # Adapters count as parameters of the whole.
            parameters = parameters or table.parameters
    return f"| `{name}` | {parameters / 1e9:.2f} B | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
