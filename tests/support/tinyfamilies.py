"""Tiny models of many families of transformers, and the plain training of each."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from workbench.finetune.data.rows import Example
from workbench.finetune.options.text.prompts import fill

WORDS = ["red", "blue", "green", "say", "it", "twice", "the", "mill", "turns", "and", "cat"]
RATE = 0.05
STEPS = 2
_SPECIAL = ["<pad>", "</s>", "<s>", "<unk>"]
_PAD, _END, _START = 0, 1, 2
_VOCABULARY = 288
_SIZES: Mapping[str, object] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_OLD: Mapping[str, object] = {"vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
_EXPERTS: Mapping[str, object] = {
    **_SIZES,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_PAIRED: Mapping[str, object] = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "decoder_start_token_id": _PAD,
    "forced_eos_token_id": None,
}
_T5: Mapping[str, object] = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": _PAD,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyFamily:
    sizes: Mapping[str, object] = field(default_factory=lambda: _SIZES)
    pairs: bool = False
    """Whether the model is an encoder-decoder."""


FAMILIES: Mapping[str, TinyFamily] = {
    # Decoders with rotary positions.
    "llama": TinyFamily(),
    "mistral": TinyFamily(sizes={**_SIZES, "sliding_window": 8}),
    "qwen2": TinyFamily(),
    "qwen3": TinyFamily(),
    "gemma": TinyFamily(),
    "gemma2": TinyFamily(sizes={**_SIZES, "sliding_window": 8}),
    "gemma3_text": TinyFamily(sizes={**_SIZES, "sliding_window": 8}),
    "phi": TinyFamily(),
    "phi3": TinyFamily(),
    "cohere": TinyFamily(),
    "gpt_neox": TinyFamily(),
    # Decoders with learned positions or biases in the attention.
    "gpt2": TinyFamily(sizes={**_OLD, "n_positions": 128}),
    "opt": TinyFamily(sizes={**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": TinyFamily(
        sizes={"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    ),
    "falcon": TinyFamily(
        sizes={
            "vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "bias": True,
        }
    ),
    "mpt": TinyFamily(
        sizes={"vocab_size": _VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4}
    ),
    # Mixtures of experts.
    "mixtral": TinyFamily(sizes=_EXPERTS),
    "qwen2_moe": TinyFamily(sizes=_EXPERTS),
    "qwen3_moe": TinyFamily(sizes=_EXPERTS),
    "olmoe": TinyFamily(sizes=_EXPERTS),
    "gpt_oss": TinyFamily(sizes={**_EXPERTS, "sliding_window": 8}),
    "granitemoe": TinyFamily(sizes=_EXPERTS),
    "llama4_text": TinyFamily(
        sizes={
            **_EXPERTS,
            "intermediate_size_mlp": 48,
            "moe_layers": [1],
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8,
        }
    ),
    # State spaces.
    "mamba": TinyFamily(
        sizes={"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    ),
    # A multimodal model, taught by rows of text.
    "gemma3": TinyFamily(
        sizes={
            "text_config": {**_SIZES, "sliding_window": 8},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        }
    ),
    # Encoder-decoders.
    "t5": TinyFamily(sizes=_T5, pairs=True),
    "longt5": TinyFamily(sizes=_T5, pairs=True),
    "bart": TinyFamily(sizes=_PAIRED, pairs=True),
    "pegasus": TinyFamily(sizes=_PAIRED, pairs=True),
    "blenderbot": TinyFamily(sizes=_PAIRED, pairs=True),
}

ADAPTED: Mapping[str, TinyFamily] = {
    # Without noise, training chooses the experts with the highest scores, as evaluation does.
    "phimoe": TinyFamily(sizes={**_EXPERTS, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
}
"""Families that are trained with adapters alone."""


def build(name: str, folder: Path) -> str:
    """Save a tiny model without dropout and its tokenizer; return the name of its module."""
    family = {**FAMILIES, **ADAPTED}[name]
    ids = {"pad_token_id": _PAD, "eos_token_id": _END, "bos_token_id": _START}
    config = AutoConfig.for_model(name, **{**family.sizes, **ids})
    for key, value in vars(config).items():
        if isinstance(value, float) and ("drop" in key or "pdrop" in key):
            setattr(config, key, 0.0)
    torch.manual_seed(7)
    auto = AutoModelForSeq2SeqLM if family.pairs else AutoModelForCausalLM
    model = auto.from_config(config).float()
    model.save_pretrained(folder)
    tokenizer(ends=family.pairs).save_pretrained(folder)
    return type(model).__module__


@functools.cache
def tokenizer(*, ends: bool) -> Any:
    """Return a tokenizer of words; with `ends`, the tokenizer itself ends each text."""
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    words.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator([" ".join(row(number)) for number in range(40)], trainer)
    if ends:
        words.post_processor = TemplateProcessing(  # type: ignore[assignment]
            single="$A </s>", special_tokens=[("</s>", _END)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def row(number: int) -> tuple[str, str]:
    """Return question and answer; the lengths differ from row to row."""
    chosen = [WORDS[(3 * number + n) % len(WORDS)] for n in range(2 + number % 7)]
    return f"say {' '.join(chosen)}", " ".join(chosen[: 1 + number % 4])


def write_rows(folder: Path, parts: Mapping[str, Iterable[int]]) -> None:
    """Write rows by their numbers, a file for each part."""
    for name, numbers in parts.items():
        lines = []
        for question, answer in map(row, numbers):
            lines.append(Example(source=question, target=answer).to_json() + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    first_eval_loss: float
    losses: Sequence[float]
    eval_loss: float


def plain(folder: Path, *, pairs: bool, train: Sequence[int], evaluation: Sequence[int]) -> Trained:
    """Train by transformers and torch alone, each row for itself, without padding."""
    words = AutoTokenizer.from_pretrained(folder)
    model = read(folder, pairs=pairs)
    return taught(model, words, pairs=pairs, train=train, evaluation=evaluation)


def taught(
    model: Any, words: Any, *, pairs: bool, train: Sequence[int], evaluation: Sequence[int]
) -> Trained:
    """Train the weights of a model that have gradients."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    first = eval_loss(model, words, evaluation, pairs=pairs)
    losses = []
    model.train()
    for _ in range(STEPS):
        total, count = _loss(model, words, train, pairs=pairs)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = eval_loss(model, words, evaluation, pairs=pairs)
    return Trained(first_eval_loss=first, losses=losses, eval_loss=last)


