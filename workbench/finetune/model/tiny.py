"""Built-in models: a tiny T5 and a tiny Llama of random weights.

The models need no model hub, and train in seconds on a CPU core.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from workbench.agent.rank.collectives import broadcast_bytes, rank
from workbench.finetune.data.rows import Example
from workbench.finetune.model.files.opened import without_sharding
from workbench.finetune.model.shapes import model_config
from workbench.finetune.model.text.chat import special_words
from workbench.finetune.model.text.tokenizer import END, PAD, START, train_tokenizer
from workbench.finetune.options.model.models import TINY_LLAMA, model_family
from workbench.finetune.recipe.tiny_t5 import tiny_t5

# Enough for the vocabulary, and under a second; 16,000 rows of WikiSQL take four seconds.
_TOKENIZER_ROWS = 4000


def make(name: str, tokenizer: Any, seed: int, *, scores: bool = False) -> Any:
    if name != TINY_LLAMA:
        return tiny_t5(model_config(name), tokens=len(tokenizer), seed=seed)
    torch.manual_seed(seed)
    shape = {**model_config(name), "vocab_size": -(-len(tokenizer) // 8) * 8}
    # The range is about 1 / sqrt(hidden size); Llama's own 0.02 fits sizes of some thousands. In
    # 150 steps of 12 rows that ask for a question's aggregate and column, 0.02 reached a loss of
    # 2.9 (rate 5e-3), and 0.08 a loss of 2.3 (rate 4e-3).
    own = {
        "initializer_range": 0.08,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    if scores:
        # transformers would cut the inner model at once under ZeRO-3, and the initial weights would
        # come from empty tensors. DeepSpeed cuts the whole model later.
        with without_sharding():
            config = AutoConfig.for_model(**shape, **own, num_labels=1)
            return LlamaForSequenceClassification(config)
    return LlamaForCausalLM(AutoConfig.for_model(**shape, **own))


def tokenizer_for_all(
    name: str,
    examples: Sequence[Example],
    wording: str = "",
    chat_template: str | None = None,
) -> Any:
    """Learn a tokenizer on rank 0 and send the tokenizer to every rank; a collective."""
    from tokenizers import Tokenizer

    causal = model_family(name) == "causal"
    made = None
    if rank() == 0:
        step = max(1, -(-len(examples) // _TOKENIZER_ROWS))  # rounded up
        sample = examples[::step]
        texts = []
        for example in sample:
            texts += _said(example)
        # The wording of the prompt stands in every row.
        if wording:
            texts += [wording] * len(sample)
        made = train_tokenizer(texts, causal=causal).encode()
    # Only one rank learns the tokenizer: pods share no file system, and ties may be resolved
    # differently.
    learned = broadcast_bytes(made).decode()
    start = {"bos_token": START} if causal else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(learned),
        pad_token=PAD,
        eos_token=END,
        **start,
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        tokenizer.add_special_tokens({"extra_special_tokens": special_words(chat_template)})
    return tokenizer


def _said(example: Example) -> list[str]:
    if not example.messages:
        return [example.source, example.target]
    texts = [turn["content"] for turn in example.messages]
    for turn in example.messages:
        texts += [json.dumps(call) for call in turn.get("tool_calls", ())]
    texts += [json.dumps(tool) for tool in example.tools]
    return texts
