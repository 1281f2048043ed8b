"""The model and tokenizer of a job: from the hub, from a folder, or the built-in tiny T5.

Code that comes with a model is never run: `trust_remote_code` stays False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from workbench.jobs.data import Example
from workbench.jobs.ranks import broadcast_bytes, rank
from workbench.spec.model import ModelKind, model_kind

__all__ = ["Loaded", "initial", "load", "parameter_count", "train_tokenizer"]

_VOCABULARY = 4096
_TOKENIZER_ROWS = 4000  # enough for the vocabulary, and under a second; 16,000 rows of WikiSQL take four
_PAD, _END = "<pad>", "</s>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model with its tokenizer."""

    model: Any
    """An encoder-decoder model of transformers, in FP32."""
    tokenizer: Any
    """Its tokenizer."""


def load(name: str, examples: Sequence[Example], *, seed: int) -> Loaded:
    """Load the model that a job names; every rank must call it, and all get the same weights.

    Args:
        name: `tiny-t5`, a folder, or a hub id.
        examples: The training rows, from whose text the built-in model's tokenizer is made.
        seed: Seed of the built-in model's weights.

    Raises:
        ConfigError: When the name is none of the three.
    """
    kind = model_kind(name)
    if kind is ModelKind.BUILTIN:
        return _tiny_t5(_tokenizer_for_all(examples), seed)
    place = str(Path(name).expanduser()) if kind is ModelKind.FOLDER else name
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    model = AutoModelForSeq2SeqLM.from_pretrained(place, trust_remote_code=False, dtype=torch.float32)
    return Loaded(model=model, tokenizer=tokenizer)


def initial(name: str, tokenizer: Any, *, seed: int) -> Loaded:
    """Load the model that a job named once more, as it was before its first step.

    Args:
        name: `tiny-t5`, a folder, or a hub id.
        tokenizer: The tokenizer that the run saved; the built-in model's is its own.
        seed: Seed of the built-in model's weights.
    """
    if model_kind(name) is not ModelKind.BUILTIN:
        return load(name, (), seed=seed)
    return _tiny_t5(tokenizer, seed)


def parameter_count(model: torch.nn.Module) -> int:
    """Count the parameters of the whole model, also where ZeRO-3 left this rank only a part of each."""
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())


def train_tokenizer(texts: Sequence[str], *, vocabulary: int = _VOCABULARY) -> str:
    """Learn a byte-level BPE tokenizer from texts.

    Every text comes back exactly as it went in: bytes have no unknown token, and nothing is normalised. Digits stand
    alone, so that a number never seen is spelled, and can be copied, digit by digit.

    Returns:
        The tokenizer as JSON, as `tokenizers` reads it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_PAD, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, tokenizer.token_to_id(_END))]
    )
    return str(tokenizer.to_str())


def _tiny_t5(tokenizer: Any, seed: int) -> Loaded:
    set_seed(seed)
    model = T5ForConditionalGeneration(_tiny_config(len(tokenizer)))
    _look_at_neighbours(model)
    return Loaded(model=model, tokenizer=tokenizer)


def _look_at_neighbours(model: Any) -> None:
    # A model that copies names must know what came before a word. Learning that from nothing takes most of a short
    # run: with some heads looking at a neighbour from the start, 600 steps of 12 rows of wikisql-mini gave 69 % exact
    # answers instead of 27 %. The rows are T5's buckets of relative positions: itself, one and two before, one after.
    itself, before, before_that, after = 0, 1, 2, 17
    with torch.no_grad():
        for stack, heads in ((model.encoder, (before, after, itself, before_that)), (model.decoder, (before, itself))):
            bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            for head, bucket in enumerate(heads):
                bias[bucket, head] += 5.0


def _tokenizer_for_all(examples: Sequence[Example]) -> Any:
    from tokenizers import Tokenizer

    made = None
    if rank() == 0:
        sample = examples[:: -(-len(examples) // _TOKENIZER_ROWS)]
        made = train_tokenizer([text for e in sample for text in (e.source, e.target)]).encode()
    # One rank learns and tells the others: pods share no file system, and ties could be broken differently.
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(broadcast_bytes(made).decode()),
        pad_token=_PAD,
        eos_token=_END,
        clean_up_tokenization_spaces=False,
    )


def _tiny_config(vocabulary: int) -> T5Config:
    return T5Config(
        vocab_size=-(-vocabulary // 8) * 8,
        d_model=128,
        d_kv=16,
        d_ff=256,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=8,
        relative_attention_num_buckets=32,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,  # runs with other numbers of ranks follow the same curve only without dropout
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