def read(folder: Path, *, pairs: bool) -> Any:
    auto = AutoModelForSeq2SeqLM if pairs else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def eval_loss(model: Any, words: Any, rows: Sequence[int], *, pairs: bool) -> float:
    model.eval()
    with torch.no_grad():
        total, count = _loss(model, words, rows, pairs=pairs)
    return float(total / count)


def _loss(model: Any, words: Any, rows: Sequence[int], *, pairs: bool) -> tuple[Any, int]:
    """Return the sum of the cross entropies of the answers' tokens, and their number."""
    total = torch.zeros(())
    count = 0
    for number in rows:
        question, answer = row(number)
        source = words(question if pairs else fill("plain", question)).input_ids
        target = words(answer).input_ids
        if pairs:
            labels = torch.tensor([target])
            begun = torch.tensor([[_PAD, *target[:-1]]])
            scores = model(input_ids=torch.tensor([source]), decoder_input_ids=begun).logits
        else:
            target = [*target, _END]
            labels = torch.tensor([target])
            scores = model(input_ids=torch.tensor([[*source, *target]])).logits
            scores = scores[:, len(source) - 1 : -1]
        flat = scores.float().reshape(-1, scores.shape[-1])
        total = total + torch.nn.functional.cross_entropy(flat, labels[0], reduction="sum")
        count += len(target)
    return total, count
