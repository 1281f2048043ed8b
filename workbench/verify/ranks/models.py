"""Make a model of random weights on a pod, and hang in an evaluation."""

from __future__ import annotations

from collections.abc import Mapping

_CALLS: list[int] = []


def write_llama(
    hidden: int,
    layers: int,
    texts: list[str],
    shape: Mapping[str, object] | None = None,
    dtype: str = "float32",
) -> int:
    """Write a Llama of random weights and its tokenizer into the folder `model`.

    `shape` has other values of `LlamaConfig`. Return the number of parameters.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from workbench.data import train_tokenizer

    learned = train_tokenizer(texts, causal=True)
    from tokenizers import Tokenizer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(learned),
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
    )
    # Sizes are multiples of 8, as GPUs compute best with them.
    sizes: dict[str, object] = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 32 * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    config = LlamaConfig(**{**sizes, **(shape or {})})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    return int(sum(p.numel() for p in model.parameters()))


def hang_at_second_call(predictions: list[str], references: list[str]) -> float:
    """A metric of the trainer: sleep in the second evaluation, while the other ranks wait."""
    import time

    del predictions, references
    _CALLS.append(1)
    if len(_CALLS) > 1:
        time.sleep(3600)
    return 0.0
