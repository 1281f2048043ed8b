"""The tokenizer of the built-in models, learned from texts. Needs `tokenizers` alone, so a notebook may call it."""

from __future__ import annotations

from collections.abc import Sequence

PAD, END, START = "<pad>", "</s>", "<s>"
VOCABULARY = 4096


def train_tokenizer(
    texts: Sequence[str], *, vocabulary: int = VOCABULARY, causal: bool = False
) -> str:
    """Learn a byte-level BPE tokenizer from texts.

    Every text comes back exactly as it went in: bytes have no unknown token, and nothing is normalised. Digits stand
    alone, so that a number never seen is spelled, and can be copied, digit by digit.

    Args:
        texts: What it learns from.
        vocabulary: Tokens at most.
        causal: Begin texts with `<s>`, as Llama's tokenizer does, instead of ending them with `</s>`, as T5's does.

    Returns:
        The tokenizer as JSON, as `tokenizers` reads it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, *([START] if causal else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    added = START if causal else END
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{added} $A" if causal else f"$A {added}",
        special_tokens=[(added, tokenizer.token_to_id(added))],
    )
    return str(tokenizer.to_str())
